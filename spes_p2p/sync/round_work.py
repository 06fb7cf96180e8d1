"""What long work does with values, tiles and streams: the real one has tensors, a simulator's has symbols."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import Contribution, Merge, Slice
from spes_p2p.consensus.messages import Plan
from spes_p2p.ids import Hash, PeerId
from spes_p2p.sync.fraud import Charge

T = TypeVar("T")
Writing = Callable[[], AbstractAsyncContextManager[bool]]
"""A lock on the candidate state; entering yields a function that tells whether the result is still wanted."""
Sure = Callable[[], Sequence[PeerId]]
"""Who has a slice for certain, by now."""


class SliceWork(Protocol):
    """One slice that is reduced here: the values of its contributors, until their mean is staged."""

    async def take_own(self, me: PeerId) -> bool:
        """Takes this peer's own values; False without any."""

    async def take(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        """Takes another's values, as the plan counts them.

        Raises NetworkError, RemoteProtocolError, WrongSize or OtherValues.
        """

    @property
    def has_guests(self) -> bool:
        """Whether others than the owners train in this column, in a basis that is known here."""

    async def take_guest(self, entry: Contribution, is_wanted: Callable[[], bool]) -> None:
        """Takes what a guest trained, if it is in that basis. Raises NetworkError, RemoteProtocolError."""

    def screen_guests(self) -> dict[PeerId, str]:
        """Leaves out guests that are unfit, each with the reason."""

    @property
    def guests(self) -> tuple[PeerId, ...]:
        """Those whose changes are taken in, in roster order."""

    async def remade(self) -> tuple[Hash, ...]:
        """After `average`: the hashes of its tiles, if they were staged."""

    async def check_sound(self) -> None:
        """Raises TileDamaged where a mean made here would be wrong, since the state that it begins with is."""

    async def average(self, left_out: dict[PeerId, str]) -> tuple[PeerId, ...]:
        """Averages. Returns the peers in the mean, and adds unfit ones to `left_out`. Raises TileDamaged."""

    async def keep_proof(self, charge: Charge) -> str:
        """Where a new proof lies that a report is false, of the values taken here; "" where none is kept."""

    async def stage(self) -> tuple[Hash, ...]:
        """Writes the mean as tiles; their hashes."""


class RoundWork(Protocol):
    """What is done with values, tiles and streams."""

    def slice_work(self, plan: Plan, piece: Slice, keeps: bool = False) -> AbstractAsyncContextManager[SliceWork]:
        """Waits until there is memory for a slice. `keeps`: what is taken may be needed for a proof."""

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all, beside each other where that is of use."""

    async def fetch(self, action: do.Fetch, head: Hash, writing: Writing, sure: Sure) -> float:
        """Brings tiles here, those of `sure` first; how far they go, in lengths of what was trained here on `head`.

        Raises NetworkError, RemoteProtocolError, TileDamaged.
        """

    async def audit_work(self, entry: Contribution) -> str | None:
        """What is found of work that the tip counts (see `Verdict`); None where nothing can be said."""

    async def bring(self, action: do.Try, holders: Sequence[PeerId], open_: Callable[[], None]) -> bool:
        """Stages the values of columns again that a state without them has taken back since; whether there were any.

        `open_` makes ready for writing. Raises NetworkError, RemoteProtocolError, TileDamaged.
        """

    async def harmful(self, action: do.Try) -> frozenset[int]:
        """Numbers of the columns that make the committed model worse on held-out text; none where nobody here can say.

        Raises TileDamaged.
        """

    async def build(self, action: do.Build, holders: Sequence[PeerId]) -> tuple[Hash, Merge | None]:
        """The root of the new state, and its merge. Raises NetworkError, TileDamaged."""

    def check(self, content: Content) -> None:
        """Raises RemoteProtocolError where its parts do not fit each other or the grid."""

    async def verify(self, content: Content, holders: Sequence[PeerId]) -> None:
        """Brings a proposed state to this disk. Raises NetworkError, RemoteProtocolError, TileDamaged."""
