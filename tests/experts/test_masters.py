"""Masters in two halves: the bits of all values come back, and what computes is their nearest bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spes_p2p.experts.masters import Halves, halve, halves_of, nearest_bf16, put_away, take_out

SPECIAL = (0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754944e-38, float("inf"), float("-inf"))


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def values_of_all_kinds() -> Tensor:
    """[n, 8]: any bits at all, NaN among them, what is halfway between two bf16, and the ends of the range."""
    anything = torch.randint(-(2**31), 2**31, (60_000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    halfway = (anything & -(2**16)) | 2**15
    ends = torch.tensor([-(2**31), 2**31 - 1, 2**31 - 2**15, -1, 0x7FC00000, -0x400000], dtype=torch.int32)
    special = bits_of(torch.tensor(SPECIAL))
    bits = torch.cat([anything, halfway, halfway - 1, halfway + 1, ends, special])
    return bits[: len(bits) // 8 * 8].view(torch.float32).view(-1, 8)


def halved(values: Tensor) -> tuple[nn.Parameter, Tensor]:
    master, bf16 = nn.Parameter(values.clone()), torch.empty_like(values, dtype=torch.bfloat16)
    halve(master, bf16)
    return master, bf16


def test_the_bits_of_any_value_come_back() -> None:
    values = values_of_all_kinds()
    master, _ = halved(values)
    halves = halves_of(master)
    assert halves is not None
    assert torch.equal(bits_of(halves.read()), bits_of(values))
    assert torch.equal(bits_of(halves.of(slice(3, 5)).read()), bits_of(values[3:5]))
    take_out(master)
    assert torch.equal(bits_of(master.detach()), bits_of(values))
    put_away(master)
    assert torch.equal(bits_of(halves.read()), bits_of(values))


def test_what_computes_is_the_nearest_bf16() -> None:
    values = values_of_all_kinds()
    values = values[values.isfinite().all(1)]
    _, bf16 = halved(values)
    assert torch.equal(nearest_bf16(values), bf16)
    nearest, is_halfway = values.bfloat16(), (bits_of(values) & 0xFFFF) == 2**15
    assert torch.equal(bf16[~is_halfway], nearest[~is_halfway])
    assert (bf16[is_halfway].abs().double() > values[is_halfway].abs().double()).all()
    finite = bf16.isfinite() & nearest.isfinite()
    off = [(one.double() - values.double()).abs() for one in (bf16, nearest)]
    assert torch.equal(off[0][finite], off[1][finite])


def test_values_are_written_where_they_lie() -> None:
    master, bf16 = halved(torch.zeros(3, 4, 2))
    halves, values = halves_of(master), torch.full((2, 2), 1 / 3)
    assert halves is not None
    halves.of(1).write(values, slice(1, 3))
    assert torch.equal(halves.of(1).read()[1:3], values)
    assert torch.equal(bf16[1, 1:3], values.bfloat16())
    assert not bf16[[0, 2]].any()
    assert not bf16[1, [0, 3]].any()


def test_a_master_that_is_away_takes_no_memory_and_its_views_come_back() -> None:
    master = nn.Parameter(torch.randn(3, 8))
    row, before = nn.Parameter(master.detach()[1]), master.detach().clone()
    halve(master, torch.empty(3, 8, dtype=torch.bfloat16))
    assert master.untyped_storage().nbytes() == 0
    assert (master.shape, master.dtype) == ((3, 8), torch.float32)
    for step in range(1, 3):
        take_out(master)
        take_out(master)  # it is there already
        row.detach().add_(1.0)
        put_away(master)
        put_away(master)
        assert master.untyped_storage().nbytes() == 0
        halves = halves_of(master)
        assert isinstance(halves, Halves)
        before[1] += 1.0
        assert torch.equal(halves.read(), before), step


def test_a_master_that_is_whole_stays_so() -> None:
    master = nn.Parameter(torch.ones(2, 2))
    take_out(master)
    put_away(master)
    assert master.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_gradient_is_fp32_while_the_values_are_away() -> None:
    """As the backward pass leaves it while the master is away."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, master: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: object, d: Tensor) -> Tensor:
            return torch.ones(2, 2, dtype=torch.bfloat16)

    master, _ = halved(torch.zeros(2, 2))
    Made.apply(master).backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
