"""What a driver's decisions ask of disk and network: the real ones have files and tensors, a simulator's have symbols.

`Dispatcher` asks `Owner`, `Effects`, `Votes`, `KnownChain` and `Candidate`, `RoundExecutor` a `RoundWork` and its
`SliceWork`, `Committer` a `History`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeVar

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import Contribution, Manifest, Merge, Slice
from spes_p2p.consensus.messages import Commit, Plan
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId
from spes_p2p.sync.catch_up import ForkPoint

T = TypeVar("T")
S = TypeVar("S")
"""A state that was fetched, and is not the committed one yet."""
Writing = Callable[[], AbstractAsyncContextManager[bool]]
"""A lock on the candidate state; entering yields a function that tells whether the result is still wanted."""
Sure = Callable[[], Sequence[PeerId]]
"""Who has a slice for certain, by now."""


class Votes(Protocol):
    """The voting record and the incarnation of one peer, on disk (see `VoteBook`)."""

    @property
    def record(self) -> VoteRecord: ...

    @property
    def incarnation(self) -> int: ...

    def write(self, record: VoteRecord) -> None:
        """Raises StorageFull, and OSError where the disk is broken."""

    def forget(self, above: int) -> None:
        """Raises StorageFull."""


class KnownChain(Protocol):
    """The commits of one peer's history (see `Chain`)."""

    @property
    def length(self) -> int:
        """How many rounds it has, the one of genesis among them."""

    def has(self, head: Hash, round: int) -> bool:
        """Whether our history has this manifest at this round."""

    def commit(self, round: int) -> Commit: ...


class Lock(AbstractAsyncContextManager[Any], Protocol):
    """Held by one piece of work at a time."""

    def locked(self) -> bool: ...


class Candidate(Protocol):
    """The next state in the making, on the disk of one peer (see `CandidateState`)."""

    @property
    def lock(self) -> Lock:
        """Held by who writes to it, or publishes it."""

    def open(self) -> None:
        """Makes ready for writing: a state that was made, but not signed for, is undone."""

    def recover(self) -> None:
        """After a restart, drops what is unfinished and finds the state that we signed for."""

    def finished(self, root: Hash) -> object | None:
        """The staged state with this root, if it is whole on disk."""


class Owner(Protocol):
    """Who the dispatcher works for; the callbacks of `Hooks` that it needs."""

    def close_training(self) -> None: ...

    def notice(self, notice: do.Notice) -> None: ...

    def failed(self, error: BaseException) -> None:
        """The disk is broken: nothing is begun any more."""


class Effects(Protocol):
    """What a peer does when the dispatcher says so. Nothing here blocks."""

    def send(self, action: do.Send) -> None: ...

    def begin(self, action: do.Work) -> None:
        """Starts long work, which ends in an event."""

    def make_room(self) -> None:
        """The disk is full: work that needs room ends, and what is kept for others goes."""

    def is_catching_up(self) -> bool:
        """Whether a state is still being fetched, be it that this is breaking off: a thread goes on for a while."""

    def has_room(self) -> bool:
        """Whether the disk says that a state fits on it; a quota may be less."""


class SliceWork(Protocol):
    """One slice that is reduced here: the values of its contributors, until their mean is staged."""

    async def take_own(self, me: PeerId) -> bool:
        """Takes this peer's own values; False without any."""

    async def take(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        """Takes another's values, as the plan counts them.

        Raises NetworkError, RemoteProtocolError, or WrongSize.
        """

    shares: tuple[int, ...]
    """After `average`: of each peer in the mean how much counted (see `Report`)."""

    async def average(self, left_out: dict[PeerId, str]) -> tuple[PeerId, ...]:
        """Averages. Returns the peers in the mean, and adds unfit ones to `left_out`. Raises TileDamaged."""

    async def stage(self) -> tuple[Hash, ...]:
        """Writes the mean as tiles; their hashes."""


class RoundWork(Protocol):
    """What is done with values, tiles and streams."""

    def slice_work(self, plan: Plan, piece: Slice) -> AbstractAsyncContextManager[SliceWork]:
        """Waits until there is memory for a slice."""

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all, beside each other where that is of use."""

    async def fetch(self, action: do.Fetch, writing: Writing, sure: Sure) -> None:
        """Brings tiles here, those of `sure` first. Raises NetworkError, RemoteProtocolError, TileDamaged."""

    async def build(self, action: do.Build, holders: Sequence[PeerId]) -> tuple[Hash, Merge | None]:
        """The root of the new state, and its merge. Raises NetworkError, TileDamaged."""

    def check(self, content: Content) -> None:
        """Raises RemoteProtocolError where its parts do not fit each other or the grid."""

    async def verify(self, content: Content, holders: Sequence[PeerId]) -> None:
        """Brings a proposed state to this disk. Raises NetworkError, RemoteProtocolError, TileDamaged."""


class History(Protocol[S]):
    """What changes the chain and the states of one peer, and what brings others' here.

    What is fetched raises NetworkError, RemoteProtocolError or TileDamaged; what is written, StorageFull.
    """

    def being_fetched(self) -> AbstractContextManager[None]:
        """A block in which the work under way may be cancelled."""

    async def break_off(self) -> bool:
        """Ends what is being fetched; whether there was anything."""

    async def headers(self, tip: int, action: do.CatchUp) -> Commit:
        """Puts the line of the holder on our chain (see `CatchUp.headers`). Raises HistoryDiverged."""

    async def meet(self, tip: int, action: do.CatchUp) -> ForkPoint:
        """What each has on top of the last common manifest; nothing is written."""

    async def take_up(self, tip: int, theirs: Sequence[Commit], action: do.CatchUp) -> Commit:
        """Puts what follows round `tip` on our chain, and what the holder has after it; the commit to fetch."""

    async def fetch(self, newest: Commit, tip: int, holder: PeerId, is_ours: bool) -> tuple[Commit, S]:
        """A fetched state to switch to: of `newest`, or of a commit on our line begun earlier. Raises LinkTooSlow."""

    async def commit(self, commit: Commit) -> None:
        """The certificate first, then the state that was made here."""

    async def renew(self, commit: Commit) -> None:
        """A renewal of our tip: the certificate, and the state that is here."""

    async def follow(self, first: Manifest, newest: Commit, state: S) -> None:
        """A later state of our own line, of which `first` is our tip's child."""

    async def switch(self, fork: ForkPoint, state: S) -> None:
        """Another history in the place of ours."""

    async def stay(self) -> None:
        """What was fetched of another history is not wanted."""

    def uplink(self) -> int:
        """As measured, in bytes a second."""

    def entering(self, commit: Commit, first: Manifest | None, fork: ForkPoint | None) -> Callable[[], Awaitable[None]]:
        """`commit` is the committed state on disk; gives what is to follow when the state machine stands on it.

        `first` is the child of the tip that we had, `fork` what we left for it.
        """
