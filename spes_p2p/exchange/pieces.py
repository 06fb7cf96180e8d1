"""The data of a run between peers: what is asked and answered. Serving is here, asking in `piece_fetcher`.

A catalogue is the list that the dataset's hash stands for, sources are where the data lies on the web (`web_sources`).
Pieces are asked for by number; the answer says which of the first ones are here (at most MAX_GIVEN), and brings these
with their proofs, one after the other. Nothing is announced piece by piece: how many pieces a peer holds
stands in its record, and what it holds it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spes_p2p.data.held import Held
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import CatalogueRequest, DataRequest, PiecesRequest, SourcesRequest
from spes_p2p.ids import short
from spes_p2p.swarm.ports import Blob
from spes_p2p.wire import pack

MAX_GIVEN = 64


class PieceSource(Protocol):
    """Where pieces are: a whole dataset on disk, or a cache. Thread-safe."""

    @property
    def grid(self) -> PieceGrid: ...

    @property
    def held(self) -> int:
        """How many are here."""

    def find(self, piece: int) -> bytes | None:
        """A piece and its proof, joined and checked; None where it is not here."""


@dataclass(frozen=True)
class EmptyShelf:
    """Of a node that knows what the dataset is, and holds none of it: it lies on the web."""

    grid: PieceGrid
    held: int = 0

    def find(self, piece: int) -> bytes | None:
        return None


@dataclass
class DataTraffic:
    """Bytes of data to and from others, apart from what rounds need. Counted on the network's thread."""

    sent: int = 0
    received: int = 0
    elsewhere: int = 0
    """Received where no round counts it: from web servers, and before the first round of this peer."""

    def add_sent(self, size: int) -> None:
        self.sent += size

    def take(self) -> tuple[int, int]:
        """(sent, received) since the last call."""
        counted, self.sent, self.received = (self.sent, self.received), 0, 0
        return counted

    def begin_rounds(self) -> None:
        """The first round of this peer begins."""
        self.elsewhere, self.received = self.elsewhere + self.received, 0

    def take_elsewhere(self) -> int:
        """The same of `elsewhere`."""
        counted, self.elsewhere = self.elsewhere, 0
        return counted


@dataclass(frozen=True)
class PiecesHead:
    """What goes before pieces: a bit for each number that was asked for (the highest bit first), 1 where it follows."""

    given: bytes


@dataclass(eq=False)
class PieceServing:
    """Answers from a shelf, and where the data lies on the web with what `sources` gives (None: nothing is known)."""

    _shelf: PieceSource
    _traffic: DataTraffic
    _sources: Callable[[], bytes | None] = lambda: None

    def answer(self, request: DataRequest) -> Blob:
        """Raises RemoteProtocolError for another dataset, and for what no such dataset has."""
        catalogue = self._shelf.grid.catalogue
        if request.dataset != catalogue.dataset_hash:
            raise RemoteProtocolError(f"this is dataset {short(catalogue.dataset_hash)}, not {short(request.dataset)}")
        match request:
            case SourcesRequest():
                if (packed := self._sources()) is None:
                    raise RemoteProtocolError("no web server is known here")
                return Blob(packed)
            case CatalogueRequest():
                return Blob(pack(catalogue), on_sent=self._traffic.add_sent)
            case PiecesRequest():
                return self._pieces(request.numbers)

    def _pieces(self, numbers: Sequence[int]) -> Blob:
        if max(numbers) >= self._shelf.grid.total:
            raise RemoteProtocolError(
                f"piece {max(numbers)} was requested, but there are only {self._shelf.grid.total}"
            )
        given, found = np.zeros(len(numbers), bool), list[bytes]()
        for at, number in enumerate(numbers):
            joined = self._shelf.find(number)
            if joined is not None:
                given[at] = True
                found.append(joined)
                if len(found) == MAX_GIVEN:
                    break
        return Blob(b"".join(found), pack(PiecesHead(np.packbits(given).tobytes())), self._traffic.add_sent)


def held_by(shelf: PieceSource | None) -> Held:
    """What a node that keeps no copies for others says: all or nothing."""
    return Held(whole=shelf is not None and shelf.held == shelf.grid.total)


def given_pieces(grid: PieceGrid, asked: Sequence[int], given: bytes, data: bytes) -> Iterator[tuple[int, bytes]]:
    """(piece, its bytes and proof joined) of an answer, each checked when it is taken.

    Raises RemoteProtocolError at the first that is not what its number stands for.
    """
    bits = np.unpackbits(np.frombuffer(given, np.uint8))
    if len(given) != (len(asked) + 7) // 8 or bits[len(asked) :].any():
        raise RemoteProtocolError(f"{len(given)} bytes say which of {len(asked)} pieces follow")
    at, view = 0, memoryview(data)
    for number in (number for number, bit in zip(asked, bits.tolist()) if bit):
        place = grid.place(number)
        end = at + place.size + place.proof_bytes
        joined = bytes(view[at:end])
        if not grid.is_sound(number, memoryview(joined)[: place.size], joined[place.size :]):
            raise RemoteProtocolError(f"the bytes sent as piece {number} have another hash")
        at = end
        yield number, joined
    if at != len(data):
        raise RemoteProtocolError(f"{len(data) - at} bytes follow the last piece")
