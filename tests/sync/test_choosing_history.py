"""A run that has gone on twice for good: both histories train on, until somebody chooses one (real drivers)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from spes_p2p.consensus.messages import DEGRADED, QUORUM, Commit
from spes_p2p.errors import ConfigError, NetworkError
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.peer.organising import ForkedRun, decide, histories_of
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.histories import checked_prefix, choose_child
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch, Words
from spes_p2p.sync.report import RunReport, read_report
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer, PretendWork
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config, until

CONFIG = small_config("swarm.final_rounds=2")
FAST, SLOW = PretendWork(step_seconds=0.1), PretendWork(step_seconds=1.6)
SETTLED_SECONDS = 120.0


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


class Surroundings:
    """What `Connection` and the bootstrap node have around their drivers: records, and the organiser's words."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._parts: dict[str, tuple[OrganiserWatch, Announcer]] = {}

    async def add(self, name: str) -> None:
        swarm, net = self._swarm, self._swarm.network.peer(name)
        if name == ORGANISER:
            obey, failed, chain = swarm.seat.obey, swarm.server_failures.append, swarm.organiser.chain
        else:
            life = peer(swarm, name)
            obey, failed, chain = life.driver.obey, life.failures.append, life.chain
        check = EnvelopeChecker(net.verifier).check
        watch = OrganiserWatch(swarm.info, net.directory, check, obey, failed, swarm.folder / name / WORDS_FILE)
        announcer = Announcer(_Node(swarm, name, chain), swarm.info, net, failed)
        self._parts[name] = watch, announcer
        await watch.start()
        await announcer.start()

    async def remove(self, name: str) -> None:
        for part in self._parts.pop(name):
            await part.stop()

    async def stop(self) -> None:
        for name in list(self._parts):
            await self.remove(name)


class _Node:
    """One of the swarm, as its announcer speaks for it."""

    def __init__(self, swarm: MemorySwarm, name: str, chain: Chain) -> None:
        self._swarm, self._name, self._chain = swarm, name, chain

    def describe(self) -> PeerRecord:
        return _record(self._swarm, self._name, self._chain)

    def newest(self) -> tuple[Commit, float] | None:
        return self._chain.newest_received

    def acquaintances(self) -> tuple[PeerId, ...]:
        return ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        if self._name != ORGANISER:
            peer(self._swarm, self._name).driver.greet(one for one in known if one != self._name)


