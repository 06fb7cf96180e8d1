"""One path for join, catch-up and repair: the missing headers, checked, then only the tiles that differ, by hash.

Headers go to disk as soon as they are checked, and tiles that are staged stay so: what breaks off is taken up again
where it ended. Which holder is asked, and when, is decided elsewhere; so is what becomes of the state that was fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from spes_p2p.consensus.actions import CatchUp as CatchUpAction
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.place import Line
from spes_p2p.consensus.rules import RunRules
from spes_p2p.errors import LocalProtocolError, NetworkError, RemoteProtocolError, StateError
from spes_p2p.exchange.requests import WiresRequest
from spes_p2p.exchange.transfers import InThread, Transfers, fill_state
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.state.layout import VALUE_BYTES, Layout
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.candidate_state import FETCHED, OTHER
from spes_p2p.sync.chain import Chain, check_links
from spes_p2p.sync.coding import stage_tile
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.merge import merge_columns
from spes_p2p.sync.outer import outer_of
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
MOST_BEYOND = 4096
"""Most rounds beyond what a holder announced, or beyond ours: former electors could sign without end."""
MOST_STEPS = 64
"""So many rounds are gone through one by one; who is further behind fetches a state."""
LONGEST_LINE_BYTES = 2**28
"""What another history may have on top of the last common round, packed; held in memory it is some ten times that."""


@dataclass(frozen=True)
class ForkPoint:
    """Two histories that meet: the last common manifest, and what each has on top of it."""

    common: Manifest
    ours: Line
    theirs: Line


class Fetched(Protocol):
    """A complete state on this disk that is not the committed one yet."""

    def publish(self) -> object: ...


class HistoryDiverged(RemoteProtocolError):
    """The other's commits do not follow from ours: one of the two goes before the other (`place`)."""


class TooManyRounds(RemoteProtocolError):
    """The holder goes on and on. What it sent by then is on disk."""


