"""How the moments of a tensor are kept, and the step that uses them: here AdamW's two, in fp32; Muon's one in muon.py.

Moments are kept as named tensors, so that whoever counts or saves them need not know their kind.

Leaves out: which tensors there are, and with which learning rate and count they step (optim.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from spes_p2p.config.schema import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum"
"""In their place where the tensor is stepped by Muon."""
FUSED_ON = "cpu", "cuda"
"""Devices on which AdamW is one kernel."""

Stored = dict[str, Tensor]
"""fp32: `exp_avg` and `exp_avg_sq`, or `momentum` alone."""
Form = Literal["fp32", "momentum"]


class Piece(NamedTuple):
    """A tensor to be stepped in place; all in fp32."""

    values: Tensor
    gradient: Tensor
    moments: Stored
    matrices: int = 0
    """How many matrices of experts or attention lie one below the other in it; 0 where it is something else."""


class Kind(Protocol):
    """One way to keep moments."""

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        """Moments of `values`, which hold so many matrices (see Piece), before the first step."""

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        """Moments of any kind in this one; the same tensors where they are of this kind already."""

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        """One step in place, the `steps + 1`-th that these moments see."""


def form_of(moments: Stored) -> Form:
    """How these are kept."""
    return "momentum" if MOMENTUM in moments else "fp32"


def unpacked(moments: Stored) -> Stored:
    """AdamW's moments: the very tensors; zeros in the place of momentum."""
    if MOMENTUM in moments:
        return {which: torch.zeros_like(moments[MOMENTUM]) for which in MOMENTS}
    return moments


def names_of(form: Form) -> tuple[str, ...]:
    """What is kept for a tensor, each of its shape."""
    return (MOMENTUM,) if form == "momentum" else MOMENTS


class AdamW:
    """torch's AdamW, fused where the device has it.

    As a function: its class loads the compiler when it is made, for seconds, in which no other thread runs.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        return {which: torch.zeros_like(values) for which in MOMENTS}

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        return unpacked(moments)

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        if not pieces:
            return
        device, config = pieces[0].values.device, self._config
        fused = device.type in FUSED_ON
        adamw(
            [piece.values for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.moments[MOMENTS[0]] for piece in pieces],
            [piece.moments[MOMENTS[1]] for piece in pieces],
            [],
            # counts that are not part of a fused kernel are read by the host
            list(torch.full((len(pieces),), float(steps), device=device if fused else None).unbind()),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )
