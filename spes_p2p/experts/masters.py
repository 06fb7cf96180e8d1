"""Masters of owned experts in two halves: one is the bf16 that the forward pass reads, the other lies beside it.

A master in fp32 and its copy in bf16 take six bytes a value, two of which say nothing new. With the bits of x taken
as a whole number, the upper half of x + 2^15 is the bf16 nearest to x (of two that are equally near, the one further
from zero). It lies in the bank, and the lower half here: four bytes hold both, and x comes back bit for bit.

The master stays an fp32 parameter, with its shape, gradient and hooks, but has memory only between `take_out` and
`put_away`, as parameters of FSDP have. Views of it are made there, and are good whenever it has memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor, nn

_HALVES = "_spes_halves"
_ROUND_UP = 2**15


@dataclass(frozen=True)
class Halves:
    """Of fp32 values [..., out, in]: int16. `upper` shares its memory with the values in bf16."""

    upper: Tensor
    lower: Tensor

    def of(self, index: int | slice | EllipsisType) -> Halves:
        """Those of one matrix of several, or of all, as views."""
        return Halves(self.upper[index], self.lower[index])

    def write(self, values: Tensor, rows: slice = slice(None)) -> None:
        """Takes the values of these rows of a matrix over, fp32 [rows, in]."""
        lower, upper = _in_pairs(values.contiguous().clone().view(torch.int32).add_(_ROUND_UP))
        self.upper[rows].copy_(upper)
        self.lower[rows].copy_(lower)

    def read(self) -> Tensor:
        """The values of a matrix, fp32: a copy."""
        values = torch.empty_like(self.upper, dtype=torch.float32)
        _join(values.view(torch.int32), self.upper, self.lower)
        return values


def halve(master: nn.Parameter, bf16: Tensor) -> None:
    """From here on the values of `master` are in `bf16`, of its shape, and in 16 bits a value beside it."""
    upper = bf16.view(torch.int16)
    setattr(master, _HALVES, Halves(upper, torch.empty_like(upper, memory_format=torch.contiguous_format)))
    put_away(master)


def halves_of(master: Tensor) -> Halves | None:
    """None where it is whole all the time."""
    found: Halves | None = getattr(master, _HALVES, None)
    return found


def take_out(master: nn.Parameter) -> None:
    """Gives a halved master its memory, with its values."""
    halves, storage = halves_of(master), master.untyped_storage()
    if halves is not None and not storage.nbytes():
        storage.resize_(master.nbytes)
        _join(master.detach().view(torch.int32), halves.upper, halves.lower)


def put_away(master: nn.Parameter) -> None:
    """Keeps the values of a halved master in its halves, and frees its memory."""
    halves, storage = halves_of(master), master.untyped_storage()
    if halves is not None and storage.nbytes():
        lower, upper = _in_pairs(master.detach().view(torch.int32).add_(_ROUND_UP))
        halves.lower.copy_(lower)
        halves.upper.copy_(upper)
        storage.resize_(0)


def nearest_bf16(values: Tensor) -> Tensor:
    """As halves round: the same for an expert whoever owns it. May be a view, of fp32 values that are gone."""
    bits = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(torch.int32)
    return _in_pairs(bits.add_(_ROUND_UP))[1].view(torch.bfloat16)


def _join(bits: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Writes the values of two halves to `bits`."""
    for half, of_bits in zip((lower, upper), _in_pairs(bits), strict=True):
        of_bits.copy_(half)
    bits -= _ROUND_UP


def _in_pairs(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper halves of int32, as views (all machines are little-endian)."""
    pairs = bits.view(torch.int16).unflatten(-1, (-1, 2))
    return pairs[..., 0], pairs[..., 1]