@dataclass(eq=False)
class CatchUp:
    """Brings a chain and a store forward. Everything raises NetworkError or RemoteProtocolError for others' faults."""

    _info: RunInfo
    _rules: RunRules
    _check: CheckSignature
    _chain: Chain
    _store: StateStore
    _transfers: Transfers
    _in_thread: InThread

    def __post_init__(self) -> None:
        self._under_way: dict[str, tuple[Hash, int, Staging]] = {}
        """By label."""
        self._replaying: Staging | None = None
        self._replayed: Staging | None = None

    async def headers(self, tip_round: int, action: CatchUpAction) -> Commit:
        """The commit whose state the holder has, with all before it on disk.

        Raises HistoryDiverged where its history is another one than ours.
        """
        await self._extend(action.holder, self._chain.length, action.round + MOST_BEYOND)
        newest = _announced(self._chain, action)
        if newest is None or newest.manifest.round <= tip_round:
            raise NetworkError(f"{short(action.holder)} has nothing after round {tip_round}")
        return newest

    async def headers_instead(self, tip_round: int, holder: PeerId, most: int) -> Commit:
        """The newest commit that `holder` has, with all before it on disk, for who has not even the tip's state.

        Whatever else is here after the tip gives way: nobody may have the states of it. Raises HistoryDiverged where
        the holder is not on top of our tip, and TooManyRounds after round `most`.
        """
        common = await self._last_common(holder, self._chain.length - 1)
        first = common.manifest.round + 1
        if first <= tip_round:
            raise HistoryDiverged(f"{short(holder)} is on another history of the run from round {first} on")
        newest = await self._extend(holder, first, most)
        return newest or self._chain.commit(first - 1)

    async def _extend(self, holder: PeerId, first: int, most: int) -> Commit | None:
        last: Commit | None = None
        before = self._chain.commit(first - 1) if first else None
        while part := await commits_from(self._transfers, holder, first):
            if before is not None and part[0].manifest.parent != manifest_hash(before.manifest):
                raise HistoryDiverged(f"{short(holder)} is on another history of the run from round {first} on")
            await self.append(part, before)
            last = before = part[-1]
            first = last.manifest.round + 1
            if first > most:
                raise TooManyRounds(f"{short(holder)} keeps sending more rounds than it announced, {first} by now")
        return last

    async def note(self, commit: Commit) -> None:
        """Appends the next certificate to our chain while the state of an earlier one is still being fetched."""
        newest = self._chain.newest
        if newest is None or commit.manifest.parent != newest.certificate.manifest:
            return
        with contextlib.suppress(RemoteProtocolError):
            await self.append((commit,), newest)

    async def append(self, part: Sequence[Commit], before: Commit | None) -> None:
        """Puts commits that follow `before` on disk, once they are checked."""

        def write() -> None:
            check_links(tuple(part), before, self._info, self._rules, self._check)
            for commit in part:
                self._chain.append(commit)

        await self._in_thread(write)

    async def meet(self, tip_round: int, action: CatchUpAction) -> ForkPoint:
        """What we, at `tip_round`, and the holder have on top of our last common manifest.

        Its commits are checked, up to what it said that it stands on; nothing is written. What we know beyond our own
        state does not count. Of a line that goes on from our tip only its beginning comes (see `take_up`).
        """
        holder = action.holder
        parent = before = await self._last_common(holder, min(action.round, tip_round))
        common = parent.manifest.round
        try:
            ours = tuple(self._chain.commit(at) for at in range(common + 1, tip_round + 1))
        except StateError as error:  # whoever comes with another history must not end this peer
            raise NetworkError(f"another history cannot be compared with this peer's: {error} ({error.fix})") from error
        theirs: list[Commit] = []
        size = 0
        while before.certificate.manifest != action.head:
            part = await commits_from(self._transfers, holder, common + 1 + len(theirs))
            if not part:
                break
            ends = (at for at, commit in enumerate(part, 1) if commit.certificate.manifest == action.head)
            part = part[: next(ends, len(part))]
            await self._in_thread(partial(check_links, part, before, self._info, self._rules, self._check))
            theirs += part
            before = part[-1]
            size += sum(len(pack(commit)) for commit in part)
            if size > LONGEST_LINE_BYTES:
                raise RemoteProtocolError(
                    f"{short(holder)} has {len(theirs)} rounds that are not ours: too many to keep in memory"
                )
            if common == tip_round:
                break
        return ForkPoint(parent.manifest, ours, tuple(theirs))

    async def take_up(self, theirs: Sequence[Commit], action: CatchUpAction) -> Commit:
        """Puts commits that follow our tip, as `meet` has checked them, in the place of what is here beyond it, and
        then what the holder has after them: the one that it stands on.
        """
        await self._in_thread(partial(self._chain.switch, theirs))
        await self._extend(action.holder, self._chain.length, action.round + MOST_BEYOND)
        return _announced(self._chain, action) or theirs[-1]

    async def _last_common(self, holder: PeerId, newest: int) -> Commit:
        """The last commit whose manifest both have, looking back in growing strides; as the holder gives it.

        Ours may be damaged. Its certificate is not checked.
        """
        low, stride = newest, 1
        while True:
            theirs = await commits_from(self._transfers, holder, low)
            old = [commit for commit in theirs if commit.manifest.round <= newest]
            same = [one for one in old if self._chain.has(manifest_hash(one.manifest), one.manifest.round)]
            if same:
                return same[-1]
            if low == 0:
                raise RemoteProtocolError(f"{short(holder)} has another genesis, or none")
            low, stride = max(0, low - stride), 2 * stride

    async def aim(self, newest: Commit, base_round: int, holders: Sequence[PeerId]) -> Commit:
        """The commit whose state to fetch: one that we have begun to fetch if it is still available, else the newest.

        Donors keep a state that we have begun with. Starting again with every new round would never end.
        """
        if FETCHED not in self._under_way or self._under_way[FETCHED][1] != base_round:
            return newest
        root, _, staging = self._under_way[FETCHED]
        if (
            not base_round < staging.round < newest.manifest.round
            or not staging.begun
            or not _is_here(self._store, staging)
        ):
            return newest
        begun = self._chain.find(staging.round)
        try:
            await self._transfers.hash_list(holders, root, staging.round)
        except NetworkError:
            return newest
        return begun if begun is not None and begun.manifest.state_root == root else newest

    async def state(
        self, manifest: Manifest, base_round: int, holders: Sequence[PeerId], label: str = FETCHED
    ) -> Fetched:
        """The finished staging of a state: what version `base_round` has is kept, the rest comes from the holders.

        What is in another version or in a checkpoint on this disk is not fetched. Where what the rounds since
        handed out is less than what differs, that is fetched instead. Raises StorageFull, TileDamaged.
        """
        done = self._store.staged(manifest.round, label)
        if done is not None and done.finished is not None and done.finished.root == manifest.state_root:
            return done  # what should have followed found no room
        steps = self._steps(base_round, manifest)
        if steps and (lists := await self._wire_lists(steps, base_round, holders)) is not None:
            with contextlib.suppress(RemoteProtocolError, LocalProtocolError):  # else tile by tile
                return await self._replay(steps, lists, base_round, holders)
        layout = self._store.layout
        base, root = self._store.version(base_round), manifest.state_root
        same = base.root == root  # a round without work, or a renewal: nobody needs to be asked
        theirs = base.tile_hashes if same else await self._transfers.hash_list(holders, root, manifest.round)
        staging = self._staging(manifest, base_round, label)
        pairs = enumerate(zip(base.tile_hashes, theirs, strict=True))
        differ = [at for at, (mine, other) in pairs if mine != other or at in base.damaged]
        wanted = {tile_id: theirs[tile_id] for tile_id in differ}
        await fill_state(staging, wanted, self._store, self._transfers, holders, self._in_thread)
        self._under_way.pop(label, None)
        hashes = await self._in_thread(staging.finish)
        if layout.root_of(hashes) != manifest.state_root:
            self._store.unstage(manifest.round, label)
            raise RemoteProtocolError(f"the state of round {manifest.round} does not hash to its root")
        return staging

    def _steps(self, base_round: int, manifest: Manifest) -> list[Manifest]:
        """The rounds to go through by what they handed out; none where the values that differ are fewer bytes."""
        if self._store.version(base_round).damaged:
            return []
        if not base_round < manifest.round <= min(base_round + MOST_STEPS, self._chain.length - 1):
            return []
        commits = [self._chain.find(round) for round in range(base_round + 1, manifest.round + 1)]
        steps = [commit.manifest for commit in commits if commit is not None]
        if len(steps) < len(commits):  # an archive's chain goes over to another history meanwhile
            return []
        layout = self._store.layout
        handed = [{tile_id for piece in step.slices for tile_id in piece.tile_ids} for step in steps]
        wire_bytes = sum(layout.wire_bytes(layout.tiles[tile_id]) for some in handed for tile_id in some)
        state_bytes = sum(layout.tiles[tile_id].size * VALUE_BYTES for tile_id in set[int]().union(*handed))
        state_bytes *= 2 if layout.has_momentum else 1
        return steps if steps[-1] == manifest and wire_bytes < state_bytes else []

    async def _wire_lists(
        self, steps: Sequence[Manifest], base_round: int, holders: Sequence[PeerId]
    ) -> list[dict[int, Hash]] | None:
        """What each of the rounds handed out; None where nobody has that of all of them."""
        try:
            return [await self._wire_list(step, base_round, holders) for step in steps]
        except NetworkError:
            return None

    async def _wire_list(self, step: Manifest, base_round: int, holders: Sequence[PeerId]) -> dict[int, Hash]:
        """`base_round`: of the state that is here; what was handed out since is kept for us."""
        tile_ids = [tile_id for piece in step.slices for tile_id in piece.tile_ids]
        request = WiresRequest(step.round, base_round)
        return await self._transfers.wire_list(holders, request, tile_ids, step.wire_root) if tile_ids else {}

    async def _replay(
        self,
        steps: Sequence[Manifest],
        lists: Sequence[Mapping[int, Hash]],
        base_round: int,
        holders: Sequence[PeerId],
    ) -> Staging:
        """The state after the last of `steps`, computed from what each handed out, just as its members did.

        Raises RemoteProtocolError where a state does not come out as it was committed, NetworkError where tiles do not
        come: what is here by then is not fetched again.
        """
        done = self._gone_through(steps)
        staging = self._replayed if done else None
        parent = _finished(staging) if staging is not None else self._store.version(base_round)
        for step, wanted in zip(steps[done:], lists[done:], strict=True):
            before, staging = staging, self._staged_step(step, parent)
            await self._follow(step, staging, wanted, holders)
            parent = _finished(staging)
            if parent.root != step.state_root:
                self._store.unstage(step.round, FETCHED)
                raise RemoteProtocolError(f"the state of round {step.round} came out differently here")
            self._replayed = staging
            if before is not None:
                self._store.unstage(before.round, FETCHED)
        assert staging is not None
        return staging

    def _gone_through(self, steps: Sequence[Manifest]) -> int:
        """How many of the steps an attempt before has done."""
        found = self._replayed
        if found is None or found.finished is None or not _is_here(self._store, found):
            return 0
        roots = [step.state_root for step in steps]
        return 1 + roots.index(found.finished.root) if found.finished.root in roots else 0

    def _staged_step(self, step: Manifest, parent: Version) -> Staging:
        """That of an attempt before at the same round, else a fresh one."""
        found = self._replaying
        same = (
            found is not None and found.round == step.round and found.parent is parent and _is_here(self._store, found)
        )
        if found is None or not same or found.finished is not None:
            found = self._store.stage(step.round, None, FETCHED, parent)
        self._replaying = found
        return found

    async def _follow(
        self, step: Manifest, staging: Staging, wanted: Mapping[int, Hash], holders: Sequence[PeerId]
    ) -> None:
        """One round: what it handed out, and its merge."""
        layout = self._store.layout
        outer = outer_of(self._rules)

        def write(tiles: Iterable[tuple[int, bytes | memoryview, Hash]]) -> None:
            for tile in tiles:
                stage_tile(staging, outer, *tile)

        async def take(tiles: list[tuple[int, memoryview, Hash]]) -> None:
            await self._in_thread(lambda: write(tiles))

        missing = {tile_id: name for tile_id, name in wanted.items() if not staging.has_wire(tile_id)}
        await self._transfers.tiles(missing, holders, take, wire=True, spread=True)
        await self._in_thread(lambda: _merged(layout, staging, step))

    def _staging(self, manifest: Manifest, base_round: int, label: str) -> Staging:
        """That of an attempt before at the same state, else a fresh one."""
        before = self._under_way.get(label)
        if (
            before is not None
            and before[:2] == (manifest.state_root, base_round)
            and _is_here(self._store, before[2], label)
        ):
            return before[2]
        if label == OTHER:
            self.drop_other()
        staging = self._store.stage(manifest.round, base_round, label, outlives=label == OTHER)
        self._under_way[label] = (manifest.state_root, base_round, staging)
        return staging

    def drop_other(self) -> None:
        """What is here of another history's state goes: we stay, or fetch another one."""
        self._under_way.pop(OTHER, None)
        for round in {one.round for one in self._store.stagings}:
            self._store.unstage(round, OTHER)


