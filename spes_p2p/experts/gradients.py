"""Gradients that the backward pass adds where they are kept, instead of handing them to autograd.

Autograd would make each micro-batch's gradient of a large matrix, cast it to fp32 and add it: 18 bytes a value beyond
the product's own, where 8 to 10 do. What is added so is unseen by hooks, so DDP needs it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spes_p2p.experts.kernels import has_kernels

ROUNDED_VALUES = 2**24
"""Of a sum in bf16 that are there in fp32, with as many random numbers, at once."""
_MARK = "_spes_adds_in_place"
_ROUNDS = "_spes_adds_in_bf16"


class Sum(NamedTuple):
    """Where a gradient is added up: in fp32, or in bf16, rounded by `noise`."""

    total: Tensor
    noise: torch.Generator | None


def add_in_place(parameter: nn.Parameter) -> None:
    """From here on `sink` gives the place of its gradient."""
    setattr(parameter, _MARK, True)


def sink(parameter: Tensor | None) -> Tensor | None:
    """The fp32 gradient of a parameter, zeros at first, to be added to; None where autograd shall do it."""
    if parameter is None or not getattr(parameter, _MARK, False):
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad


def add_in_bf16(parameter: nn.Parameter, total: Callable[[], Tensor] | None, noise: torch.Generator) -> None:
    """From here on `sum_of` gives that bf16 sum, with `add_rounded` to add to it; no longer where `total` is None."""
    setattr(parameter, _ROUNDS, None if total is None else lambda: Sum(total(), noise))


def sum_of(parameter: Tensor) -> Sum | None:
    """As `sink`, or in bf16; for who adds a part of a gradient at a time."""
    rounds: Callable[[], Sum] | None = getattr(parameter, _ROUNDS, None)
    into = sink(parameter) if rounds is None else None
    return rounds() if rounds is not None else None if into is None else Sum(into, None)


def add_rounded(total: Tensor, term: Tensor, noise: torch.Generator) -> None:
    """Adds to a contiguous bf16 `total`: in fp32, then rounded up or down at random, so that the mean is exact.

    On CUDA in one pass, by a Triton kernel (gradients_kernels.py).
    """
    if has_kernels(total, _try_kernels):
        from spes_p2p.experts import gradients_kernels

        gradients_kernels.add_rounded(total, term.contiguous(), noise)
        return
    flat, terms = total.view(-1), term.reshape(-1)
    for start in range(0, len(flat), ROUNDED_VALUES):
        piece = flat[start : start + ROUNDED_VALUES]
        exact = piece.float().add_(terms[start : start + ROUNDED_VALUES])
        dither = torch.randint(2**16, exact.shape, generator=noise, dtype=torch.int32, device=exact.device)
        dither.masked_fill_(exact != exact, 0)
        exact.view(torch.int32).add_(dither)
        piece.copy_(exact.view(torch.bfloat16)[1::2])  # the upper half of each value (all machines are little-endian)


def _try_kernels(device: torch.device) -> None:
    from spes_p2p.experts import gradients_kernels

    gradients_kernels.try_kernels(device)