def _record(swarm: MemorySwarm, name: str, chain: Chain) -> PeerRecord:
    return PeerRecord(
        run_id=swarm.info.run_id, peer=PeerId(name), addresses=swarm.network.peer(name).transport.addresses,
        version="0", round=max(0, chain.length - 1), step=0, tokens=0, tokens_per_second=0.0, owned=(),
        role="bootstrap" if name == ORGANISER else "peer", client_mode=False, joined_at_seconds=0,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def parted(swarm: MemorySwarm) -> AsyncIterator[tuple[Surroundings, Hash, Hash]]:
    """`a` went on alone for long; then `b` and `c`, a majority of those who were there, came back and went on too.

    Gives the first children of both: by `a` alone, and by the majority.
    """
    around = Surroundings(swarm)
    await swarm.start("abc", FAST)
    for name in (*"abc", ORGANISER):
        await around.add(name)
    await swarm.until_round(2)
    for name in "bc":
        await around.remove(name)
        await peer(swarm, name).kill()
    stood = max(peer(swarm, name).round for name in "abc")
    await swarm.until_round(stood + 12, "a")
    swarm.network.partition(["b", "c"])
    for name in "bc":
        await swarm.add(name, SLOW)
        await around.add(name)
    a, b = peer(swarm, "a"), peer(swarm, "b")
    await until(lambda: b.round >= stood + 3, 300.0)
    pairs = zip(*([chain.commit(at).certificate for at in range(b.chain.length)] for chain in (a.chain, b.chain)))
    alone, majority = next(pair for pair in pairs if pair[0].manifest != pair[1].manifest)
    assert (alone.kind, majority.kind) == (DEGRADED, QUORUM)
    swarm.network.heal()
    await until(lambda: all("parted" in kinds(peer(swarm, name)) for name in "abc"), SETTLED_SECONDS)
    await until(lambda: any("the run has split" in text for text in swarm.organiser_said), SETTLED_SECONDS)
    before = {name: peer(swarm, name).round for name in "abc"}
    await until(lambda: all(peer(swarm, name).round > before[name] + 1 for name in "abc"), 300.0)
    assert histories(swarm) == {alone.manifest: "a", majority.manifest: "bc"}  # both train on
    try:
        yield around, alone.manifest, majority.manifest
    finally:
        await around.stop()


def kinds(life: PretendPeer) -> list[str]:
    return [notice.kind for notice in life.notices]


def histories(swarm: MemorySwarm) -> dict[Hash, str]:
    """Who stands where, by the first manifest that not all have."""
    chains = {life.name: life.chain for life in swarm.up}
    rounds = range(min(chain.length for chain in chains.values()))
    names = [{name: chain.commit(at).certificate.manifest for name, chain in chains.items()} for at in rounds]
    first = next((found for found in names if len(set(found.values())) > 1), {})
    return {head: "".join(sorted(name for name in first if first[name] == head)) for head in set(first.values())}


async def look(swarm: MemorySwarm) -> ForkedRun:
    return await histories_of(swarm.network.peer("somebody"), swarm.info.run_id, None)


async def report(swarm: MemorySwarm) -> RunReport:
    """As `spes-p2p status` reads it."""
    node = swarm.network.peer("watcher")
    return await read_report(node, None, 0.0)


async def choose(swarm: MemorySwarm, digits: str, key: str = ORGANISER) -> Hash:
    """As `spes-p2p run choose` does, by somebody who has the key and takes no part in the run."""
    node, seen = swarm.network.peer("somebody"), await look(swarm)
    fork, side = choose_child(seen.forks, digits)
    await decide(node, seen.info, fork, side, KeySealer(swarm.network.keys.signer(PeerId(key))))
    return Hash(bytes.fromhex(side.child))


def told_lost(life: PretendPeer) -> list[str]:
    return [notice.text for notice in life.notices if notice.kind == "fork"]


def play_parted(folder: Path, play: Callable[[MemorySwarm, Surroundings, Hash, Hash], Awaitable[None]]) -> None:
    async def main(swarm: MemorySwarm) -> None:
        async with parted(swarm) as (around, alone, majority):
            await play(swarm, around, alone, majority)

    in_swarm(folder, main, CONFIG)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("side", ["alone", "majority"])
def test_the_organisers_choice_settles_it_also_for_who_restarts(folder: Path, side: str) -> None:
    """Everybody comes over, also `c`, which restarts meanwhile; who stands on what was chosen loses nothing."""

    async def play(swarm: MemorySwarm, around: Surroundings, alone: Hash, majority: Hash) -> None:
        seen = await look(swarm)
        [fork] = seen.forks
        standing = {child: set(side.peers) - {ORGANISER} for child, side in fork.sides.items()}
        assert standing == {alone.hex(): {"a"}, majority.hex(): {"b", "c"}}
        assert (await report(swarm)).to_json()["forks"][0]["sides"].keys() == fork.sides.keys()
        text = "\n".join(fork.texts(0.0))
        assert all(short(child) in text for child in (alone, majority))
        chosen, loser = (alone, majority) if side == "alone" else (majority, alone)
        [lost] = fork.lost_texts(chosen.hex())
        assert short(loser) in lost
        assert await choose(swarm, chosen.hex()[:10]) == chosen
        await around.remove("c")
        await peer(swarm, "c").kill()
        await swarm.add("c", SLOW)
        await around.add("c")
        first = fork.round + 1
        chains = [*(life.chain for life in swarm.up), swarm.organiser.chain]
        await until(
            lambda: all((c := chain.find(first)) and c.certificate.manifest == chosen for chain in chains),
            SETTLED_SECONDS,
        )
        await until(lambda: all(life.driver.core.state.is_member() for life in swarm.up), SETTLED_SECONDS)
        losers = "a" if side == "majority" else "b"
        assert any("tokens are lost" in text for text in told_lost(peer(swarm, losers)))
        winner = "b" if side == "majority" else "a"
        assert told_lost(peer(swarm, winner)) == []
        check_agreement(swarm)
        kept = [swarm.folder / name / WORDS_FILE for name in (*"abc", ORGANISER)]
        await until(lambda: all(path.exists() for path in kept), SETTLED_SECONDS)
        assert (await look(swarm)).forks == (await report(swarm)).forks == ()

    play_parted(folder, play)


def test_a_users_own_word_moves_this_peer_alone(folder: Path) -> None:
    async def play(swarm: MemorySwarm, around: Surroundings, alone: Hash, majority: Hash) -> None:
        await around.remove("c")
        await peer(swarm, "c").kill()
        swarm.follow["c"] = alone.hex()[:10]
        await swarm.add("c", SLOW)
        await around.add("c")
        await until(lambda: histories(swarm) == {alone: "ac", majority: "b"}, SETTLED_SECONDS)
        await choose(swarm, majority.hex()[:10])
        await until(lambda: histories(swarm) == {alone: "c", majority: "ab"}, SETTLED_SECONDS)
        assert told_lost(peer(swarm, "b")) == []

    play_parted(folder, play)


def test_the_organiser_may_think_again(folder: Path) -> None:
    """The choice that was signed last counts: the majority never hears of the first one, and stays."""

    async def play(swarm: MemorySwarm, around: Surroundings, alone: Hash, majority: Hash) -> None:
        [fork] = (await look(swarm)).forks
        node, sealer = swarm.network.peer("somebody"), KeySealer(swarm.network.keys.signer(ORGANISER))
        swarm.network.partition(["b", "c"])
        parent = Hash(bytes.fromhex(fork.parent))
        await decide(node, swarm.info, fork, fork.sides[alone.hex()], sealer)
        words = await decide(node, swarm.info, fork, fork.sides[majority.hex()], sealer)
        assert words.children == {parent: majority}
        swarm.network.heal()
        await until(lambda: histories(swarm) == {}, SETTLED_SECONDS)
        assert peer(swarm, "b").chain.commit(fork.round + 1).certificate.manifest == majority
        assert (told_lost(peer(swarm, "b")), told_lost(peer(swarm, "c"))) == ([], [])

    play_parted(folder, play)


def test_of_two_choices_in_one_moment_the_one_without_effect_says_so(folder: Path) -> None:
    async def play(swarm: MemorySwarm, around: Surroundings, alone: Hash, majority: Hash) -> None:
        [fork] = (await look(swarm)).forks
        sealer = KeySealer(swarm.network.keys.signer(ORGANISER))
        desks = [swarm.network.peer(name) for name in ("somebody", "another")]
        said = await asyncio.gather(
            *(
                decide(desk, swarm.info, fork, fork.sides[child.hex()], sealer)
                for desk, child in zip(desks, (alone, majority), strict=True)
            ),
            return_exceptions=True,
        )
        [words] = [one for one in said if isinstance(one, Words)]
        [error] = [one for one in said if isinstance(one, ConfigError)]
        [child] = words.children.values()
        assert f"the run goes on with {child.hex()[:10]}" in str(error)
        assert "repeat the command" in error.fix

    play_parted(folder, play)


def test_what_may_not_be_chosen_is_said_and_moves_nobody(folder: Path) -> None:
    async def play(swarm: MemorySwarm, around: Surroundings, alone: Hash, majority: Hash) -> None:
        forks = (await look(swarm)).forks
        with pytest.raises(ConfigError, match=f"no history begins with ffffffffff; there are .*{short(alone)}"):
            choose_child(forks, "f" * 10)
        with pytest.raises(ConfigError, match="several histories begin with"):
            choose_child(forks, "")
        with pytest.raises(ConfigError, match="one history"):
            choose_child((), alone.hex())
        with pytest.raises(NetworkError, match="no node of the run has confirmed it"):
            await choose(swarm, alone.hex(), key="a")
        assert histories(swarm) == {alone: "a", majority: "bc"}
        assert not (swarm.folder / "b" / WORDS_FILE).exists()

    play_parted(folder, play)


@pytest.mark.parametrize("text", ["", "abc", "spes1abcdef", "a" * 65])
def test_what_names_no_child_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--follow is .*, not the first digits"):
        checked_prefix(text, "--follow")
