"""Damage to the committed state, found and mended while a peer runs and when it starts."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.config.schema import Config
from spes_p2p.consensus.actions import Notice
from spes_p2p.errors import NetworkError, StateError, TileDamaged
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import PeerId
from spes_p2p.state.store import StateStore, Version
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.sync.scrub import ASK_EVERY, Scrubber, TileRepairer
from spes_p2p.sync.tasks import Tasks
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.state.small import commit_round, small_store
from tests.state.test_mending import flip
from tests.sync.swarm_cases import check_agreement, in_swarm, small_config, until

LONG_ROUNDS = "sync.steps_per_round=300"
"""Half a minute: nothing is committed while a test looks."""


def slow_run(peers: int = 3) -> Config:
    return small_config(LONG_ROUNDS, peers=peers)


def said(peer: PretendPeer) -> list[str]:
    return [notice.text for notice in peer.notices if notice.kind == "damage"]


def tip_version(peer: PretendPeer) -> Version:
    return peer.store.version(peer.round)


def whole(version: Version) -> bool:
    return not list(version.damaged_tiles())


def test_a_flipped_bit_is_found_and_mended_from_the_others(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        a = swarm.peers[PeerId("a")]
        flip(tip_version(a), 3)
        flip(tip_version(a), 17)
        await until(lambda: whole(tip_version(a)), 10.0)
        assert "block-00000.f32: tile 3 " in said(a)[0]
        assert all("was repaired" in text for text in said(a))
        assert a.round == 1
        await swarm.until_round(2)
        check_agreement(swarm)

    in_swarm(folder, play, slow_run())


def test_what_is_damaged_is_never_served(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(1)
        a, b = (swarm.peers[PeerId(name)] for name in "ab")
        version = tip_version(a)
        flip(version, 9)
        transfers = Transfers(b.net.transport, swarm.layout, lambda: 5.0)
        wanted = {9: version.tile_hashes[9]}

        async def take(tiles: object) -> None:
            raise AssertionError(f"it was served: {tiles}")

        with pytest.raises(NetworkError, match="is not here"):
            await transfers.tiles(wanted, [a.name], take)
        await until(lambda: whole(version), 3.0)  # asking was enough for it to be noticed

    in_swarm(folder, play, slow_run(2))


def test_damage_that_nobody_can_mend_is_said_once_and_gone_with_the_next_commit(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(1)
        for peer in swarm.up:
            flip(tip_version(peer), 2)
        await swarm.until_round(3)
        check_agreement(swarm)
        for peer in swarm.up:
            (text,) = said(peer)
            assert "tile 2 " in text
            assert "cannot be repaired yet: no reachable peer has it" in text

    in_swarm(folder, play, slow_run(2))


def test_damage_that_a_commit_did_not_replace_ends_the_peer(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    failures: list[BaseException] = []
    notices: list[Notice] = []

    async def play() -> None:
        tasks = Tasks(failures.append)
        transfers = Transfers(MemoryNetwork(0).peer(PeerId("me")).transport, store.layout, lambda: 1.0)
        mender = TileRepairer(store, transfers, tasks.in_thread)
        scrubber = Scrubber(mender, lambda: 0, tuple, notices.append, failures.append, 1.0)
        lost, replaced = store.layout.tile_ids_of(3)[0], store.layout.tile_ids_of(1)[0]
        flip(store.version(0), lost)
        flip(store.version(0), replaced)
        for _ in range(2 * ASK_EVERY):
            await scrubber.look(store.version(0))
        assert len(notices) == 2
        commit_round(store, 1, [1])
        assert not failures
        await scrubber.look(store.version(1))
        (error,) = failures
        assert f"round-00000001/block-00003.f32: tile {lost} " in str(error)
        assert isinstance(error, StateError)
        assert error.fix

    asyncio.run(play())


@pytest.mark.parametrize("behind", [False, True])
def test_a_peer_starts_with_a_damaged_state_and_gets_what_it_lost(folder: Path, behind: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        a = swarm.peers[PeerId("a")]
        version = tip_version(a)
        await a.kill()
        flip(version, 0)
        os.truncate(version.block_path(2), 5)
        if behind:
            await swarm.until_round(5, ["b", "c"])
        again = await swarm.add("a")
        assert again.round == (max(peer.round for peer in swarm.up) if behind else 1)
        assert whole(tip_version(again))
        assert any("block-00002.f32 has 5 bytes instead of" in text for text in again.said)
        await swarm.until_round(again.round + 1)
        check_agreement(swarm)

    in_swarm(folder, play, small_config() if behind else slow_run())


def test_a_damaged_list_of_hashes_needs_nobody(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        await swarm.until_round(1)
        a = swarm.peers[PeerId("a")]
        version = tip_version(a)
        await a.kill()
        (version.folder / "hashes.bin").write_bytes(b"damaged")
        again = await swarm.add("a")
        assert again.round == version.round
        await swarm.until_round(version.round + 1)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=1))


def test_a_peer_alone_with_a_damaged_state_says_which_file_and_does_not_start(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        await swarm.until_round(1)
        a = swarm.peers[PeerId("a")]
        version = tip_version(a)
        await a.kill()
        await swarm.kill_organiser()
        flip(version, 4)
        with pytest.raises(TileDamaged, match=r"block-0000\d.f32: tile 4 ") as caught:
            await swarm.add("a")
        assert "while others of the run are up" in caught.value.fix
        await swarm.start_organiser()

    in_swarm(folder, play, small_config(peers=1))


def checkpointed(peer: PretendPeer) -> Path:
    version = tip_version(peer)
    return save_checkpoint(peer.folder / "checkpoints", version, version.round, {}, {}, 2)


def test_a_lost_state_is_rebuilt_from_a_checkpoint_without_anybody(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        await swarm.until_round(2)
        a = swarm.peers[PeerId("a")]
        name, round = checkpointed(a).name, a.round
        await a.kill()
        shutil.rmtree(a.folder / "state")
        again = await swarm.add("a")
        assert any(f"rebuilt from {name}" in text for text in again.said)
        assert again.round == round
        await swarm.until_round(round + 1)
        check_agreement(swarm)

    in_swarm(folder, play, slow_run(1), max_virtual_seconds=36000.0)


def test_a_state_that_is_there_is_not_rebuilt(folder: Path) -> None:
    """Headers may be far ahead of it, where catching up was cut off."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(1)
        a, b = (swarm.peers[PeerId(name)] for name in "ab")
        checkpointed(a)
        await a.kill()
        await swarm.until_round(5, ["b"])
        for path in b.chain.directory.iterdir():
            shutil.copy(path, a.chain.directory)
        again = await swarm.add("a")
        assert not any("rebuilt" in text for text in again.said)
        await until(lambda: again.round >= 5)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(peers=2))


def test_who_lost_all_but_a_checkpoint_fetches_what_is_not_in_it(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        a = swarm.peers[PeerId("a")]
        saved = checkpointed(a)
        flip(Version(saved / "state", 1, swarm.layout), 6)
        await a.kill()
        for lost in ("state", "chain", "votes"):
            shutil.rmtree(a.folder / lost)
        before = a.net.transport.traffic.received
        again = await swarm.add("a")
        await until(lambda: again.round >= 1)
        assert again.net.transport.traffic.received - before < 4 * swarm.layout.num_values
        check_agreement(swarm)

    in_swarm(folder, play, slow_run())


def test_the_store_of_a_checkpoint_of_another_shape_is_left_alone(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    folder = save_checkpoint(tmp_path / "checkpoints", store.version(0), 0, {}, {}, 1)
    (folder / "state" / "block-00000.f32").unlink()
    other = StateStore(tmp_path / "other", store.layout)
    other.spare_folders = lambda: [folder / "state", tmp_path / "nothing"]
    assert list(other.recall({0: store.version(0).tile_hashes[0]})) == []
