"""Masters of owned experts in two halves: one is the bf16 that the forward pass reads, the other lies beside it.

A master in fp32 and its copy in bf16 take six bytes a value, two of which say nothing new. With the bits of x taken
as a whole number, the upper half of x + 2^15 is the bf16 nearest to x (of two that are equally near, the one further
from zero). It lies in the bank, and the lower half here: four bytes hold both, and x comes back bit for bit.

The master stays an fp32 parameter, with its shape, gradient and hooks, but has memory only between `take_out` and
`put_away`, as parameters of FSDP have. Views of it are made there, and are good whenever it has memory.

Where its rows are dealt to ranks (shards.py), each has all of the bf16, which it computes with, and the lower half of
its own rows alone: those are what `take_out` and `put_away` know, and others must be told of them afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import EllipsisType

import torch
from torch import Tensor, nn

from spes_p2p.experts.shards import Share, own_rows

_HALVES = "_spes_halves"
_ROUND_UP = 2**15


@dataclass(frozen=True)
class Halves:
    """Of fp32 values [..., out, in]: int16. `upper` shares its memory with the values in bf16."""

    upper: Tensor
    lower: Tensor
    """Of the rows that `share` gives to this rank."""
    share: Share = field(default_factory=Share)

    @property
    def own(self) -> slice:
        """The rows of which both halves are here."""
        return self.share.rows(self.upper.shape[-2])

    def of(self, index: int | slice | EllipsisType) -> Halves:
        """Those of one matrix of several, of some or of all, as views."""
        return Halves(self.upper[index], self.lower[index], self.share)

    def write(self, values: Tensor, rows: slice = slice(None)) -> None:
        """Takes the values of these rows of a matrix over, fp32 [rows, in]."""
        lower, upper = _in_pairs(values.contiguous().clone().view(torch.int32).add_(_ROUND_UP))
        self.upper[rows].copy_(upper)
        first, stop, _ = rows.indices(len(self.upper))
        begin, end = max(first, self.own.start), min(stop, self.own.stop)
        if begin < end:
            self.lower[begin - self.own.start : end - self.own.start].copy_(lower[begin - first : end - first])

    def read(self) -> Tensor:
        """The values of a matrix, fp32: a copy. Where rows are dealt, all ranks call it."""
        values = torch.empty_like(self.upper, dtype=torch.float32)
        _join(values.view(torch.int32), self.upper, self.whole_lower())
        return values

    def whole_lower(self) -> Tensor:
        """[out, in] of a matrix. Where rows are dealt, all ranks call it."""
        return self.share.gathered(self.lower, len(self.upper))


def halve(master: nn.Parameter, bf16: Tensor, share: Share | None = None) -> None:
    """From here on the values of `master` are in `bf16`, of its shape, and in 16 bits a value beside it.

    With a `share` these are of its rows, and of others' rows `bf16` stays as it is.
    """
    upper, share = bf16.view(torch.int16), share or Share()
    lower = torch.empty_like(upper[..., share.rows(upper.shape[-2]), :], memory_format=torch.contiguous_format)
    setattr(master, _HALVES, Halves(upper, lower, share))
    put_away(master)


def halves_of(master: Tensor) -> Halves | None:
    """None where it is whole all the time."""
    found: Halves | None = getattr(master, _HALVES, None)
    return found


def take_out(master: nn.Parameter) -> None:
    """Gives a halved master its memory, with the values of its own rows."""
    halves, storage = halves_of(master), master.untyped_storage()
    if halves is not None and not storage.nbytes():
        storage.resize_(master.nbytes)
        own = halves.own
        _join(master.detach().view(torch.int32)[..., own, :], halves.upper[..., own, :], halves.lower)


def put_away(master: nn.Parameter) -> None:
    """Keeps the values of a halved master's own rows in its halves, and frees its memory."""
    halves, storage = halves_of(master), master.untyped_storage()
    if halves is not None and storage.nbytes():
        own = halves.own
        lower, upper = _in_pairs(master.detach().view(torch.int32)[..., own, :].add_(_ROUND_UP))
        halves.lower.copy_(lower)
        halves.upper[..., own, :].copy_(upper)
        storage.resize_(0)


def tensors_of(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Those that hold its values and that each rank has whole: as bytes where it is halved, none where it is dealt."""
    halves = halves_of(parameter)
    if halves is None:
        return (parameter.detach(),) if own_rows(parameter) is None else ()
    whole = (halves.upper,) if halves.share.of > 1 else (halves.upper, halves.lower)
    return tuple(half.view(torch.uint8) for half in whole)


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
