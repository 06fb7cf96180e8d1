"""The output loss in chunks against the same sums from all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spes_p2p.model.losses import HeadSums
from spes_p2p.model.output_loss import chunk_rows, head_sums

ROWS, WIDTH, LOGITS = 23, 12, 57
ALIGNED = 64
"""Logits with the zeros behind them."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and targets."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    head_VD = torch.randn(LOGITS, WIDTH, generator=generator).requires_grad_()
    return x_ND, head_VD, torch.randint(0, LOGITS, (ROWS,), generator=generator)


def from_all_logits(x_ND: Tensor, head_VD: Tensor, target_N: Tensor, counted_N: Tensor, weight: float) -> HeadSums:
    logits_NV = F.linear(x_ND, head_VD).float()
    log_total_N = logits_NV.logsumexp(-1)
    cross_entropy = (F.cross_entropy(logits_NV, target_N, reduction="none") * counted_N).sum()
    output_z = (log_total_N.square() * counted_N).sum()
    return HeadSums(cross_entropy + weight * output_z, cross_entropy, output_z)


def in_chunks_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.model.output_loss.CHUNK_BYTES", 4 * ALIGNED * rows)
    monkeypatch.setattr("spes_p2p.model.output_loss.FP32_BYTES", 4 * LOGITS * 4)
    assert chunk_rows(ALIGNED, torch.float32) == rows


def gradients(function: Any, counted_N: Tensor, weight: float, upstream: float) -> tuple[HeadSums, Tensor, Tensor]:
    x_ND, head_VD, target_N = inputs()
    sums = function(x_ND, head_VD, target_N, counted_N, weight)
    (upstream * sums.total).backward()
    assert x_ND.grad is not None
    assert head_VD.grad is not None
    return sums, x_ND.grad, head_VD.grad


@pytest.mark.parametrize("rows", [1, 5, 23, 64])
@pytest.mark.parametrize(("weight", "upstream"), [(0.0, 1.0), (0.3, 0.01)])
@pytest.mark.parametrize("masked", [slice(0, 0), slice(3, 9), slice(None)], ids=["all", "some", "none"])
def test_sums_and_gradients_equal_those_from_all_logits(
    rows: int, weight: float, upstream: float, masked: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_N = torch.ones(ROWS)
    counted_N[masked] = 0
    in_chunks_of(rows, monkeypatch)
    got = gradients(head_sums, counted_N, weight, upstream)
    want = gradients(from_all_logits, counted_N, weight, upstream)
    for ours, theirs in zip((*got[0], *got[1:]), (*want[0], *want[1:])):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6 * upstream)


def test_large_logits_do_not_overflow() -> None:
    x_ND, head_VD, target_N = inputs()
    sums = head_sums(1e3 * x_ND, head_VD, target_N, torch.ones(ROWS), 1e-5)
    sums.total.backward()
    assert all(value.isfinite() for value in sums)
    assert x_ND.grad is not None
    assert x_ND.grad.isfinite().all()


class _Shapes(TorchDispatchMode):
    """Rows of every matrix of logits that is made, and how many products make them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[1:] == (ALIGNED,) and len(result) != WIDTH:  # not head.T
            self.rows.append(len(result))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default)
        return result


@pytest.mark.parametrize(("trained", "products_a_chunk"), [(True, 3), (False, 1)])
def test_logits_are_held_and_computed_once_a_chunk(
    trained: bool, products_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(6, monkeypatch)
    x_ND, head_VD, target_N = inputs()
    with torch.set_grad_enabled(trained), _Shapes() as seen:
        sums = head_sums(x_ND, head_VD, target_N, torch.ones(ROWS), 0.1)
        if trained:
            sums.total.backward()
    assert max(seen.rows) == 6
    assert seen.products == 4 * products_a_chunk
    assert sums.total.requires_grad == trained


def test_the_heads_gradient_becomes_the_parameters_without_a_copy() -> None:
    x_ND, head_VD, target_N = inputs()
    sums = head_sums(x_ND, head_VD, target_N, torch.ones(ROWS), 0.1)
    assert sums.total.grad_fn is not None
    kept = sums.total.grad_fn.saved_tensors[1].data_ptr()  # type: ignore[attr-defined]
    sums.total.backward()
    assert head_VD.grad is not None
    assert head_VD.grad.data_ptr() == kept


def test_a_second_backward_pass_is_refused() -> None:
    x_ND, head_VD, target_N = inputs()
    total = head_sums(x_ND, head_VD, target_N, torch.ones(ROWS), 0.1).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


@pytest.mark.parametrize("slice_rows", [8192, 10])
def test_bf16_is_close_to_fp32(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.model.output_loss._SLICE_ROWS", slice_rows)
    in_chunks_of(5, monkeypatch)
    want, x_wanted, head_wanted = gradients(from_all_logits, torch.ones(ROWS), 0.1, 1.0)
    x_ND, head_VD, target_N = inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = head_sums(x_ND, head_VD, target_N, torch.ones(ROWS), 0.1)
    got.total.backward()
    assert torch.allclose(torch.stack(list(got)), torch.stack(list(want)), rtol=1e-2)
    assert x_ND.grad is not None
    assert head_VD.grad is not None
    assert (x_ND.grad.dtype, head_VD.grad.dtype) == (torch.bfloat16, torch.float32)
    assert (x_ND.grad - x_wanted).norm() <= 2e-2 * x_wanted.norm()
    assert (head_VD.grad - head_wanted).norm() <= 2e-2 * head_wanted.norm()
