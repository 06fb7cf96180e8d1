"""What others send is never trusted: bytes of any kind, forged words, and signed nonsense from a member."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.messages import Signed, Work
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import (
    ChainRequest,
    HashesRequest,
    PackedRequest,
    Request,
    RunRequest,
    TilesRequest,
    ValuesRequest,
    pack_request,
)
from spes_p2p.ids import PeerId, sha256
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack, unpack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer
from tests.sync.swarm_cases import check_agreement, commits, in_swarm, small_config, until

Path_ = tuple[str | int, ...]
NO_WORK = pack(Contribution(PeerId("a"), 0, 0, 0))


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


async def refused(coroutine: Any) -> bool:
    """Whether it ended well or was refused; anything else is raised."""
    try:
        await coroutine
    except RemoteProtocolError:
        return True
    return False


def heard_calls(life: PretendPeer) -> list[tuple[PeerId, bytes]]:
    """Records what others call from now on."""
    calls: list[tuple[PeerId, bytes]] = []
    real = life.driver.answers.on_call

    async def on_call(caller: PeerId, request: bytes) -> bytes:
        calls.append((caller, request))
        return await real(caller, request)

    life.driver.answers.on_call = on_call  # type: ignore[method-assign]
    return calls


def test_bytes_of_any_kind_are_answered_or_refused(folder: Path) -> None:
    rng = random.Random(1)

    def spoilt(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.randint(1, len(changed))] if rng.random() < 0.3 else changed)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        life = peer(swarm, "a")
        calls = heard_calls(life)
        await swarm.until_round(2)
        real = calls[:: max(1, len(calls) // 40)]
        ask = life.driver.answers.on_call
        refusals = [await refused(ask(who, spoilt(data))) for who, data in real for _ in range(5)]
        assert sum(refusals) > len(refusals) // 2
        head = life.driver.core.tip_hash
        requests: list[Request] = [
            RunRequest(), ChainRequest(1, 9), ValuesRequest(head, 0, 2, NO_WORK), HashesRequest(head, 0),
            TilesRequest((head, head)),
        ]  # fmt: skip
        for request in requests:
            for _ in range(40):
                await refused(life.driver.answers.on_fetch(PeerId("b"), spoilt(pack_request(request))))
        for _ in range(100):
            junk = rng.randbytes(rng.randrange(200))
            assert await refused(life.driver.answers.on_call(PeerId("b"), junk))
            assert await refused(life.driver.answers.on_fetch(PeerId("b"), junk))
        await swarm.until_round(4)
        check_agreement(swarm)

    in_swarm(folder, play)


def test_extreme_requests_are_refused(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        driver, head = peer(swarm, "a").driver, peer(swarm, "a").driver.core.tip_hash
        for first, count in ((-1, 1), (0, 0), (0, -5), (2**62, 1), (0, 2**62), (-(2**62), 2**62), (9, 2)):
            values, hashes = ValuesRequest(head, first, count, NO_WORK), HashesRequest(head, first)
            assert await refused(driver.answers.on_fetch(PeerId("b"), pack_request(values)))
            assert await refused(driver.answers.on_fetch(PeerId("b"), pack_request(hashes)))
            assert not await refused(driver.answers.on_fetch(PeerId("b"), pack_request(ChainRequest(first, count))))
        for tiles in ((), (b"x",), (bytes(33),), (bytes(32),) * 65, (bytes(32),)):
            packed = pack(PackedRequest("tiles", pack((tiles,))))
            assert await refused(driver.answers.on_fetch(PeerId("b"), packed))

    in_swarm(folder, play)


def test_who_is_no_member_of_the_newest_manifest_is_served_as_a_stranger(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)

        def known_to(name: str) -> set[str]:
            server = swarm.network.peer(name).transport._server
            assert server is not None
            return {one for one in ("a", "b", "c", "d", ORGANISER) if server._is_member(PeerId(one))}

        assert known_to("a") == {"a", "b", "c", ORGANISER}
        assert known_to(ORGANISER) == {"a", "b", "c", ORGANISER}
        await swarm.add("d")
        await until(lambda: peer(swarm, "d").driver.core.state.is_member())
        assert "d" in known_to("d")

    in_swarm(folder, play)


def test_a_crowd_of_new_identities_is_named_in_several_rounds(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(1)
        crowd = [f"new {number}" for number in range(11)]
        for name in crowd:
            await swarm.add(name)
        await until(lambda: all(peer(swarm, name).driver.core.state.is_member() for name in crowd), 300.0)
        await until(lambda: len(commits(swarm)[-1].manifest.members) == 2 + len(crowd))
        named = [{member.peer for member in commit.manifest.members} for commit in commits(swarm)]
        for before, after in pairwise(named):
            assert len(after - before) <= max(4, len(before))
        assert sum(after != before for before, after in pairwise(named)) >= 3  # 2, 6, 12, 13
        await swarm.until_round(len(named) + 1)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=2))


def test_forged_and_tampered_words_are_refused(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        life, victim = peer(swarm, "a"), peer(swarm, "b")
        calls = heard_calls(life)
        await swarm.until_round(2)
        who, data = next((who, data) for who, data in reversed(calls) if who == "b")
        envelope = unpack(Envelope, data)
        (status, *_) = envelope.statuses
        assert not await refused(life.driver.answers.on_call(who, data))
        changed = dataclasses.replace(status.value, sequence=status.value.sequence + 10**6)
        for forged in (
            dataclasses.replace(status, value=changed),
            dataclasses.replace(status, author=PeerId("c")),
            dataclasses.replace(KeySealer(peer(swarm, "c").net.signer).seal(changed), author=PeerId("b")),
            dataclasses.replace(status, public_key=peer(swarm, "c").net.signer.public_key),
        ):
            assert await refused(life.driver.answers.on_call(who, pack(Envelope(who, (forged,)))))
        assert await refused(life.driver.answers.on_call(PeerId("c"), data))  # an envelope of another sender
        own_words_of_c = KeySealer(peer(swarm, "c").net.signer).seal(changed)  # signed by c about b: no harm
        await refused(life.driver.answers.on_call(PeerId("c"), pack(Envelope(PeerId("c"), (own_words_of_c,)))))
        assert life.driver.core.state.others.contacts[victim.name].status.sequence < changed.sequence

    in_swarm(folder, play)


def test_a_peer_of_another_run_is_told_so(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        calls = heard_calls(peer(swarm, "a"))
        await swarm.until_round(1)
        who, data = calls[-1]
        (status, *_) = unpack(Envelope, data).statuses
        sealer = KeySealer(swarm.peers[who].net.signer)
        stranger = sealer.seal(dataclasses.replace(status.value, fingerprint=sha256(b"another run"), work=Work()))
        for handler in (peer(swarm, "a").driver.answers, swarm.organiser):
            with pytest.raises(RemoteProtocolError, match=r"this is run tiny with fingerprint .*join again"):
                await handler.on_call(who, pack(Envelope(who, (stranger,))))

    in_swarm(folder, play)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_member_that_signs_nonsense_breaks_nobody(folder: Path, seed: int) -> None:
    """Whatever one of four signs, the others neither fail nor stop nor come apart."""
    rng = random.Random(seed)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"])
        liar = peer(swarm, "c")
        sealer, call = KeySealer(liar.net.signer), liar.net.transport.call

        async def lie(peer: PeerId, request: bytes, timeout_seconds: float) -> bytes:
            envelope = unpack(Envelope, request)
            if peer in swarm.peers:
                for _ in range(3):
                    wrong = pack(resigned(changed(envelope, rng), sealer))
                    await refused(swarm.peers[peer].driver.answers.on_call(liar.name, wrong))
            return await call(peer, request, timeout_seconds)

        liar.net.transport.call = lie  # type: ignore[method-assign]
        await asyncio.sleep(8)
        reached = min(life.round for life in swarm.up)
        await swarm.until_round(reached + 2)
        assert not any(life.failures for life in swarm.up)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=4), seed)


# ---- changing one thing somewhere in a message ----


def changed(value: Any, rng: random.Random) -> Any:
    """The same message with one other leaf."""
    paths = [path for path in leaves(value) if not {"signature", "public_key", "sender"} & set(path)]
    for path in rng.sample(paths, min(5, len(paths))):
        try:
            return put(value, path, another(get(value, path), rng))
        except (ValueError, TypeError):  # a record that refuses it by itself
            continue
    return value


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from leaves(getattr(value, item.name), (*path, item.name))
    elif value is not None:
        yield path
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


def get(value: Any, path: Path_) -> Any:
    for step in path:
        value = getattr(value, step) if isinstance(step, str) else value[step]
    return value


def put(value: Any, path: Path_, new: Any) -> Any:
    if not path:
        return new
    step, *rest = path
    inner = put(get(value, (step,)), tuple(rest), new)
    if isinstance(step, str):
        return dataclasses.replace(value, **{step: inner})
    return (*value[:step], inner, *value[step + 1 :])


def another(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, -1, 1, 2**62, -(2**62), value + 1, value - 1, rng.randrange(100)])
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1e300, 2 * value])
    if isinstance(value, str):
        return rng.choice(["", "a", "b", "zzz", "quorum"])
    if isinstance(value, bytes):
        return rng.choice([b"", b"x", bytes(32), value[:-1], value + b"1", value[::-1], 2 * value])
    return rng.choice([(), value[:1], value[1:], value + value[:1], value[::-1]])


def resigned(value: Any, sealer: KeySealer) -> Any:
    """Everything that the sealer's peer may sign is signed anew."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {item.name: resigned(getattr(value, item.name), sealer) for item in dataclasses.fields(value)}
        value = dataclasses.replace(value, **inner)
        if isinstance(value, Signed):
            own = sealer.seal(value.value)
            return own if own.author == value.author else value
        return value
    return tuple(resigned(item, sealer) for item in value) if isinstance(value, tuple) else value
