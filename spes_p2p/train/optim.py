"""The optimizer over shared parameters and owned expert columns, with moments and a step count for each column.

The masters of a bank are one parameter [O, out, in] for all owned experts, but torch keeps one step count a tensor, and
a column that was adopted later needs its own. So the optimizer gets the rows: leaf tensors that share storage with the
masters, and whose gradients are views of the masters' gradients. One parameter group a column, so that each has its own
learning-rate ramp. Moments stay with a column for as long as it is owned; they are never averaged (SPES). How they are
kept is the business of moment_store.py. A step goes from bank to bank, since masters may take memory that is there for
one at a time alone (experts/masters.py).

Where the ranks of a peer share the work (kept_gradients.py), this one steps its rows of each tensor alone, and has
moments of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from spes_p2p.config.schema import OptimizerConfig
from spes_p2p.errors import ConfigError
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.masters import halves_of
from spes_p2p.experts.shards import Share, own_rows, read
from spes_p2p.experts.stores import PARTS
from spes_p2p.model.params import named_shared
from spes_p2p.model.transformer import Transformer
from spes_p2p.train.moment_store import (
    BLOCK_VALUES,
    MOMENTS,
    SMALLEST_VALUES,
    EightBit,
    Float32,
    Kind,
    Piece,
    Stored,
    cut,
)
from spes_p2p.train.muon import Muon
from spes_p2p.train.schedule import ramp

__all__ = ["MOMENTS", "Group", "Optimizer"]


@dataclass
class Group:
    """What is stepped together: the shared parameters (`column` None) or one expert column."""

    column: int | None
    tensors: dict[str, nn.Parameter]
    ramped: bool
    """Whether the learning rate rises over the first steps: the moments began after the run did."""
    steps: int = 0
    """Optimizer steps that the moments have seen: the count of the bias correction."""
    moments: dict[str, Stored] = field(default_factory=dict)
    """By tensor name, as they are kept, of this rank's rows; empty until the first step."""