def _announced(chain: Chain, action: CatchUpAction) -> Commit | None:
    """What the holder said that it stands on, else the newest: it may know certificates whose state nobody has."""
    at_round = chain.find(action.round)
    if at_round is not None and at_round.certificate.manifest == action.head:
        return at_round
    return chain.newest


def _is_here(store: StateStore, staging: Staging, label: str = FETCHED) -> bool:
    """Whether what an attempt before has staged can be gone on with: a full disk, or another try, ends it."""
    return store.staged(staging.round, label) is staging


class HeadersOnly(CatchUp):
    """Catches up with certificates only, for a node that keeps no states."""

    async def state(
        self, manifest: Manifest, base_round: int, holders: Sequence[PeerId], label: str = FETCHED
    ) -> Fetched:
        return _NoState()


class _NoState:
    def publish(self) -> None:
        """Always None: no state is kept."""


def _merged(layout: Layout, staging: Staging, step: Manifest) -> None:
    """The round's merge, if it had one; then the state is whole."""
    if step.merge is not None:
        merge_columns(layout, staging, step.merge.neighbours, step.merge.alpha, staging.write_state)
    staging.finish()


def _finished(staging: Staging) -> Version:
    assert staging.finished is not None
    return staging.finished


async def commits_from(transfers: Transfers, holder: PeerId, first: int) -> tuple[Commit, ...]:
    """Commits from round `first` on, some at a time; unchecked, but numbered from `first` on."""
    commits = tuple(unpack(Commit, data) for data in await transfers.chain(holder, first))
    if [commit.manifest.round for commit in commits] != list(range(first, first + len(commits))):
        raise RemoteProtocolError(f"{short(holder)} sent commits that do not follow round {first - 1}")
    return commits
