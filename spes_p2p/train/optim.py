"""The optimizer over shared parameters and owned expert columns, with moments and a step count for each column.

The masters of a bank are one parameter [O, out, in] for all owned experts, but torch keeps one step count a tensor, and
a column that was adopted later needs its own. So what is stepped is a `Trainable`: a whole parameter, or one row of it
with that row of its gradient. One group a column, so that each has its own learning-rate ramp. Moments stay with a
column for as long as it is owned; they are never averaged (SPES). How they are kept is the business of moment_store.py.
A step goes from bank to bank, since masters may take memory that is there for one at a time alone (experts/masters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spes_p2p.config.schema import OptimizerConfig
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.masters import halves_of
from spes_p2p.experts.stores import PARTS
from spes_p2p.model.params import named_shared
from spes_p2p.model.transformer import Transformer
from spes_p2p.train.moment_store import AdamW, Kind, Piece, Stored
from spes_p2p.train.muon import Muon
from spes_p2p.train.schedule import ramp


class Trainable(NamedTuple):
    """A parameter, or the row of it that is one column's."""

    parameter: nn.Parameter
    row: int | EllipsisType = ...

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.row is ... else self.parameter.shape[1:]

    @property
    def values(self) -> Tensor:
        """To be read and changed in place; of masters inside `masters_in_fp32`."""
        return self.parameter.detach()[self.row]

    @property
    def gradient(self) -> Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else gradient[self.row]


@dataclass
class Group:
    """What is stepped together: the shared parameters (`column` None) or one expert column."""

    column: int | None
    tensors: dict[str, Trainable]
    ramped: bool
    """Whether the learning rate rises over the first steps: the moments began after the run did."""
    steps: int = 0
    """Optimizer steps that the moments have seen: the count of the bias correction."""
    moments: dict[str, Stored] = field(default_factory=dict)
    """By tensor name, as they are kept; empty until the first step."""


class Optimizer:
    """AdamW with weight decay on everything, or Muon. `rebuild` it whenever the owned columns change."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._kind: Kind = Muon(config) if config.name == "muon" else AdamW(config)
        self._groups: dict[int | None, Group] = {}
        self._banks: tuple[ExpertBank, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The shared group, then the owned columns in rising order."""
        return tuple(self._groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of moments."""
        moments = (tensor for group in self.groups for kept in group.moments.values() for tensor in kept.values())
        return sum(tensor.nbytes for tensor in moments)

    def rebuild(self, model: Transformer, keep_moments: bool, ramp_fresh: bool) -> None:
        """Takes the model's present parameters; groups that were there keep their moments if `keep_moments`.

        With `ramp_fresh`, the learning rate of all other groups rises over their first steps.
        """
        before = self._groups if keep_moments else {}
        self._banks = model.banks
        self._groups = {}
        for column, tensors in _tensors(model):
            old = before.get(column, Group(column, tensors, ramp_fresh))
            self._groups[column] = replace(old, tensors=tensors)

    def restore(self, column: int | None, ramped: bool, steps: int, moments: dict[str, Stored]) -> None:
        """Replaces what is known of one group, by moments of any kind."""
        group = self._groups[column]
        kept = {name: self._kind.stored(one, _matrices_in(group, name)) for name, one in moments.items()}
        group.ramped, group.steps, group.moments = ramped, steps, kept

    def reserve(self) -> None:
        """Makes the moments that the next step would make."""

        def make(group: Group, names: list[str]) -> None:
            for name in names:
                self._moments(group, name)

        self._from_bank_to_bank(make)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients that the parameters of the model have."""

        def step(group: Group, names: list[str]) -> None:
            own = lr * ramp(group.steps) if group.ramped else lr
            self._kind.update(self._pieces(group, names), group.steps, own)

        self._from_bank_to_bank(step)
        for group in self.groups:
            group.steps += 1

    def _from_bank_to_bank(self, act: Callable[[Group, list[str]], None]) -> None:
        """Acts on all tensors of all groups, of owned experts a bank's at a time, while its masters are fp32."""
        shared = self._groups[None]
        act(shared, list(shared.tensors))
        for layer, bank in enumerate(self._banks):
            with bank.masters_in_fp32():
                for column in bank.owned:
                    act(self._groups[column], [f"layers.{layer}.{part}" for part in PARTS])

    def _pieces(self, group: Group, names: list[str]) -> list[Piece]:
        pieces = []
        for name in names:
            place = group.tensors[name]
            if (gradient := place.gradient) is not None:
                pieces.append(Piece(place.values, gradient, self._moments(group, name), _matrices_in(group, name)))
        return pieces

    def _moments(self, group: Group, name: str) -> Stored:
        if name not in group.moments:
            group.moments[name] = self._kind.fresh(group.tensors[name].values, _matrices_in(group, name))
        return group.moments[name]


def values_of(place: Trainable) -> dict[str, Tensor]:
    """The very tensors that hold its values: `value` in fp32, or `upper` and `lower` (experts/masters.py)."""
    if (both := halves_of(place.parameter)) is not None:
        halves = both.of(place.row)
        return {"upper": halves.upper, "lower": halves.lower}
    return {"value": place.values}


def _matrices_in(group: Group, name: str) -> int:
    """Matrices of experts or attention in a tensor, one below the other; 0 for one that is anything else."""
    if len(group.tensors[name].shape) != 2 or (group.column is None and ".attention." not in name):
        return 0
    return 2 if name.endswith(".gate_up") else 1


def gradients_of(model: nn.Module) -> list[Tensor]:
    """All that the parameters have."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def clip_gradients(gradients: list[Tensor], norm: float, largest: float, loss_scale: float = 1.0) -> None:
    """Takes the loss scale out of all gradients, whose norm is `norm` then, and scales it to at most `largest`."""
    if loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / loss_scale)
    if norm > largest and gradients:
        factor = largest / (torch.tensor(norm) + 1e-6)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _tensors(model: Transformer) -> Iterator[tuple[int | None, dict[str, Trainable]]]:
    yield None, {name: Trainable(parameter) for name, parameter in named_shared(model).items()}
    for row, column in enumerate(model.owned):
        places = {}
        for layer, bank in enumerate(model.banks):
            for part in PARTS:
                master = bank.master(part)
                assert master is not None
                places[f"layers.{layer}.{part}"] = Trainable(master, row)
        yield column, places
