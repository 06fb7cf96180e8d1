"""Catching up: checked headers first, then only what differs, from whoever has it, going on where it broke off."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import pytest

from spes_p2p.codecs.lossy import encode
from spes_p2p.consensus.actions import CatchUp as CatchUpAction
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.exchange import requests
from spes_p2p.exchange.rates import Turns
from spes_p2p.exchange.requests import TilesRequest, WiresRequest, unpack_request
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.state.staging import Staging
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync import catch_up
from spes_p2p.sync.candidate_state import OTHER
from spes_p2p.sync.catch_up import CatchUp, HistoryDiverged
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.coding import stage_tile
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual
from tests.state.small import file_size_limit
from tests.sync.chains import MadeRun, with_tokens
from tests.sync.swarm_cases import small_config

MADE = MadeRun()
MADE_INT4 = MadeRun(small_config("sync.codec=int4", "sync.expert_codec=int4", peers=1))
LATE, HOLDER, SECOND = PeerId("late"), PeerId("holder"), PeerId("second")
CHANGED = (0, 3, 4, 5, 9)


def asked(holder: PeerId, round: int) -> CatchUpAction:
    """Of somebody who says that it stands on that round, on a manifest that nobody knows."""
    return CatchUpAction(holder, round, NO_HASH)


class Ahead:
    """Peers that stand on round 2, and one that stands on genesis."""

    made = MADE

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork(1)
        self.folder = folder
        self.given = 0
        self.give = 10**6
        self.hides_wires = False
        self.holders = {name: self._make(name) for name in (HOLDER, SECOND)}
        self.store = self.made.store(folder / "late")
        self.chain = Chain(folder / "chain")
        self.chain.append(self.commits[0])
        self.tasks = Tasks(lambda error: None)
        self.catch_up = self.fresh()

    def fresh(self) -> CatchUp:
        made = self.made
        transfers = Transfers(self.network.peer(LATE).transport, self.made.layout, lambda: 5.0)
        transfers._turns = Turns(1)  # in order, so that it is known where it breaks off
        return CatchUp(made.info, made.rules, made.keys.verify, self.chain, self.store, transfers, self.tasks.in_thread)

    def _make(self, name: PeerId) -> Chain:
        store, chain = self.made.store(self.folder / name), Chain(self.folder / f"{name}-chain")
        commits = [self.made.genesis(store.version(0).root)]
        for round in (1, 2):
            staging = store.stage(round, round - 1)
            wire_root = self._train(staging, commits[-1].manifest)
            root = self.made.layout.root_of(staging.finish())
            staging.publish()
            commits.append(self.made.certified(self.made.child(commits[-1].manifest, root, wire_root)))
        for commit in commits:
            chain.append(commit)
        self.commits = commits
        self.serving = Serving(self.made.info, chain, store, lambda parent, first, count: None)
        return chain

    def _train(self, staging: Staging, parent: Manifest) -> Hash:
        """What a round changes; the root of what it hands out."""
        for tile_id in CHANGED:
            staging.write_state(tile_id, bytes([staging.round]) * (4 * self.made.layout.tiles[tile_id].size))
        return sha256(b"wire")

    async def open(self) -> Self:
        for name in self.holders:
            await self.network.peer(name).transport.serve(self)
        return self

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        raise RemoteProtocolError("no calls here")

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack_request(request)
        if isinstance(asked, WiresRequest) and self.hides_wires:
            raise RemoteProtocolError("dropped")
        if isinstance(asked, TilesRequest):
            self.given += len(asked.hashes)
            if self.given > self.give:
                raise RemoteProtocolError("no more")
        return self.serving.answer(asked, caller)


class HandedOut(Ahead):
    """The same where each round changes all tiles and hands the changes out in four bits."""

    made = MADE_INT4

    def _train(self, staging: Staging, parent: Manifest) -> Hash:
        hashes = []
        for piece in self.made.slices(parent):
            for tile_id in piece.tile_ids:
                size = self.made.layout.tiles[tile_id].size
                change = np.random.default_rng((staging.round, tile_id)).standard_normal(size).astype(np.float32)
                hashes.append(stage_tile(staging, None, tile_id, encode("int4", change)))
        return sha256(*hashes)

    async def arrive(self) -> None:
        """What the peer that is behind does."""
        newest = self.commits[2].manifest
        (await self.catch_up.state(newest, 0, [HOLDER, SECOND])).publish()
        assert self.store.version(2).root == newest.state_root
        assert self.store.stagings == ()


def test_headers_then_the_tiles_that_differ(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        assert newest == ahead.commits[2]
        assert ahead.chain.length == 3
        staging = await ahead.catch_up.state(newest.manifest, 0, [HOLDER, SECOND])
        staging.publish()
        assert ahead.store.version(2).root == newest.manifest.state_root
        assert ahead.given == len(CHANGED)

    run_virtual(main())


def test_another_historys_state_comes_while_ours_goes_on(tmp_path: Path) -> None:
    """Our rounds pass its round before it is whole: what has come stays, and so does what it begins with."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        other, store = ahead.commits[2].manifest, ahead.store
        ahead.give = 4
        with pytest.raises(NetworkError, match="no peer could provide"):
            await ahead.catch_up.state(other, 0, [HOLDER], OTHER)
        for round in (1, 2, 3):
            ours = store.stage(round, round - 1)
            ours.write_state(0, bytes([99]) * (4 * MADE.layout.tiles[0].size))
            ours.finish()
            ours.publish()
        assert [one.parent for one in store.stagings] == [store.version(0)]
        ahead.give, ahead.given = 10**6, 0
        (await ahead.catch_up.state(other, 0, [SECOND], OTHER)).publish()
        assert ahead.given == len(CHANGED) - 4
        assert store.version(2).root == other.state_root
        assert store.stagings == ()

    run_virtual(main())