class Optimizer:
    """AdamW with weight decay on everything. `rebuild` it whenever the owned columns change."""

    def __init__(self, config: OptimizerConfig, share: Share | None = None) -> None:
        """Raises ConfigError where a library is missing that optimizer.name asks for."""
        self._kind, self._plain, self._share = kind_of(config), Float32(config), share or Share()
        self._gradient_dtype = _gradient_dtype(config)
        self._groups: dict[int | None, Group] = {}
        self._masters: dict[int, tuple[nn.Parameter, int]] = {}
        """Where a row's gradient is, by the row's id: in that of its master."""
        self._banks: tuple[ExpertBank, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The shared group, then the owned columns in rising order."""
        return tuple(self._groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of moments, with their scales."""
        moments = (tensor for group in self.groups for kept in group.moments.values() for tensor in kept.values())
        return sum(tensor.nbytes for tensor in moments)

    def rebuild(self, model: Transformer, keep_moments: bool, ramp_fresh: bool) -> None:
        """Takes the model's present parameters; groups that were there keep their moments if `keep_moments`.

        With `ramp_fresh`, the learning rate of all other groups rises over their first steps.
        """
        self._kind.check(next(model.parameters()).device)
        if self._gradient_dtype != torch.float32:
            for parameter in model.parameters():
                parameter.grad_dtype = self._gradient_dtype
        before = self._groups if keep_moments else {}
        self._banks = model.banks
        rows = list(_rows(self._banks))
        self._masters = {id(row): (master, index) for row, master, index in rows}
        self._groups = {}
        for column, tensors in _tensors(model, rows):
            old = before.get(column, Group(column, tensors, ramp_fresh))
            self._groups[column] = replace(old, tensors=tensors)

    def kept(self, group: Group, name: str, moments: Stored) -> Stored:
        """Moments of any kind, of a whole tensor, as they are kept here."""
        parameter = group.tensors[name]
        stored = self._kind_of(parameter).stored(moments, _matrices_in(group, name, parameter))
        if self._share.of == 1:
            return stored
        rows = self._share.rows(len(parameter))
        return {key: values[cut(key, parameter.shape, rows)].clone() for key, values in stored.items()}

    def restore(self, column: int | None, ramped: bool, steps: int, moments: dict[str, Stored]) -> None:
        """Replaces what is known of one group. The moments must be as `kept` gives them."""
        group = self._groups[column]
        group.ramped, group.steps, group.moments = ramped, steps, moments

    def reserve(self) -> None:
        """Makes the moments that the next step would make."""

        def make(group: Group, names: list[str]) -> None:
            for name in names:
                self._moments(group, name)

        self._from_bank_to_bank(make)

    def values(self, group: Group, name: str, whole: bool = False) -> dict[str, Tensor]:
        """The very tensors that hold one's values: `value` in fp32, or `upper` and `lower` (experts/masters.py).

        Of what is dealt to ranks it is this rank's rows, or with `whole` copies of all: then all ranks call it.
        """
        parameter = group.tensors[name]
        master, index = self._masters.get(id(parameter), (parameter, ...))
        if (both := halves_of(master)) is not None:
            halves = both.of(index)
            return {"upper": halves.upper, "lower": halves.whole_lower() if whole else halves.lower}
        own = None if whole else own_rows(parameter)
        return {"value": read(parameter) if own is None else own}

    @torch.no_grad()
    def step(self, lr: float, gradient_of: Callable[[nn.Parameter], Tensor | None] | None = None) -> None:
        """One step with the gradients that the parameters of the model have, or those of this rank's rows."""

        def step(group: Group, names: list[str]) -> None:
            own = lr * ramp(group.steps) if group.ramped else lr
            self._kind.update(self._pieces(group, names, gradient_of or _own_gradient), group.steps, own)

        self._from_bank_to_bank(step)
        for group in self.groups:
            group.steps += 1

    def _from_bank_to_bank(self, act: Callable[[Group, list[str]], None]) -> None:
        """Acts on all tensors of all groups, those of owned experts in a bank at a time, while its masters are fp32."""
        for group in self.groups:
            if group.column is None:
                act(group, list(group.tensors))
        for layer, bank in enumerate(self._banks):
            with bank.masters_in_fp32():
                for column in bank.owned:
                    act(self._groups[column], [f"layers.{layer}.{part}" for part in PARTS])

    def _pieces(
        self, group: Group, names: list[str], gradient_of: Callable[[nn.Parameter], Tensor | None]
    ) -> list[Piece]:
        pieces = []
        for name in names:
            parameter = group.tensors[name]
            whole, index = self._masters.get(id(parameter), (parameter, ...))
            gradient, values = gradient_of(whole), self._own(parameter)
            if gradient is not None and values.numel():
                moments, matrices = self._moments(group, name), _matrices_in(group, name, parameter)
                pieces.append(Piece(values, gradient[index], moments, matrices))
        return pieces

    def _moments(self, group: Group, name: str) -> Stored:
        if name not in group.moments:
            parameter = group.tensors[name]
            kind, values = self._kind_of(parameter), self._own(parameter)
            group.moments[name] = kind.fresh(values, _matrices_in(group, name, parameter))
        return group.moments[name]

    def _own(self, parameter: nn.Parameter) -> Tensor:
        """What of it is stepped here."""
        if (own := own_rows(parameter)) is not None:
            return own
        values = parameter.detach()
        return values[self._share.rows(len(values))] if self._share.of > 1 else values

    def _kind_of(self, parameter: nn.Parameter) -> Kind:
        """How moments are kept: in 8 bits only where the rows of each rank are whole blocks, and many."""
        if self._share.of == 1:
            return self._kind
        width, least = parameter.shape[1:].numel(), len(parameter) // self._share.of
        return self._kind if width % BLOCK_VALUES == 0 and least * width >= SMALLEST_VALUES else self._plain


def kind_of(config: OptimizerConfig) -> Kind:
    """Raises ConfigError where optimizer.name asks for a library that is not installed."""
    if config.name == "muon":
        return Muon(config)
    return EightBit(config) if config.name == "adamw8bit" else Float32(config)


def _matrices_in(group: Group, name: str, values: Tensor) -> int:
    """Matrices of experts or attention in a tensor, one below the other; 0 for one that is anything else."""
    if values.ndim != 2 or (group.column is None and ".attention." not in name):
        return 0
    return 2 if name.endswith(".gate_up") else 1


def _own_gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def gradients_of(model: nn.Module) -> list[Tensor]:
    """All that the parameters have."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all together: a scalar on the device."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(gradients: list[Tensor], norm: float, largest: float, loss_scale: float = 1.0) -> None:
    """Takes the loss scale out of all gradients, whose norm is `norm` then, and scales it to at most `largest`."""
    if loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / loss_scale)
    if norm > largest and gradients:
        factor = largest / (torch.tensor(norm) + 1e-6)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _gradient_dtype(config: OptimizerConfig) -> torch.dtype:
    if config.gradient_dtype == "bf16" and not hasattr(Tensor, "grad_dtype"):
        raise ConfigError(
            f"optimizer.gradient_dtype is bf16, which torch {torch.__version__} cannot keep for fp32 parameters",
            fix="set it to fp32, or install torch 2.10 or newer",
        )
    return torch.bfloat16 if config.gradient_dtype == "bf16" else torch.float32


def _rows(banks: Iterable[ExpertBank]) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
    """(row, master, index) by layer, matrix, owned column."""
    for bank in banks:
        with bank.masters_in_fp32():
            masters = [master for part in PARTS if (master := bank.master(part)) is not None]
            for master in masters:
                for index in range(len(master)):
                    yield nn.Parameter(master.detach()[index]), master, index


def _tensors(
    model: Transformer, rows: list[tuple[nn.Parameter, nn.Parameter, int]]
) -> Iterator[tuple[int | None, dict[str, nn.Parameter]]]:
    yield None, named_shared(model)
    for position, column in enumerate(model.owned):
        own = [row for row, _, index in rows if index == position]
        names = [f"layers.{layer}.{part}" for layer in range(len(model.banks)) for part in PARTS]
        yield column, dict(zip(names, own, strict=True))
