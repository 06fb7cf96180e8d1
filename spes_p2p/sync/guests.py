"""What owners take in of the changes that guests trained in their columns, and the bases in which guests train next.

With D what the owners' mean changes in a matrix since its last hand-out, Q its basis, B_j the coordinates of guest j, w
the tokens of the round's roster (w_o: of all owners that count), the reducer hands out

    D + [ (w_o D Q + sum_j w_j B_j) / (w_o + sum_j w_j)  -  D Q ] Qᵀ

Inside the basis everybody is averaged; outside of it the owners' change is taken whole. Row i of it depends on row i of
D and of each B alone, and tiles hold whole rows: each slice is reduced by itself. Only the reducer computes it, in
plain fp32; everyone else takes its bytes. A guest that is lost or unfit is left out, and what it trained there is lost:
its coordinates begin at zero in another basis when the column was handed out, unless the round did not count it at all.
They travel in the layout's guest codec.

`Bases` are derived by every peer from what a commit changed of a column (state/basis.py), so nothing is sent. Each
names the hand-out that it follows from, and coordinates count only in a basis of the same name. Who was not there then
(a newcomer, one who caught up) has none for that column until it is handed out again: it trains nothing there, and
takes nobody in. They are kept on disk for a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import encoded_bytes
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.errors import StorageFull
from spes_p2p.files import storing, write_whole
from spes_p2p.ids import Hash
from spes_p2p.state.basis import Basis, Coordinates, basis_values, first_basis, matrices, next_basis
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values
from spes_p2p.state.version import DTYPE, bytes_of
from spes_p2p.sync.chain import Chain

_DIGEST_BYTES = 32
"""Of a mark, which is a manifest's hash, and of the check of a file."""


def take_in(
    layout: Layout,
    tiles: Sequence[Tile],
    mean: Values,
    before: Values,
    basis: Basis,
    tokens: int,
    guests: Sequence[tuple[int, Values]],
) -> Values:
    """The owners' `mean` of consecutive tiles with what guests have changed there; `before` are the committed values.

    `tokens`: of the owners; `guests`: tokens and coordinates of each.
    """
    total = tokens + sum(own for own, _ in guests)
    start, stop, block = tiles[0].start, tiles[-1].stop, tiles[0].block
    first = layout.coordinates_before(block, start)
    made = np.array(mean)
    for placed, q in matrices(layout, block - 1, basis.values):
        low, high = max(start, placed.offset), min(stop, placed.offset + placed.tensor.size)
        if low >= high:
            continue
        part, width = slice(low - start, high - start), placed.tensor.shape[1]
        inside = np.subtract(mean[part], before[part]).reshape(-1, width) @ q
        moved = inside * np.float32(tokens / total - 1)
        at = slice(*(layout.coordinates_before(block, end) - first for end in (low, high)))
        for own, coordinates in guests:
            moved += np.float32(own / total) * coordinates[at].reshape(-1, layout.guest_rank)
        made[part] += (moved @ q.T).reshape(-1)
    return made


def coordinate_bytes(layout: Layout, tiles: Sequence[Tile]) -> int:
    """Length of what a guest sends for consecutive tiles of a column: the mark of its basis, and the coordinates."""
    return _DIGEST_BYTES + encoded_bytes(layout.guest_codec, _num_coordinates(layout, tiles))


def _num_coordinates(layout: Layout, tiles: Sequence[Tile]) -> int:
    block, ends = tiles[0].block, (tiles[0].start, tiles[-1].stop)
    first, last = (layout.coordinates_before(block, end) for end in ends)
    return last - first


def sent_coordinates(layout: Layout, found: Coordinates) -> bytes:
    """What a guest sends of coordinates that it trained in consecutive tiles."""
    if layout.guest_codec == "fp32":
        return found.mark + bytes_of(found.values)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite must arrive as such, to be found
        return found.mark + encode(layout.guest_codec, found.values)


def read_coordinates(layout: Layout, tiles: Sequence[Tile], data: memoryview | bytes, basis: Basis) -> Values | None:
    """The coordinates that a guest sent for consecutive tiles, if they are in this basis."""
    if bytes(data[:_DIGEST_BYTES]) != basis.mark:
        return None
    if layout.guest_codec == "fp32":
        return np.frombuffer(data[_DIGEST_BYTES:], DTYPE)
    return decode(layout.guest_codec, data[_DIGEST_BYTES:], _num_coordinates(layout, tiles))


class Bases:
    """Those of all columns whose basis is known here, in `directory` too. One thread at a time may change them."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        """Nothing is known yet: see `open`."""
        self._directory, self._layout = directory, layout
        self.now: dict[int, Basis] = {}
        """By column; stays as it is when others follow."""

    def open(self, chain: Chain, tip: Manifest) -> None:
        """Keeps, or reads, those of the last hand-outs that manifest `tip` tells of."""
        if not self._layout.guest_rank:
            return
        found = {}
        for column, round in enumerate(tip.column_rounds):
            mark = chain.commit(round).certificate.manifest
            known = self.now.get(column)
            if known is None or known.mark != mark:
                known = self._read(column, mark) if round else first_basis(self._layout, column, mark)
            if known is not None:
                found[column] = known
        self.now = found

    def settle(self, manifest: Manifest, mark: Hash, before: BlockSource, after: BlockSource) -> None:
        """Derives those of the columns that `manifest`, whose hash is `mark`, has handed out: `before` to `after`."""
        if not self._layout.guest_rank:
            return
        made = {
            block - 1: next_basis(self._layout, block - 1, mark, before.block(block), after.block(block))
            for block in sorted({piece.block for piece in manifest.slices} - {0})
        }
        self.now = self.now | made
        for column, basis in made.items():
            self._write(column, basis)

    def _path(self, column: int) -> Path:
        return self._directory / f"column-{column:05d}"

    def _write(self, column: int, basis: Basis) -> None:
        """Where the disk is full it is known until the end of this process."""
        data = basis.mark + bytes_of(basis.values)
        path = self._path(column)
        try:
            with storing(path, len(data)):
                self._directory.mkdir(parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(data).digest() + data)
        except StorageFull:
            path.unlink(missing_ok=True)

    def _read(self, column: int, mark: Hash) -> Basis | None:
        """The basis of that hand-out, if it is on this disk, whole."""
        path = self._path(column)
        data = path.read_bytes() if path.is_file() else b""
        digest, whole = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if not whole.startswith(mark) or hashlib.sha256(whole).digest() != digest:
            return None
        values = np.frombuffer(whole[len(mark) :], DTYPE)
        return Basis(mark, values) if len(values) == basis_values(self._layout, column) else None
