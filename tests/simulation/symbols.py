"""What simulated peers have in the place of time, tensors, files and streams: pauses, symbols, and a `Surroundings`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Merge, Slice
from spes_p2p.consensus.messages import Commit, Plan
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import NetworkError, PeerClosed, PeerSilent, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.sync.interfaces import SliceWork, Sure, Writing
from spes_p2p.sync.reduce import NON_FINITE
from tests.simulation.judge import Judge
from tests.simulation.sim_state import Disk, State, Trained, neighbours_of, reduce_tiles, split

T = TypeVar("T")
PUBLISHING_SECONDS = 0.005
LOCKED_SECONDS = 0.01


class Died(BaseException):
    """The simulated process has ended in the middle of what it did."""


class Pause:
    """Awaited by work that takes so long; a scheduler goes on with it afterwards, or at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class Lock:
    """Held by one piece of work at a time."""

    def __init__(self) -> None:
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    async def __aenter__(self) -> None:
        while self._is_held:
            await Pause(LOCKED_SECONDS)
        self._is_held = True

    async def __aexit__(self, *_: object) -> None:
        self._is_held = False


class Others(Protocol):
    """What other peers give, where they can be reached."""

    def contribution(self, entry: Contribution, parent: Hash) -> Trained | None:
        """What this peer, or another one, has of the work that a plan counts."""

    def serves(self, holder: PeerId, piece: Slice, hashes: bytes) -> bool:
        """Whether another peer gives these tiles."""

    def disk_of(self, holder: PeerId) -> Disk | None:
        """What another peer gives of its history."""


class Training(Protocol):
    """The trainer of a peer."""

    def close(self) -> None:
        """The round closes."""

    def stands_on(self, commits: Sequence[Commit], switched: bool) -> None:
        """The state of the last of `commits` is here; the consensus will hear of it next."""

    def goes_on(self) -> None:
        """The consensus has heard of it."""


class Surroundings(Protocol):
    """What a scheduler lets happen to one process."""

    judge: Judge

    @property
    def others(self) -> Others: ...

    @property
    def trainer(self) -> Training: ...

    def now(self) -> float: ...

    def work_seconds(self) -> float:
        """How long the next piece of work takes."""

    def fetch_seconds(self) -> float:
        """How long the state of others takes to come here."""

    def before(self, action: do.Action) -> None:
        """`action` is about to be begun. Raises Died."""

    def wrote(self, before: VoteRecord, record: VoteRecord) -> None:
        """A vote is on disk."""

    def send(self, action: do.Send) -> None: ...

    def begin_work(self, action: do.Work) -> None: ...

    def notice(self, notice: do.Notice) -> None:
        """What work says for people."""

    def new_incarnation(self) -> int: ...


class SymbolSlice:
    """The `SliceWork` of a simulated peer."""

    def __init__(self, plan: Plan, piece: Slice, disk: Disk, around: Surroundings) -> None:
        self._plan = plan
        self._piece = piece
        self._disk = disk
        self._around = around
        self._roster = {entry.peer: entry for entry in plan.roster}
        self._found: dict[PeerId, Trained] = {}
        self._fit: list[Trained] = []
        self.shares: tuple[int, ...] = ()

    async def take_own(self, me: PeerId) -> bool:
        found = self._around.others.contribution(self._roster[me], self._plan.parent)
        if found is not None:
            self._found[me] = found
        return found is not None

    async def take(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        found = self._around.others.contribution(entry, self._plan.parent)
        if found is None:
            raise PeerClosed(entry.peer)
        self._found[entry.peer] = found

    async def average(self, left_out: dict[PeerId, str]) -> tuple[PeerId, ...]:
        for peer, trained in self._found.items():
            if self._piece.block in trained.poison:
                left_out[peer] = NON_FINITE
        fit = tuple(peer for peer in self._piece.contributors if peer not in left_out)
        self._fit = [self._found[peer] for peer in fit]
        return fit

    async def stage(self) -> tuple[Hash, ...]:
        self._disk.check_room()
        tiles = reduce_tiles(self._plan, self._piece, self._fit)
        self._around.judge.reduced.update((tile, tuple(self._fit)) for tile in tiles)
        self._disk.stage(self._piece, tiles)
        return tiles


class SymbolCandidate:
    """The `Candidate` of a simulated peer."""

    def __init__(self, core: Consensus, disk: Disk) -> None:
        self.lock = Lock()
        self._is_bound = core.state.is_bound
        self._disk = disk

    def open(self) -> None:
        self._disk.open(self._is_bound)

    def recover(self) -> None:
        self._disk.recover(self._is_bound)

    def finished(self, root: Hash) -> State | None:
        return self._disk.finished.get(root)


class SymbolWork:
    """The `RoundWork` of a simulated peer."""

    def __init__(self, core: Consensus, disk: Disk, around: Surroundings) -> None:
        self._rules = core.state.rules
        self._disk = disk
        self._around = around

    @asynccontextmanager
    async def slice_work(self, plan: Plan, piece: Slice) -> AsyncIterator[SliceWork]:
        await Pause(self._around.work_seconds())
        yield SymbolSlice(plan, piece, self._disk, self._around)

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return [await work for work in works]

    async def fetch(self, action: do.Fetch, writing: Writing, sure: Sure) -> None:
        await Pause(self._around.work_seconds())
        if not any(self._around.others.serves(holder, action.piece, action.hashes) for holder in action.holders):
            raise PeerSilent(str(action.piece.key))
        async with writing() as is_wanted:
            if is_wanted:
                self._disk.check_room()
                self._disk.stage(action.piece, split(action.hashes))

    async def build(self, action: do.Build, holders: Sequence[PeerId]) -> tuple[Hash, Merge | None]:
        await self._gather(action.slices, action.hashes, holders)
        merge = Merge(action.alpha, neighbours_of(self._rules.num_columns)) if action.alpha else None
        root = self._disk.finish(self._rules, action.slices, merge)
        self._around.judge.saw_build(action.hashes)
        await Pause(self._around.work_seconds())
        return root, merge

    def check(self, content: Content) -> None:
        if sha256(*content.wire_hashes) != content.manifest.wire_root:
            raise RemoteProtocolError("the tiles are not those of the manifest")

    async def verify(self, content: Content, holders: Sequence[PeerId]) -> None:
        manifest = content.manifest
        await self._gather(manifest.slices, content.wire_hashes, holders)
        if self._disk.finish(self._rules, manifest.slices, manifest.merge) != manifest.state_root:
            raise RemoteProtocolError("the tiles do not make its root")

    async def _gather(self, slices: Sequence[Slice], joined: Sequence[bytes], holders: Sequence[PeerId]) -> None:
        await Pause(self._around.work_seconds())
        self._disk.check_room()
        for piece, hashes in zip(slices, joined, strict=True):
            if not self._disk.has(piece, hashes):
                if not any(self._around.others.serves(holder, piece, hashes) for holder in holders):
                    raise NetworkError(str(piece.key))
                self._disk.stage(piece, split(hashes))
