"""Masters of owned experts in two halves: one is the bf16 that the forward pass reads, the other lies beside it.

A master in fp32 and its copy in bf16 take six bytes a value, two of which say nothing new. With the bits of x taken
as a whole number, the upper half of x + 2^15 is the bf16 nearest to x (of two that are equally near, the one further
from zero). It lies in the bank, and the lower half here: four bytes hold both, and x comes back bit for bit.

The master stays an fp32 parameter, with its shape, gradient and hooks, but has memory only between `take_out` and
`put_away`, as parameters of FSDP have. Views of it are made there, and are good whenever it has memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_HALVES = "_spes_halves"
_ROUND_UP = 2**15


@dataclass(frozen=True)
class Halves:
    """Of fp32 values: two tensors of their shape, int16. `upper` shares its memory with the values in bf16."""

    upper: Tensor
    lower: Tensor

    def rows(self, index: object) -> Halves:
        """Those of a part of the values, as views."""
        return Halves(self.upper[index], self.lower[index])  # type: ignore[index]

    def write(self, values: Tensor) -> None:
        """Takes the values over, fp32."""
        self._take(values.contiguous().clone().view(torch.int32))

    def read(self) -> Tensor:
        """The values, fp32: a copy."""
        values = torch.empty_like(self.upper, dtype=torch.float32)
        self._give(values.view(torch.int32))
        return values

    def _take(self, bits: Tensor) -> None:
        """From `bits`, which are changed."""
        bits += _ROUND_UP
        for half, of_bits in zip((self.lower, self.upper), _in_pairs(bits), strict=True):
            half.copy_(of_bits)

    def _give(self, bits: Tensor) -> None:
        for half, of_bits in zip((self.lower, self.upper), _in_pairs(bits), strict=True):
            of_bits.copy_(half)
        bits -= _ROUND_UP


def halve(master: nn.Parameter, bf16: Tensor) -> None:
    """From here on the values of `master` are in `bf16`, of its shape, and in 16 bits a value beside it."""
    upper = bf16.view(torch.int16)
    setattr(master, _HALVES, Halves(upper, torch.empty_like(upper)))
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
        halves._give(master.detach().view(torch.int32))


def put_away(master: nn.Parameter) -> None:
    """Keeps the values of a halved master in its halves, and frees its memory."""
    halves, storage = halves_of(master), master.untyped_storage()
    if halves is not None and storage.nbytes():
        halves._take(master.detach().view(torch.int32))
        storage.resize_(0)


def tensors_of(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Those that hold its values, as bytes where it is halved."""
    halves = halves_of(parameter)
    if halves is None:
        return (parameter.detach(),)
    return halves.upper.view(torch.uint8), halves.lower.view(torch.uint8)


def nearest_bf16(values: Tensor) -> Tensor:
    """As halves round: the same for an expert whoever owns it. May be a view, of fp32 values that are gone."""
    bits = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(torch.int32)
    return _in_pairs(bits.add_(_ROUND_UP))[1].view(torch.bfloat16)


def _in_pairs(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper halves of int32, as views (all machines are little-endian)."""
    pairs = bits.view(torch.int16).unflatten(-1, (-1, 2))
    return pairs[..., 0], pairs[..., 1]
