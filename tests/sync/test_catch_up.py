"""Catching up: checked headers first, then only what differs, from whoever has it, going on where it broke off."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.catch_up import CatchUp, Parted
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.choosing import Turns
from spes_p2p.sync.requests import TILES, Request, Serving
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.transfer import Transfers
from spes_p2p.testing.virtual_time import run_virtual
from spes_p2p.wire import unpack
from tests.state.small import file_size_limit
from tests.sync.chains import MadeRun, with_tokens

MADE = MadeRun()
LATE, HOLDER, SECOND = PeerId("late"), PeerId("holder"), PeerId("second")
CHANGED = (0, 3, 4, 5, 9)


class Ahead:
    """Peers that stand on round 2, and one that stands on genesis."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork(1)
        self.folder = folder
        self.given = 0
        self.give = 10**6
        self.holders = {name: self._make(name) for name in (HOLDER, SECOND)}
        self.store = MADE.store(folder / "late")
        self.chain = Chain(folder / "chain")
        self.chain.append(self.commits[0])
        self.tasks = Tasks(lambda error: None)
        self.catch_up = self.fresh()

    def fresh(self) -> CatchUp:
        transfers = Transfers(self.network.peer(LATE).transport, MADE.layout, lambda: 5.0)
        transfers._turns = Turns(1)  # in order, so that it is known where it breaks off
        return CatchUp(MADE.info, MADE.rules, MADE.keys.verify, self.chain, self.store, transfers, self.tasks.in_thread)

    def _make(self, name: PeerId) -> Chain:
        store, chain = MADE.store(self.folder / name), Chain(self.folder / f"{name}-chain")
        commits = [MADE.genesis(store.version(0).root)]
        for round in (1, 2):
            staging = store.stage(round, round - 1)
            for tile_id in CHANGED:
                staging.write_state(tile_id, bytes([round]) * (4 * MADE.layout.tiles[tile_id].size))
            root = MADE.layout.root_of(staging.finish())
            staging.publish()
            commits.append(MADE.certified(MADE.child(commits[-1].manifest, root, sha256(b"wire"))))
        for commit in commits:
            chain.append(commit)
        self.commits = commits
        self.serving = Serving(MADE.info, chain, store, lambda parent, first, count: None)
        return chain

    async def open(self) -> Ahead:
        for name in self.holders:
            await self.network.peer(name).transport.serve(self)
        return self

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        raise RemoteProtocolError("no calls here")

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack(Request, request)
        if asked.kind == TILES:
            self.given += len(asked.hashes) // 32
            if self.given > self.give:
                raise RemoteProtocolError("no more")
        return self.serving.answer(asked)


def test_headers_then_the_tiles_that_differ(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, HOLDER, 2)
        assert newest == ahead.commits[2]
        assert ahead.chain.length == 3
        staging = await ahead.catch_up.state(newest.manifest, 0, [HOLDER, SECOND])
        staging.publish()
        assert ahead.store.version(2).root == newest.manifest.state_root
        assert ahead.given == len(CHANGED)

    run_virtual(main())


def test_it_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, HOLDER, 2)
        ahead.give = 4
        with pytest.raises(NetworkError, match="nobody gave"):
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
        await ahead.catch_up.headers(0, HOLDER, 2)
        assert await ahead.fresh().headers(0, HOLDER, 2) == ahead.commits[2]
        assert await ahead.fresh().headers(0, HOLDER, 1) == ahead.commits[1]  # a holder that is not so far

    run_virtual(main())


def test_another_history_is_compared_and_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        other = MADE.certified(MADE.child(ahead.commits[0].manifest, sha256(b"another state"), sha256(b"wire")))
        ahead.chain.append(other)
        with pytest.raises(Parted, match="another history"):
            await ahead.catch_up.headers(0, HOLDER, 2)
        meeting = await ahead.catch_up.meet(1, HOLDER, 2)
        assert meeting.common == ahead.commits[0].manifest
        assert (meeting.ours, meeting.theirs) == ((other,), tuple(ahead.commits[1:]))
        assert ahead.chain.newest == other

    run_virtual(main())


def test_headers_without_a_state_do_not_count_as_ours(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        other = MADE.child(ahead.commits[0].manifest, sha256(b"another state"), sha256(b"wire"))
        ahead.chain.append(MADE.certified(other))
        meeting = await ahead.catch_up.meet(0, HOLDER, 2)
        assert meeting.ours == ()
        assert meeting.winner == ahead.commits[2]

    run_virtual(main())


def test_the_last_common_manifest_is_found_far_back(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        parent, mine = ahead.commits[1], ahead.chain
        mine.append(parent)
        for round in range(2, 40):
            parent = MADE.certified(MADE.child(parent.manifest, sha256(b"%d" % round), sha256(b"wire")))
            mine.append(parent)
        meeting = await ahead.catch_up.meet(39, HOLDER, 2)
        assert meeting.common == ahead.commits[1].manifest
        assert (len(meeting.ours), meeting.theirs) == (38, (ahead.commits[2],))

    run_virtual(main())


def test_a_holder_with_nothing_newer(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        await ahead.catch_up.headers(0, HOLDER, 2)
        with pytest.raises(NetworkError, match="has nothing after round 2"):
            await ahead.catch_up.headers(2, HOLDER, 2)

    run_virtual(main())


@pytest.mark.parametrize("wrong", ["unsigned", "cut"])
def test_a_chain_that_does_not_hold_is_refused(tmp_path: Path, wrong: str) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        chain = ahead.holders[SECOND]
        bad = with_tokens(ahead.commits[1], 5) if wrong == "unsigned" else ahead.commits[1]
        chain.append(bad) if wrong == "unsigned" else chain._path(1).write_bytes(b"cut")
        with pytest.raises(RemoteProtocolError):
            await ahead.catch_up.headers(0, SECOND, 2)
        assert ahead.chain.length == 1

    run_virtual(main())


def test_a_full_disk_is_no_fault_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        ahead = await Ahead(tmp_path).open()
        newest = await ahead.catch_up.headers(0, HOLDER, 2)
        with file_size_limit(10), pytest.raises(StorageFull):
            await ahead.catch_up.state(newest.manifest, 0, [HOLDER])
        (await ahead.catch_up.state(newest.manifest, 0, [HOLDER])).publish()
        assert ahead.store.version(2).root == newest.manifest.state_root

    run_virtual(main())