def test_what_came_of_a_lighter_history_goes(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        ahead.give = 4
        with pytest.raises(NetworkError, match="no peer could provide"):
            await ahead.catch_up.state(ahead.commits[2].manifest, 0, [HOLDER], OTHER)
        assert [one.round for one in ahead.store.stagings] == [2]
        ahead.catch_up.drop_other()
        assert ahead.store.stagings == ()

    run_virtual(main())


def test_it_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        ahead.give = 4
        with pytest.raises(NetworkError, match="no peer could provide"):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        ahead.give, ahead.given = 10**6, 0
        (await ahead.catch_up.state(newest.manifest, 0, [SECOND])).publish()
        assert ahead.given == len(CHANGED) - 4
        assert ahead.store.version(2).root == newest.manifest.state_root

    run_virtual(main())


def test_headers_on_disk_are_not_fetched_again(tmp_path: Path) -> None:
    """A crash came after the headers: the state is still the old one."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        await ahead.catch_up.headers(0, asked(HOLDER, 2))
        assert await ahead.fresh().headers(0, asked(HOLDER, 2)) == ahead.commits[2]
        first = ahead.commits[1]
        stands = CatchUpAction(HOLDER, 1, first.certificate.manifest)  # a holder that is not so far
        assert await ahead.fresh().headers(0, stands) == first

    run_virtual(main())


def test_another_history_is_compared_and_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        other = MADE.certified(MADE.child(ahead.commits[0].manifest, sha256(b"another state"), sha256(b"wire")))
        ahead.chain.append(other)
        with pytest.raises(HistoryDiverged, match="another history"):
            await ahead.catch_up.headers(0, asked(HOLDER, 2))
        meeting = await ahead.catch_up.meet(1, asked(HOLDER, 2))
        assert meeting.common == ahead.commits[0].manifest
        assert (meeting.ours, meeting.theirs) == ((other,), tuple(ahead.commits[1:]))
        assert ahead.chain.newest == other

    run_virtual(main())


@pytest.mark.parametrize("more", [0, 1])
def test_another_history_is_held_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """Whoever has been an elector can make one without an end."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        size = sum(len(pack(commit)) for commit in ahead.commits[1:])
        monkeypatch.setattr(catch_up, "LONGEST_LINE_BYTES", size - more)
        if more:
            with pytest.raises(RemoteProtocolError, match="2 rounds that are not ours: too many to keep in memory"):
                await ahead.catch_up.meet(0, asked(HOLDER, 2))
        else:
            assert len((await ahead.catch_up.meet(0, asked(HOLDER, 2))).theirs) == 2

    run_virtual(main())


def test_of_a_line_on_top_of_our_tip_only_the_beginning_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one, whose states nobody had, is on our disk beyond it."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        line = [ahead.commits[1]]
        for round in range(2, 19):
            line.append(MADE.certified(MADE.child(line[-1].manifest, sha256(b"state %d" % round), sha256(b"wire"))))
        ahead.serving.chain.switch(line)
        monkeypatch.setattr(requests, "MAX_COMMITS_AT_ONCE", 2)
        monkeypatch.setattr(catch_up, "LONGEST_LINE_BYTES", sum(len(pack(commit)) for commit in line[:12]))
        ahead.chain.append(MADE.certified(MADE.child(ahead.commits[0].manifest, sha256(b"nowhere"), sha256(b"wire"))))
        meeting = await ahead.catch_up.meet(0, asked(HOLDER, 18))
        assert (meeting.ours, meeting.theirs) == ((), tuple(line[:2]))
        with pytest.raises(RemoteProtocolError, match="too many"):  # for who stands beside it, all of it counts
            await ahead.catch_up.meet(1, asked(HOLDER, 18))
        assert await ahead.catch_up.take_up(meeting.theirs, asked(HOLDER, 18)) == line[-1]
        assert [ahead.chain.commit(round) for round in range(1, 19)] == line

    run_virtual(main())


def test_nothing_is_taken_beyond_what_the_holder_stands_on(tmp_path: Path) -> None:
    """It may know certificates whose state nobody has any more."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        first, other = ahead.commits[1], MADE.child(ahead.commits[0].manifest, sha256(b"another"), sha256(b"wire"))
        stands = CatchUpAction(HOLDER, 1, first.certificate.manifest)
        assert await ahead.catch_up.headers(0, stands) == first
        ahead.chain.append(MADE.certified(other))
        meeting = await ahead.catch_up.meet(1, stands)
        assert [len(meeting.ours), meeting.theirs] == [1, (first,)]

    run_virtual(main())


def test_a_chain_ends_where_its_holder_says_that_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment later it may be further, but not without an end."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        monkeypatch.setattr(catch_up, "MOST_BEYOND", 1)
        with pytest.raises(RemoteProtocolError, match="keeps sending more rounds than it announced, 3 by now"):
            await ahead.catch_up.headers(0, asked(HOLDER, 1))
        assert ahead.chain.length == 3  # what was checked stays
        assert await ahead.catch_up.headers(0, asked(HOLDER, 2)) == ahead.commits[2]

    run_virtual(main())


def test_headers_without_a_state_do_not_count_as_ours(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        other = MADE.child(ahead.commits[0].manifest, sha256(b"another state"), sha256(b"wire"))
        ahead.chain.append(MADE.certified(other))
        meeting = await ahead.catch_up.meet(0, asked(HOLDER, 2))
        assert meeting.ours == ()
        assert meeting.theirs[-1] == ahead.commits[2]

    run_virtual(main())


def test_the_last_common_manifest_is_found_far_back(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        parent, mine = ahead.commits[1], ahead.chain
        mine.append(parent)
        for round in range(2, 40):
            parent = MADE.certified(MADE.child(parent.manifest, sha256(b"%d" % round), sha256(b"wire")))
            mine.append(parent)
        meeting = await ahead.catch_up.meet(39, asked(HOLDER, 2))
        assert meeting.common == ahead.commits[1].manifest
        assert (len(meeting.ours), meeting.theirs) == (38, (ahead.commits[2],))

    run_virtual(main())


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_commit_of_ours_where_histories_meet(tmp_path: Path, damaged: int) -> None:
    """The last common one need not be read; without one of those after it the two cannot be compared."""

    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        parent = ahead.commits[1]
        ahead.chain.append(parent)
        for _ in range(2):
            parent = MADE.certified(MADE.child(parent.manifest, sha256(b"another state"), sha256(b"wire")))
            ahead.chain.append(parent)
        (ahead.chain.directory / f"{damaged:08d}.commit").write_bytes(b"damaged")
        if damaged == 1:
            meeting = await ahead.catch_up.meet(3, asked(HOLDER, 2))
            assert meeting.common == ahead.commits[1].manifest
            assert (len(meeting.ours), meeting.theirs) == (2, (ahead.commits[2],))
        else:
            with pytest.raises(NetworkError, match=r"cannot be compared .*2\.commit is damaged"):
                await ahead.catch_up.meet(3, asked(HOLDER, 2))

    run_virtual(main())


def test_a_holder_with_nothing_newer(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        await ahead.catch_up.headers(0, asked(HOLDER, 2))
        with pytest.raises(NetworkError, match="has nothing after round 2"):
            await ahead.catch_up.headers(2, asked(HOLDER, 2))

    run_virtual(main())


@pytest.mark.parametrize("wrong", ["unsigned", "cut"])
def test_a_chain_that_does_not_hold_is_refused(tmp_path: Path, wrong: str) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        chain = ahead.holders[SECOND]
        bad = with_tokens(ahead.commits[1], 5) if wrong == "unsigned" else ahead.commits[1]
        chain.append(bad) if wrong == "unsigned" else (chain.directory / "00000001.commit").write_bytes(b"cut")
        with pytest.raises(RemoteProtocolError):
            await ahead.catch_up.headers(0, asked(SECOND, 2))
        assert ahead.chain.length == 1

    run_virtual(main())


def test_a_full_disk_is_no_fault_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        with file_size_limit(10), pytest.raises(StorageFull):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        (await ahead.catch_up.state(newest.manifest, 0, [HOLDER])).publish()
        assert ahead.store.version(2).root == newest.manifest.state_root

    run_virtual(main())


def test_a_full_disk_while_the_own_disk_is_looked_through(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        ahead.store.spare_folders = lambda: [tmp_path / HOLDER / "round-00000002"]
        with file_size_limit(10), pytest.raises(StorageFull):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        (await ahead.catch_up.state(newest.manifest, 0, [HOLDER])).publish()
        assert ahead.store.version(2).root == newest.manifest.state_root
        assert ahead.given == 0

    run_virtual(main())


def test_rounds_are_gone_through_by_what_they_handed_out(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await HandedOut(tmp_path).open()
        await ahead.catch_up.headers(0, asked(HOLDER, 2))
        await ahead.arrive()
        assert ahead.given == 2 * MADE_INT4.layout.num_model_tiles

    run_virtual(main())


@pytest.mark.parametrize("again", [1, 3])
@pytest.mark.parametrize("limit_bytes", [10, 1000])
def test_after_a_full_disk_rounds_are_gone_through_anew(tmp_path: Path, limit_bytes: int, again: int) -> None:
    """With ten bytes no tile finds room; with 1,000 those of the columns do, and the shared ones do not."""

    async def main() -> None:
        ahead = await HandedOut(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        for _ in range(again):
            with file_size_limit(limit_bytes), pytest.raises(StorageFull):
                await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        await ahead.arrive()

    run_virtual(main())


def test_after_a_full_disk_in_a_later_round_the_earlier_one_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await HandedOut(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        tiles = MADE_INT4.layout.num_model_tiles
        ahead.give = tiles
        with pytest.raises(NetworkError):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        ahead.give, ahead.given = 10**6, 0
        with file_size_limit(10), pytest.raises(StorageFull):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        ahead.given = 0
        await ahead.arrive()
        assert ahead.given == tiles, "of the second round alone"

    run_virtual(main())


def test_a_replay_that_breaks_off_ends_what_tiles_were_staged_before(tmp_path: Path) -> None:
    """First nobody has what was handed out, then somebody has, then nobody again."""

    async def main() -> None:
        ahead = await HandedOut(tmp_path).open()
        newest = await ahead.catch_up.headers(0, asked(HOLDER, 2))
        for hidden, give in ((True, 4), (False, MADE_INT4.layout.num_model_tiles + 4)):
            ahead.hides_wires, ahead.give, ahead.given = hidden, give, 0
            with pytest.raises(NetworkError, match="no peer could provide"):
                await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        ahead.hides_wires, ahead.give = True, 10**6
        assert await ahead.catch_up.aim(newest, 0, [HOLDER]) == newest
        await ahead.arrive()

    run_virtual(main())
