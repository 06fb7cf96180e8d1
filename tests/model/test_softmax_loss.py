"""The losses of rows of logits against autograd, and so their Triton kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.model import output_loss, softmax_loss_kernels
from tests.kernels import DEVICE, there

WEIGHT = 0.1
RowLosses = Callable[[Tensor, int, Tensor, Tensor, float, bool], Tensor]


@pytest.fixture(scope="module")
def kernel() -> RowLosses:
    def row_losses(
        logits_nV: Tensor, num_logits: int, target_n: Tensor, counted_n: Tensor, weight: float, gradient: bool
    ) -> Tensor:
        logits, target, counted = there(logits_nV, target_n, counted_n)
        sums = softmax_loss_kernels.row_losses(logits, num_logits, target, counted, weight, gradient)
        logits_nV.copy_(logits)
        return sums.cpu()

    return row_losses


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.kernels)])
def row_losses(request: pytest.FixtureRequest) -> RowLosses:
    return request.getfixturevalue("kernel") if request.param == "triton" else output_loss.row_losses


def inputs(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and what counts: the third of five rows does not."""
    generator = torch.Generator().manual_seed(width)
    logits_nV = 3 * torch.randn(5, width, generator=generator)
    target_n = torch.randint(0, width, (5,), generator=generator)
    return logits_nV.to(dtype), target_n, torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])


def by_autograd(logits_nV: Tensor, target_n: Tensor, counted_n: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums, and the gradient of the first plus WEIGHT times the second."""
    logits_nV = logits_nV.float().clone().requires_grad_()
    cross_entropy = (F.cross_entropy(logits_nV, target_n, reduction="none") * counted_n).sum()
    output_z = (logits_nV.logsumexp(1).square() * counted_n).sum()
    (cross_entropy + WEIGHT * output_z).backward()
    assert logits_nV.grad is not None
    return torch.stack((cross_entropy, output_z)).detach(), logits_nV.grad


def summed(
    row_losses: RowLosses, logits_nV: Tensor, target_n: Tensor, counted_n: Tensor, gradient: bool = True
) -> Tensor:
    return row_losses(logits_nV, logits_nV.shape[1], target_n, counted_n, WEIGHT, gradient)


@pytest.mark.parametrize(("width", "padding"), [(1, 0), (16, 48), (57, 7), (5000, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gradient_equal_autograds(row_losses: RowLosses, width: int, padding: int, dtype: torch.dtype) -> None:
    given = inputs(width, dtype)
    losses, gradient_nV = by_autograd(*given)
    padded_nV = F.pad(given[0], (0, padding))
    got = row_losses(padded_nV, width, *given[1:], WEIGHT, True)
    assert got.dtype == torch.float32
    assert torch.allclose(got, losses, rtol=1e-5, atol=1e-5)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7  # the last bit of bf16
    assert torch.allclose(padded_nV[:, :width].float(), gradient_nV, rtol=rtol, atol=1e-6)
    assert not padded_nV[:, width:].any()


def test_without_a_gradient_the_sums_are_the_same(row_losses: RowLosses) -> None:
    assert torch.equal(*(summed(row_losses, *inputs(57, torch.float32), gradient=wanted) for wanted in (True, False)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(row_losses: RowLosses, bad: float) -> None:
    logits_nV, target_n, counted_n = inputs(57, torch.float32)
    logits_nV[1, 3] = bad
    assert not summed(row_losses, logits_nV, target_n, counted_n).isfinite().any()


def test_logits_of_any_size_are_finite(row_losses: RowLosses) -> None:
    logits_nV, target_n, counted_n = inputs(57, torch.float32)
    logits_nV *= 1e4
    logits_nV[0] -= 1e6
    assert summed(row_losses, logits_nV, target_n, counted_n).isfinite().all()
    assert logits_nV.isfinite().all()


def test_no_rows_are_no_loss(row_losses: RowLosses) -> None:
    nothing = torch.empty(0, 57), torch.empty(0, dtype=torch.int64), torch.empty(0)
    assert summed(row_losses, *nothing).tolist() == [0.0, 0.0]


@pytest.mark.kernels
def test_the_trial_launches_the_kernel_both_ways() -> None:
    output_loss.try_kernels(DEVICE)
