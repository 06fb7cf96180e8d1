"""AdamW over shared parameters and owned expert columns, with moments and a step count of their own for each column.

The masters of a bank are one parameter [O, out, in] for all owned experts, but torch keeps one step count a tensor, and
a column that was adopted later needs its own. So the optimizer gets the rows: leaf tensors that share storage with the
masters, and whose gradients are views of the masters' gradients. One parameter group a column, so that each has its own
learning-rate ramp. Moments stay with a column for as long as it is owned; they are never averaged (SPES).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spes_p2p.config.schema import OptimizerConfig
from spes_p2p.experts.bank import MATRICES
from spes_p2p.model.params import masters_of, named_shared
from spes_p2p.model.transformer import Transformer
from spes_p2p.train.schedule import ramp

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Group:
    """What is stepped together: the shared parameters (`column` None) or one expert column."""

    column: int | None
    tensors: dict[str, nn.Parameter]
    ramped: bool
    """Whether the learning rate rises over the first steps: the moments began after the run did."""
    steps: int = 0
    """Optimizer steps that the moments have seen: the count of the bias correction."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By tensor name; empty until the first step."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """`steps` once a tensor, as torch wants it."""


class Optimizer:
    """AdamW with weight decay on everything. `rebuild` it whenever the owned columns change.

    Uses torch's AdamW as a function: its class loads the compiler when it is made, for seconds, in which no other
    thread runs.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._groups: dict[int | None, Group] = {}
        self._rows: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        self._fused = True

    @property
    def groups(self) -> tuple[Group, ...]:
        """The shared group, then the owned columns in rising order."""
        return tuple(self._groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of moments and step counts."""
        moments = (tensor for group in self.groups for pair in group.moments.values() for tensor in pair.values())
        counts = (tensor for group in self.groups for tensor in group.counts.values())
        return sum(tensor.nbytes for tensor in (*moments, *counts))

    def rebuild(self, model: Transformer, keep_moments: bool, ramp_fresh: bool) -> None:
        """Takes the model's present parameters; groups that were there keep their moments if `keep_moments`.

        With `ramp_fresh`, the learning rate of all other groups rises over their first steps.
        """
        before = self._groups if keep_moments else {}
        self._rows = list(_rows(model))
        self._groups = {}
        for column, tensors in _tensors(model, self._rows):
            old = before.get(column, Group(column, tensors, ramp_fresh))
            self._groups[column] = replace(old, tensors=tensors)
        self._fused = _has_fused(self.groups)

    def restore(self, column: int | None, ramped: bool, steps: int, moments: dict[str, dict[str, Tensor]]) -> None:
        """Replaces what is known of one group."""
        group = self._groups[column]
        group.ramped, group.steps, group.moments, group.counts = ramped, steps, moments, {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step with the gradients that the model has."""
        for row, master, index in self._rows:
            row.grad = None if master.grad is None else master.grad[index]
        for group in self.groups:
            self._step_group(group, lr * ramp(group.steps) if group.ramped else lr)
            group.steps += 1
        for row, _, _ in self._rows:
            row.grad = None

    def _step_group(self, group: Group, lr: float) -> None:
        names = [name for name, parameter in group.tensors.items() if parameter.grad is not None]
        parameters: list[Tensor] = [group.tensors[name] for name in names]
        for name, parameter in zip(names, parameters, strict=True):
            group.moments.setdefault(name, {moment: torch.zeros_like(parameter) for moment in MOMENTS})
            group.counts.setdefault(name, torch.tensor(float(group.steps), device=parameter.device))
        config, (beta1, beta2) = self._config, self._config.betas
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [group.moments[name][MOMENTS[0]] for name in names],
            [group.moments[name][MOMENTS[1]] for name in names],
            [],
            [group.counts[name] for name in names],
            foreach=not self._fused,
            fused=self._fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients that the model holds."""
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm of all gradients together, shared and owned: a scalar on the device."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def clip_gradients(model: nn.Module, norm: float, largest: float) -> None:
    """Scales all gradients down so that their norm, now `norm`, is at most `largest`."""
    if norm > largest:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), largest, torch.tensor(norm))


def _has_fused(groups: Iterable[Group]) -> bool:
    return {tensor.device.type for group in groups for tensor in group.tensors.values()} <= {"cpu", "cuda"}


def _rows(model: Transformer) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
    """(row, master, index) by layer, matrix, owned column."""
    for master in masters_of(model):
        for index in range(master.shape[0]):
            yield nn.Parameter(master.detach()[index]), master, index


def _tensors(
    model: Transformer, rows: list[tuple[nn.Parameter, nn.Parameter, int]]
) -> Iterator[tuple[int | None, dict[str, nn.Parameter]]]:
    yield None, named_shared(model)
    for position, column in enumerate(model.owned):
        own = [row for row, _, index in rows if index == position]
        names = [f"layers.{layer}.{which}" for layer in range(len(model.banks)) for which in MATRICES]
        yield column, dict(zip(names, own, strict=True))
