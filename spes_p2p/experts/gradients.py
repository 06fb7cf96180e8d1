"""Gradients that the backward pass adds where they are kept, instead of handing them to autograd.

Autograd would make each micro-batch's gradient of a large matrix, cast it to fp32 and add it: 18 bytes a value beyond
the product's own, where 8 to 10 do. What is added so is unseen by hooks, so DDP needs it off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MARK = "_spes_adds_in_place"


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
