"""Runs that start from a state that no seed gives: newcomers fetch it, before the run begins and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import CHAIN, ChainPart, HashesRequest, kind_of, unpack_request
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.interop.hf import state_tensors
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.starting import STRAGGLER_SECONDS
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config, until

T = TypeVar("T")


def started(folder: Path, play: Callable[[MemorySwarm], Awaitable[T]]) -> T:
    """A swarm whose organiser has values of another seed than the run's."""
    plain = small_config()
    layout = Layout(state_tensors(plain.model), plain.sync.tile_values)
    store = StateStore(folder / ORGANISER / "state", layout)
    root = store.create_initial(InitialState(layout, plain.run.seed + 1, 0.5)).root
    store.close()
    config = small_config(f"run.initial_state={root.hex()}")
    return in_swarm(folder, play, config)


def root_of(config: Config) -> bytes:
    return bytes.fromhex(config.run.initial_state)


def test_the_first_peers_have_it_before_the_run_begins(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        for peer in swarm.peers.values():
            assert peer.chain.commit(0).manifest.state_root == root_of(swarm.config)
            assert any("that the run starts from" in text for text in peer.said)
            assert not any("fetching the state of the run" in text for text in peer.said)
        await swarm.until_round(2)
        check_agreement(swarm)

    started(tmp_path, play)


def test_a_newcomer_fetches_the_newest_state_also_without_the_organiser(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await swarm.kill_organiser()
        late = await swarm.add("late")
        assert late.round >= 3
        assert any("fetching the state of the run" in text for text in late.said)
        await swarm.until_round(late.round + 1)
        check_agreement(swarm)
        await swarm.start_organiser()

    started(tmp_path, play)


def test_without_anybody_who_has_it_a_peer_waits(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        await swarm.kill_organiser()
        joining = [asyncio.create_task(swarm.add(name)) for name in "abc"]
        await until(lambda: all(name in swarm.peers for name in "abc"))
        await until(lambda: all(any("could not be fetched" in text for text in p.said) for p in swarm.peers.values()))
        await swarm.start_organiser()
        await asyncio.gather(*joining)
        assert swarm.organiser.chain.commit(0).manifest.state_root == root_of(swarm.config)
        await swarm.until_round(1)

    started(tmp_path, play)


def test_a_stranger_fills_no_log_of_who_waits_for_the_state(tmp_path: Path) -> None:
    class Talker:
        words = 0

        async def on_call(self, caller: PeerId, request: bytes) -> bytes:
            raise RemoteProtocolError("nothing here")

        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            self.words += 1
            raise RemoteProtocolError(f"word {self.words}")

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        await swarm.kill_organiser()
        talker, name = Talker(), PeerId("talker")
        await swarm.network.peer(name).transport.serve(talker)
        ghost: Any = SimpleNamespace(is_up=True, joined=False, name=name)
        swarm.peers[name] = ghost
        join = asyncio.create_task(swarm.add("a"))
        began = asyncio.get_running_loop().time()
        await until(lambda: talker.words > 100)
        seconds = asyncio.get_running_loop().time() - began
        said = swarm.peers[PeerId("a")].said
        assert 1 <= sum("could not be fetched yet" in text for text in said) <= 1 + seconds / 60
        join.cancel()
        await asyncio.wait([join])
        del swarm.peers[name]
        await swarm.start_organiser()

    started(tmp_path, play)


class Stranger:
    """Gives what it calls genesis, or is never done."""

    def __init__(self, swarm: MemorySwarm, name: str, genesis: Commit | None = None) -> None:
        self.swarm, self.name, self.genesis = swarm, PeerId(name), genesis

    async def come(self) -> None:
        """All who ask for sources hear of it."""
        ghost: Any = SimpleNamespace(is_up=True, joined=False, name=self.name)
        self.swarm.peers[self.name] = ghost
        await self.swarm.network.peer(self.name).transport.serve(self)

    def go(self) -> None:
        del self.swarm.peers[self.name]
        self.swarm.network.kill(self.name)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return pack(Envelope(self.name))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        if self.genesis is None:
            await asyncio.Event().wait()
        if self.genesis is None or kind_of(unpack_request(request)) != CHAIN:
            raise RemoteProtocolError("nothing here")
        return Blob(pack(ChainPart((pack(self.genesis),))))


def test_what_a_stranger_calls_genesis_is_checked(tmp_path: Path) -> None:
    """Who believed it would take the run for begun, and fetch its start only when it begins."""

    async def play(swarm: MemorySwarm) -> None:
        stranger = Stranger(swarm, "stranger", MadeRun().genesis(sha256(b"another")))
        await stranger.come()
        await swarm.start(["a", "b", "c"])
        stranger.go()
        assert not any("fetching the state of the run" in text for peer in swarm.up for text in peer.said)
        await swarm.until_round(1)

    started(tmp_path, play)


def test_strangers_that_are_never_done_do_not_hold_up_those_who_wait_for_the_run(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        strangers = [Stranger(swarm, f"stranger {number}") for number in range(2 * Transfers.PARALLEL)]
        for stranger in strangers:
            await stranger.come()
        await swarm.start(["a", "b", "c"])
        assert asyncio.get_running_loop().time() < Transfers.LEAST_SECONDS / 2
        for stranger in strangers:
            stranger.go()

    started(tmp_path, play)


def test_nor_a_newcomer_that_members_can_give_the_newest_state(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        strangers = [Stranger(swarm, f"stranger {number}") for number in range(3)]
        for stranger in strangers:
            await stranger.come()
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3, "abc")
        await swarm.kill_organiser()
        late = await asyncio.wait_for(swarm.add("late"), Transfers.LEAST_SECONDS / 2)
        assert late.round >= 3
        for stranger in strangers:
            stranger.go()
        await swarm.start_organiser()

    started(tmp_path, play)


def test_nor_does_a_stranger_that_gives_hashes_at_once_and_no_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The organiser's link may need longer than a straggler has for its list of hashes."""
    hash_list = Transfers.hash_list

    async def slow(self: Transfers, holders: Sequence[PeerId], root: Hash, round: int) -> tuple[Hash, ...]:
        if ORGANISER in holders:
            await asyncio.sleep(2 * STRAGGLER_SECONDS)
        return await hash_list(self, holders, root, round)

    class Hoarder(Stranger):
        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            asked = unpack_request(request)
            if not isinstance(asked, HashesRequest):
                raise RemoteProtocolError("nothing here")
            return Blob(b"".join(self.swarm._organiser_store.version(0).tile_hashes))

    async def play(swarm: MemorySwarm) -> None:
        monkeypatch.setattr(Transfers, "hash_list", slow)
        stranger = Hoarder(swarm, "stranger")
        await stranger.come()
        await asyncio.wait_for(swarm.start(["a", "b", "c"]), 5 * Transfers.LEAST_SECONDS)
        stranger.go()

    started(tmp_path, play)


def test_nor_those_who_wait_for_somebody_to_have_that_state(tmp_path: Path) -> None:
    """Whoever answers that it has none yet is asked again, although others have not answered."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        await swarm.kill_organiser()
        strangers = [Stranger(swarm, f"stranger {number}") for number in range(2 * Transfers.PARALLEL)]
        for stranger in strangers:
            await stranger.come()
        joining = [asyncio.create_task(swarm.add(name)) for name in "abc"]
        await until(lambda: all(name in swarm.peers for name in "abc"))
        await asyncio.sleep(5.0)
        began = asyncio.get_running_loop().time()
        await swarm.start_organiser()
        await asyncio.gather(*joining)
        assert asyncio.get_running_loop().time() - began < Transfers.LEAST_SECONDS / 2
        for stranger in strangers:
            stranger.go()

    started(tmp_path, play)
