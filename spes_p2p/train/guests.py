"""What one rank trains in columns of others (experts/guests.py), and what becomes of it between two rounds.

Coordinates begin at zero, with fresh moments, when their column was handed out, which gives it another basis; in
between they go on from round to round. Every rank makes the same calls; rank 0 alone has the bases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from spes_p2p.experts.guests import Guests, Matrix
from spes_p2p.ids import Hash
from spes_p2p.model.params import ExpertPlace, Table
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.basis import Basis, Coordinates
from spes_p2p.state.layout import Values
from spes_p2p.train.ddp import Ranks, broadcast_array
from spes_p2p.train.moment_store import Stored
from spes_p2p.train.optim import Optimizer


@dataclass(frozen=True)
class SavedGuest:
    """What was trained in a column until a checkpoint: coordinates by name, and their moments."""

    mark: Hash
    values: dict[str, Tensor]
    steps: int
    moments: dict[str, Stored]


class GuestWork:
    """The changes of foreign columns that this rank trains."""

    def __init__(self, model: Transformer, table: Table, optimizer: Optimizer, ranks: Ranks) -> None:
        self._model, self._table, self._optimizer, self._ranks = model, table, optimizer, ranks
        self._marks: dict[int, Hash] = {}
        self._ahead_of: dict[tuple[int, int, Matrix], Tensor] = {}
        """By column, layer and matrix: the coordinates from which training ran ahead of the round."""
        self._saved: dict[int, SavedGuest] = {}

    @torch.no_grad()
    def use(self, marks: Mapping[int, Hash], bases: Mapping[int, Basis] | None, left_out: Collection[int] = ()) -> None:
        """Trains in these bases of foreign columns from here on: rank 0 gets them, the others their `marks` alone.

        A column whose basis is the one that it had goes on. In another one it begins at zero with fresh moments, but
        for what was trained since `run_ahead`, or in the columns `left_out` ever: that is carried on as far as it lies
        within both.
        """
        self._end(set(self._marks) - set(marks))
        for column in sorted(set(marks) - set(self._model.owned)):
            if self._marks.get(column) != marks[column]:
                size = sum(guests.basis(which)[0].numel() for _, guests, which, _ in self._places(column))
                values = None if bases is None else bases[column].values
                self._place(column, broadcast_array(self._ranks, values, size), column in left_out)
                self._begin(column, marks[column])
        self._ahead_of.clear()
        self._saved.clear()

    def _end(self, columns: Collection[int]) -> None:
        """Trains nothing in these columns."""
        for column in columns:
            self._place(column, None)
            self._optimizer.end_guest(column)
            del self._marks[column]

    def _begin(self, column: int, mark: Hash) -> None:
        """With what was saved of the same basis, or afresh."""
        saved = self._saved.get(column)
        if saved is None or saved.mark != mark:
            saved = SavedGuest(mark, {}, 0, {})
        self._optimizer.begin_guest(self._model, column, saved.steps, saved.moments)
        for name, values in saved.values.items():
            self._optimizer.guests[column].tensors[name].detach().copy_(values)
        self._marks[column] = mark

    @torch.no_grad()
    def restore(self, saved: Mapping[int, SavedGuest]) -> None:
        """What a checkpoint has, to be taken up by the next `use` where the basis is still the same.

        What is trained now ends.
        """
        self._end(list(self._marks))
        self._saved = dict(saved)

    def saved(self) -> dict[int, SavedGuest]:
        """What a checkpoint must have to go on: the very tensors, by column."""
        found = {}
        for column, group in self._optimizer.guests.items():
            values = {name: tensor.detach() for name, tensor in group.tensors.items()}
            found[column] = SavedGuest(self._marks[column], values, group.steps, group.moments)
        return found

    def shape(self, name: str) -> torch.Size:
        """Of the coordinates called `name` of any column."""
        _, layer, which = name.split(".")
        guests = self._model.banks[int(layer)].guests
        assert guests is not None
        return guests.coordinates(cast(Matrix, which))[0].shape

    def leave(self, owned: Collection[int]) -> None:
        """These columns are owned from now on; the banks know."""
        self._marks = {column: mark for column, mark in self._marks.items() if column not in owned}
        self._ahead_of = {place: values for place, values in self._ahead_of.items() if place[0] not in owned}

    def run_ahead(self) -> None:
        """What is trained from now on is not in what was handed in."""
        self._ahead_of = {place: values.clone() for place, values in self._all_coordinates()}

    def _all_coordinates(self) -> Iterator[tuple[tuple[int, int, Matrix], Tensor]]:
        """By column, layer and matrix: slots of experts move when other columns are owned."""
        for column in self._marks:
            for layer, guests, which, slot in self._places(column):
                yield (column, layer, which), guests.coordinates(which).detach()[slot]

    def coordinates(self) -> dict[int, Coordinates]:
        """What was trained, by column, in the order of its block: copies."""
        return {column: Coordinates(mark, self._values(column)) for column, mark in self._marks.items()}

    def _values(self, column: int) -> Values:
        parts = [guests.coordinates(which).detach()[slot] for _, guests, which, slot in self._places(column)]
        return torch.cat([part.flatten() for part in parts]).cpu().numpy()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, foreign experts are what the run has committed."""
        self._model.take_guests_in(False)
        try:
            yield
        finally:
            self._model.take_guests_in(True)

    def _places(self, column: int) -> Iterator[tuple[int, Guests, Matrix, int]]:
        """(layer, where the changes are, matrix, slot there) in the order of the column's block."""
        for place in self._table[1 + column]:
            assert isinstance(place, ExpertPlace)
            bank = self._model.banks[place.layer]
            assert bank.guests is not None
            yield place.layer, bank.guests, place.which, bank.slot(column)

    def _place(self, column: int, values: Values | None, is_carried: bool = False) -> None:
        at = 0
        for layer, guests, which, slot in self._places(column):
            own, shape = guests.coordinates(which)[slot], guests.basis(which)[slot].shape
            ahead_of = self._ahead_of.get((column, layer, which))
            if not is_carried:
                own.zero_() if ahead_of is None else own.sub_(ahead_of)
            basis = None if values is None else torch.from_numpy(np.array(values[at : at + shape.numel()])).view(shape)
            guests.begin(slot, which, basis)
            at += shape.numel()
