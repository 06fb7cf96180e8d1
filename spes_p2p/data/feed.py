"""Token sequences out of pieces that come from other peers: what is needed next, and waiting for it.

Two threads meet here. The training thread says what it will read (`need`), waits for a batch, and reads it; whoever
fetches asks what is `missing` and hands pieces in. Leaves out where they come from (`peer/data_feed.py`) and how they
are kept (`piece_cache.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.errors import DataNotReady, StorageFull

PATIENCE_SECONDS = 2.0
"""A wait shorter than this is not reported."""
SAY_AGAIN_SECONDS = 60.0
FULL_SECONDS = 60.0
"""So long after a full disk it is tried again."""
_LOOK_SECONDS = 0.5
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Missing:
    """What should be fetched, the most urgent first. `urgent`: training waits for so many of the first."""

    pieces: tuple[int, ...]
    urgent: int


class Feed:
    """`changed` is called by the training thread when there is something new to fetch; `say` gets lines for people."""

    def __init__(
        self,
        cache: PieceCache,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.grid: PieceGrid = cache.grid
        self._say = say
        self._now = now
        self.changed: Callable[[], None] = lambda: None
        self._news = threading.Condition()
        self._always, self._planned, self._urgent = _NOTHING, _NOTHING, _NOTHING
        """For a look at what another has trained: beside what is read here, where there is room for it."""
        self._kept = _NOTHING
        """For others: what is left of the room when this peer has what it needs itself."""
        self._at_hand: dict[int, bytes] = {}
        """Checked pieces of the batch that is read next, held in memory until it has been read."""
        self.is_tight = False
        """Whether the last `need` asked for more than fits; then it must be repeated once some was used."""
        self.trouble = ""
        """Why data could not be had of late, by who fetches."""
        self._said_at = float("-inf")
        self._full_until: float | None = None
        self._was_full = False
        self._full_slots = 0

    # ---- the training thread ----

    def need(self, starts: NDArray[np.int64], length: int, always: bool = False) -> None:
        """The sequences of `length` tokens that will be read, in order; replaces what was needed before.

        `always`: those that are read again and again, kept beside the others.
        """
        with self._news:
            room = self.cache.capacity // 2 if always else self.cache.capacity - len(self._always)
            pieces = self.grid.of_tokens(starts[: 2 * room + 1], length)
            if always:
                self._always = pieces[:room]
            else:
                self._planned = pieces[:room]
                self.is_tight = len(starts) > 2 * room or len(pieces) > room
            self._protect()
        self.changed()

    def wait(self, starts: NDArray[np.int64], length: int, should_stop: Callable[[], bool]) -> bool:
        """Until these sequences can be read at once, by this thread, next; False where `should_stop` said so first."""
        wanted = self.grid.of_tokens(starts, length).tolist()
        self._at_hand = {piece: self._at_hand[piece] for piece in wanted if piece in self._at_hand}
        began, told = self._now(), False
        while (left := self._fill(wanted)) and not should_stop():
            told = told or self._tell(left, self._now() - began)
            with self._news:
                self._news.wait(_LOOK_SECONDS)
        with self._news:
            self._urgent = _NOTHING
        if told and not left:
            self._say(f"the data has arrived: training resumes after {self._now() - began:.0f} s")
        return not left

    def _fill(self, wanted: list[int]) -> int:
        """Loads from disk the wanted pieces that are there. Marks the others as urgent and returns their number."""
        for piece in wanted:
            if piece not in self._at_hand and (joined := self.cache.find(piece)) is not None:
                self._at_hand[piece] = joined
        with self._news:
            left = [piece for piece in wanted if piece not in self._at_hand]
            was, self._urgent = len(self._urgent), np.array(left, np.int64)
            if left:
                self._protect()
        if left and not was:
            self.changed()
        return len(left)

    def _tell(self, left: int, waited: float) -> bool:
        now = self._now()
        if waited < PATIENCE_SECONDS or now - self._said_at < SAY_AGAIN_SECONDS:
            return False
        self._said_at = now
        size = left * self.grid.catalogue.piece_bytes
        why = f" ({self.trouble})" if self.trouble else ""
        self._say(f"training is waiting for data: {size / 1e6:.2g} MB of the next batch have not arrived yet{why}")
        return True

    def read_into(self, row: NDArray[np.int64], start: int) -> None:
        """The tokens from `start` on. Raises DataNotReady where they are not here (see `wait`)."""
        grid, filled = self.grid, 0
        for piece in grid.of_tokens(np.array([start]), len(row)).tolist():
            joined = self._at_hand.get(piece) or self.cache.find(piece)
            if joined is None:
                raise DataNotReady(f"piece {piece} of the dataset has not been fetched")
            data = np.frombuffer(joined, f"<u{grid.item_bytes}", grid.place(piece).size // grid.item_bytes)
            inside = start + filled - grid.first_token(piece)
            part = data[inside : inside + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)

    # ---- who keeps copies for others ----

    @property
    def spare(self) -> int:
        """Pieces for which there is room beside those that are needed here."""
        with self._news:
            return max(0, self.cache.capacity - len(self._always) - len(self._planned))

    def keep(self, pieces: NDArray[np.int64]) -> None:
        """These stay, as far as there is room to spare, in the place of those before."""
        with self._news:
            self._kept = pieces
            self._protect()

    # ---- who fetches ----

    def missing(self, most: int) -> Missing:
        """The next pieces to fetch, at most so many."""
        if self._full_until is not None and self._now() > self._full_until:
            self._full_until = None
            self.cache.grow_again()
        with self._news:
            urgent, planned = self._urgent, self._ahead()
        absent = planned[~self.cache.has(planned)][:most]
        return Missing(tuple(dict.fromkeys([*urgent.tolist(), *absent.tolist()]))[:most], min(most, len(urgent)))

    def take(self, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Checked pieces with their proofs. A full disk is said once; what training waits for comes through even so."""
        for piece, joined in pieces:
            self._take(piece, joined)

    def _take(self, piece: int, joined: bytes) -> None:
        with self._news:
            if piece in self._urgent:
                self._at_hand[piece] = joined
                self._urgent = self._urgent[self._urgent != piece]
                self._news.notify_all()
        try:
            self.cache.put(piece, joined)
            if self._was_full and self.cache.used > self._full_slots:
                self._was_full = False
                self._say("there is disk space again for fetching data ahead")
        except StorageFull as error:
            self._disk_is_full(error)

    def _disk_is_full(self, error: StorageFull) -> None:
        self._full_until, self._full_slots = self._now() + FULL_SECONDS, self.cache.used
        with self._news:
            self._protect()
        if not self._was_full:
            self._was_full = True
            held = self.cache.held * self.grid.catalogue.piece_bytes
            self._say(
                f"{error}; training continues with {held / 1e6:.2g} MB of data on disk, and may have to wait for more"
            )

    def _ahead(self) -> NDArray[np.int64]:
        """What there is room for: never more, or what comes would push out what has come."""
        room = max(0, self.cache.capacity - len(self._urgent))
        return np.concatenate((self._always, self._planned))[:room]

    def _protect(self) -> None:
        ahead = self._ahead()
        room = max(0, self.cache.capacity - len(self._urgent) - len(ahead))
        self.cache.need(np.concatenate((self._urgent, ahead, self._kept[:room])))


@dataclass(frozen=True)
class PieceDataset:
    """A dataset of which pieces come from others as they are needed. What only its tokenizer knows is not known."""

    feed: Feed
    tokenizer: str | None = None
    eos_id: int | None = None

    @property
    def tokens(self) -> int:
        return self.feed.grid.tokens
