"""The elementwise middle of an expert against autograd, and so its Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.experts import swiglu, swiglu_kernels
from spes_p2p.experts.kernels import _said_why_not
from tests.kernels import DEVICE, there

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def inputs(rows: int, ffn: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, gate_up and weight."""
    generator = torch.Generator().manual_seed(rows)
    d_hidden_NF, gate_up_N2F = (torch.randn(rows, width, generator=generator).to(dtype) for width in (ffn, 2 * ffn))
    return d_hidden_NF, gate_up_N2F, torch.rand(rows, generator=generator)


def by_autograd(d_hidden_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden and both gradients, in fp32."""
    gate_up_N2F, weight_N = gate_up_N2F.float().requires_grad_(), weight_N.clone().requires_grad_()
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    hidden_NF = F.silu(gate_NF) * up_NF * weight_N[:, None]
    hidden_NF.backward(d_hidden_NF.float())
    assert gate_up_N2F.grad is not None
    assert weight_N.grad is not None
    return hidden_NF.detach(), gate_up_N2F.grad, weight_N.grad


def assert_all_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for left, right in zip(got, want, strict=True):
        assert left.shape == right.shape
        assert (left.float() - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "ffn"), [(5, 12), (1, 7), (3, 64)])
def test_equals_autograd(rows: int, ffn: int, dtype: torch.dtype) -> None:
    given = inputs(rows, ffn, dtype)
    hidden_NF, want = swiglu.forward(*given[1:]), by_autograd(*given)
    got = swiglu.backward(*given, torch.tensor([rows]))
    assert hidden_NF.dtype == got.hidden_NF.dtype == got.d_gate_up_N2F.dtype == dtype
    assert got.d_weight_N.dtype == torch.float32
    assert torch.equal(hidden_NF, got.hidden_NF)
    assert_all_close(got, want, TOLERANCE[dtype])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "ffn"), [(5, 12), (1, 7), (2, 2048), (2, 1500), (0, 8)])
def test_the_kernels_give_the_same(rows: int, ffn: int, dtype: torch.dtype) -> None:
    given = inputs(rows, ffn, dtype)
    (d_hidden_NF, gate_up_N2F, weight_N), want = there(*given), by_autograd(*given)
    hidden_NF = swiglu_kernels.forward(gate_up_N2F, weight_N).cpu()
    assert hidden_NF.shape == (rows, ffn)
    for end in {rows, rows // 2, 0}:
        end_1 = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        again_NF, *got = (one.cpu() for one in swiglu_kernels.backward(d_hidden_NF, gate_up_N2F, weight_N, end_1))
        assert torch.equal(hidden_NF[:end], again_NF[:end])
        if rows:
            assert_all_close((hidden_NF, *got), want, TOLERANCE[dtype])


@pytest.mark.kernels
def test_the_trial_launches_both_kernels() -> None:
    swiglu.try_kernels(DEVICE)


def test_a_trial_that_fails_is_said_once_and_torch_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[torch.device] = []

    def trial(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("bf16 is not supported below sm_80\nmore")

    answers = [_said_why_not(torch.device("cpu"), trial) for _ in range(2)]
    assert answers == ["bf16 is not supported below sm_80"] * 2
    assert len(tried) == len(caplog.records) == 1
