"""Pieces of a dataset that were fetched from others, on disk, within a bound; the least recently needed go first.

Two files: slots of one size, each a piece and its proof, and the number of the piece in each slot. Nothing is fsynced:
a piece is checked by its hash whenever it is read, so what a crash or a disk has damaged is only fetched again. Knows
no network, and decides nothing but who makes room.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spes_p2p.data.pieces import PieceGrid
from spes_p2p.errors import StorageFull
from spes_p2p.files import storing, write_into
from spes_p2p.ids import Hash

SLOTS = "pieces.bin"
NUMBERS = "numbers.bin"
_NUMBER_BYTES = 8
_FREED_AT_ONCE = 64
"""One in this many slots is freed at a time, since finding the oldest takes a pass over all slots."""


class PieceCache:
    """Thread-safe. Takes `max_bytes` of disk at most, and 16 bytes of memory a piece."""

    def __init__(self, folder: Path, grid: PieceGrid, max_bytes: int) -> None:
        self.grid = grid
        self._slot_bytes = grid.max_bytes
        self.capacity = min(grid.total, max_bytes // (self._slot_bytes + _NUMBER_BYTES))
        self._lock = threading.Lock()
        with storing(folder / SLOTS):
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT
            self._slots = os.open(folder / SLOTS, flags, 0o644)
            self._numbers = os.open(folder / NUMBERS, flags, 0o644)
        self._path = folder / SLOTS
        self._slot_of = np.zeros(grid.total, np.int32)  # + 1; pages that are never touched take no memory
        self._piece_in = np.full(self.capacity, -1, np.int64)
        self._needed = np.zeros(self.capacity, np.int64)
        self._clock = 0
        self._free: list[int] = []
        self.used = 0
        """Slots that have been written: what the file takes of the disk."""
        self._open()

    def close(self) -> None:
        with self._lock:
            os.close(self._slots)
            os.close(self._numbers)

    @property
    def dataset_hash(self) -> Hash:
        return self.grid.catalogue.dataset_hash

    @property
    def held(self) -> int:
        """Pieces that are here."""
        return self.used - len(self._free)

    def has(self, pieces: NDArray[np.int64]) -> NDArray[np.bool_]:
        with self._lock:
            return self._slot_of[pieces] > 0

    def need(self, pieces: NDArray[np.int64]) -> None:
        """These are needed from now on: none of them makes room before the others have."""
        with self._lock:
            self._clock += 1
            slots = self._slot_of[pieces]
            self._needed[slots[slots > 0] - 1] = self._clock

    def find(self, piece: int) -> bytes | None:
        """The piece and its proof, joined and checked; None where it is not here, or not any more."""
        with self._lock:
            slot = int(self._slot_of[piece]) - 1
            if slot < 0:
                return None
            place = self.grid.place(piece)
            try:
                joined = os.pread(self._slots, place.size + place.proof_bytes, slot * self._slot_bytes)
            except OSError:  # as good as damaged; a disk that is broken altogether says so at the next write
                joined = b""
        if self.grid.is_sound(piece, memoryview(joined)[: place.size], joined[place.size :]):
            return joined
        with self._lock:
            if int(self._slot_of[piece]) - 1 == slot:
                self._empty(slot)
        return None

    def put(self, piece: int, joined: bytes) -> bool:
        """Takes a piece with its proof, which the caller has checked; False where all others are needed more.

        Raises StorageFull; the cache goes on with the slots that it has.
        """
        with self._lock:
            if self._slot_of[piece]:
                return True
            slot = self._slot()
            if slot is None:
                return False
            self._write(slot, piece, joined)
            return True

    def grow_again(self) -> None:
        """After a full disk: as large as at first."""
        with self._lock:
            self.capacity = len(self._piece_in)

    def _write(self, slot: int, piece: int, joined: bytes) -> None:
        try:
            with storing(self._path):
                write_into(self._slots, slot * self._slot_bytes, joined)
                write_into(self._numbers, slot * _NUMBER_BYTES, (piece + 1).to_bytes(_NUMBER_BYTES, "little"))
        except StorageFull:
            self.capacity = self.used
            if slot < self.used:
                self._free.append(slot)
            raise
        self.used = max(self.used, slot + 1)
        self._piece_in[slot], self._slot_of[piece], self._needed[slot] = piece, slot + 1, self._clock

    def _slot(self) -> int | None:
        """A free slot, one that was never used, or that of the piece that was needed least recently."""
        if not self._free and self.used >= self.capacity:
            self._make_room()
        if self._free:
            return self._free.pop()
        return self.used if self.used < self.capacity else None

    def _make_room(self) -> None:
        slots = np.flatnonzero(self._needed[: self.used] < self._clock)
        few = max(1, self.used // _FREED_AT_ONCE)
        if len(slots) > few:
            slots = slots[np.argpartition(self._needed[slots], few)[:few]]
        for slot in slots.tolist():
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._slot_of[self._piece_in[slot]] = 0
        self._piece_in[slot] = -1
        self._needed[slot] = 0
        self._free.append(slot)

    def _open(self) -> None:
        """Takes what an earlier life left; less if the bound is lower now."""
        size = self.capacity * _NUMBER_BYTES
        numbers = np.frombuffer(os.pread(self._numbers, size, 0)[: size // 8 * 8], dtype="<i8")[: self.capacity] - 1
        whole = os.fstat(self._slots).st_size // self._slot_bytes + 1  # the last slot may be shorter
        numbers = numbers[:whole]
        os.ftruncate(self._slots, min(os.fstat(self._slots).st_size, self.capacity * self._slot_bytes))
        os.ftruncate(self._numbers, len(numbers) * _NUMBER_BYTES)
        self.used = len(numbers)
        for slot, piece in enumerate(numbers.tolist()):
            if 0 <= piece < self.grid.total and not self._slot_of[piece]:
                self._piece_in[slot], self._slot_of[piece] = piece, slot + 1
            else:
                self._free.append(slot)
