"""grouped_mm against the plain loop: both products, groups of all sizes, aligned and odd widths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spes_p2p.errors import ConfigError
from spes_p2p.experts import choice, megablocks_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.choice import LayerShape, resolve_backend, trial_milliseconds

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the dtype's tolerance, relative to the largest value."""
    assert left.shape == right.shape
    difference = (left.float() - right.float()).abs().max()
    return bool(difference <= TOLERANCE[left.dtype] * right.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width_k", "width_m"), [(16, 8), (24, 40), (5, 7), (8, 3)])
@pytest.mark.parametrize("ends", [[3, 3, 10, 37], [0, 0, 37, 37], [1, 1, 1, 1], [9, 18, 27, 37]])
def test_grouped_mm_agrees_with_the_loop(dtype: torch.dtype, width_k: int, width_m: int, ends: list[int]) -> None:
    torch.manual_seed(0)
    x_NK = torch.randn(ends[-1], width_k, dtype=dtype)
    y_NM = torch.randn(ends[-1], width_m, dtype=dtype)
    w_EMK = torch.randn(4, width_m, width_k, dtype=dtype)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    grouped, eager = GroupedMM(), Eager()
    assert close(grouped.rows(x_NK, w_EMK.mT, ends_E), eager.rows(x_NK, w_EMK.mT, ends_E))
    assert close(grouped.rows(y_NM, w_EMK, ends_E), eager.rows(y_NM, w_EMK, ends_E))
    for groups in (1, 2, 4):  # ends that cut off the rows after them
        assert close(grouped.outer(y_NM, x_NK, ends_E[:groups]), eager.outer(y_NM, x_NK, ends_E[:groups]))


def test_rows_of_an_expanded_gradient() -> None:
    x_NK = torch.ones(()).expand(6, 8)  # what the backward of sum() hands over: stride 0
    w_EKM, ends_E = torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    assert close(GroupedMM().rows(x_NK, w_EKM, ends_E), Eager().rows(x_NK, w_EKM, ends_E))


def test_auto_takes_what_runs_and_says_why() -> None:
    backend, reason = resolve_backend("auto", CPU, torch.float32)
    assert backend.name == "grouped_mm"
    assert "runs on cpu" in reason
    backend, reason = resolve_backend("auto", CPU, torch.int32)
    assert backend.name == "eager"
    assert "fails on cpu in torch.int32" in reason


def test_a_backend_asked_for_by_name_must_run() -> None:
    assert resolve_backend("eager", CPU, torch.float32)[0].name == "eager"
    with pytest.raises(ConfigError, match="grouped_mm, which does not run on cpu"):
        resolve_backend("grouped_mm", CPU, torch.int32)
    with pytest.raises(ConfigError, match=r"megablocks, which does not run on cpu in torch\.float32: .* on CUDA only"):
        resolve_backend("megablocks", CPU, torch.float32)
    with pytest.raises(ConfigError, match="'fast', an unknown backend"):
        resolve_backend("fast", CPU, torch.float32)


def test_where_two_backends_run_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quick(GroupedMM):
        name = "megablocks"

    monkeypatch.setattr(megablocks_backend, "why_not", lambda device: "")
    monkeypatch.setattr(megablocks_backend, "MegaBlocks", Quick)
    times = {"grouped_mm": 2.0, "megablocks": 1.5}
    monkeypatch.setattr(choice, "trial_milliseconds", lambda backend, *layer: times[backend.name])
    shape = LayerShape(4, 2, 16, 8)
    backend, reason = resolve_backend("auto", CPU, torch.float32, shape)
    assert backend.name == "megablocks"
    assert reason == "one layer forward and backward in 1.50 ms; grouped_mm 2.00 ms"

    def broken(backend: Backend, *layer: object) -> float:
        if backend.name == "megablocks":
            raise ValueError("\nno kernel image")
        return times[backend.name]

    monkeypatch.setattr(choice, "trial_milliseconds", broken)
    backend, reason = resolve_backend("auto", CPU, torch.float32, shape)
    assert backend.name == "grouped_mm"
    assert reason == "one layer forward and backward in 2.00 ms; megablocks fails: no kernel image"
    assert resolve_backend("auto", CPU, torch.int32, shape)[0].name == "eager"
    monkeypatch.setattr(choice, "trial_milliseconds", lambda backend, *layer: times[backend.name])
    times["megablocks"] = 2.5
    assert resolve_backend("auto", CPU, torch.float32, shape)[0].name == "grouped_mm"


def test_the_trial_of_a_backend_takes_time() -> None:
    assert trial_milliseconds(Eager(), LayerShape(4, 2, 16, 8), CPU, torch.float32) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ends", [[3, 3, 10, 37], [0, 0, 37, 37], [1, 1, 1, 1]])
def test_grouped_mm_agrees_with_the_loop_on_cuda(ends: list[int]) -> None:
    torch.manual_seed(0)
    x_NK = torch.randn(ends[-1], 64, dtype=torch.bfloat16, device="cuda")
    y_NM = torch.randn(ends[-1], 32, dtype=torch.bfloat16, device="cuda")
    w_EMK = torch.randn(4, 32, 64, dtype=torch.bfloat16, device="cuda")
    ends_E = torch.tensor(ends, dtype=torch.int32, device="cuda")
    grouped, eager = GroupedMM(), Eager()
    assert close(grouped.rows(x_NK, w_EMK.mT, ends_E), eager.rows(x_NK, w_EMK.mT, ends_E))
    assert close(grouped.rows(y_NM, w_EMK, ends_E), eager.rows(y_NM, w_EMK, ends_E))
    assert close(grouped.outer(y_NM, x_NK, ends_E[:2]), eager.outer(y_NM, x_NK, ends_E[:2]))


def test_a_gpu_without_kernels_is_a_reason_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*size: int, **named: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(choice, "torch", SimpleNamespace(ones=no_kernel))
    why = choice._why_grouped_mm_fails.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert why == "CUDA error: no kernel image is available for execution on the device"
