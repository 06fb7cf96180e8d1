"""grouped_mm against the plain loop: both products, groups of all sizes, aligned and odd widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spes_p2p.errors import ConfigError
from spes_p2p.experts import choice, megablocks_backend, quack_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.choice import LayerShape, resolve_backend, trial_milliseconds, why_wrong
from spes_p2p.experts.triton_backend import TritonGrouped
from tests.kernels import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the dtype's tolerance, relative to the largest value."""
    assert left.shape == right.shape
    if not left.numel():
        return True
    difference = (left.float() - right.float()).abs().max()
    return bool(difference <= TOLERANCE[left.dtype] * right.float().abs().max())


def agree_on(
    backend: Backend, device: torch.device, dtype: torch.dtype, widths: tuple[int, int], ends: list[int]
) -> None:
    """Both products equal those of the loop, also where groups end before the last row."""
    generator = torch.Generator().manual_seed(0)
    width_k, width_m = widths
    x_NK, y_NM, w_EMK = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((ends[-1], width_k), (ends[-1], width_m), (4, width_m, width_k))
    )
    ends_E, eager = torch.tensor(ends, dtype=torch.int32, device=device), Eager()
    assert close(backend.rows(x_NK, w_EMK.mT, ends_E), eager.rows(x_NK, w_EMK.mT, ends_E))
    assert close(backend.rows(y_NM, w_EMK, ends_E), eager.rows(y_NM, w_EMK, ends_E))
    for groups in (1, 2, 4):  # ends that cut off the rows after them
        products = eager.outer(y_NM, x_NK, ends_E[:groups])
        assert close(backend.outer(y_NM, x_NK, ends_E[:groups]), products)
        sums = torch.ones_like(products, dtype=torch.float32)
        backend.add_outer(sums, y_NM, x_NK, ends_E[:groups])
        assert close((sums - 1).to(products.dtype), products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width_k", "width_m"), [(16, 8), (24, 40), (5, 7), (8, 3)])
@pytest.mark.parametrize("ends", [[3, 3, 10, 37], [0, 0, 37, 37], [1, 1, 1, 1], [9, 18, 27, 37]])
def test_grouped_mm_agrees_with_the_loop(dtype: torch.dtype, width_k: int, width_m: int, ends: list[int]) -> None:
    agree_on(GroupedMM(), CPU, dtype, (width_k, width_m), ends)


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
    assert reason.startswith("nothing else runs on cpu in torch.int32: grouped_mm: ")
    assert "triton: Triton's kernels run on CUDA only, not on cpu" in reason


def test_a_backend_asked_for_by_name_must_run() -> None:
    assert resolve_backend("eager", CPU, torch.float32)[0].name == "eager"
    with pytest.raises(ConfigError, match="grouped_mm, which does not run on cpu"):
        resolve_backend("grouped_mm", CPU, torch.int32)
    with pytest.raises(ConfigError, match=r"triton, which does not run on cpu in torch\.float32: .* on CUDA only"):
        resolve_backend("triton", CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"megablocks, which does not run on cpu in torch\.float32: .* on CUDA only"):
        resolve_backend("megablocks", CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"quack, which does not run on cpu in torch\.float32: .* on CUDA only"):
        resolve_backend("quack", CPU, torch.float32)
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
    monkeypatch.setattr(choice, "trial_milliseconds", lambda backend, *layer: times[backend.name])
    times["megablocks"] = 2.5
    assert resolve_backend("auto", CPU, torch.float32, shape)[0].name == "grouped_mm"


def test_the_trial_of_a_backend_takes_time() -> None:
    assert trial_milliseconds(Eager(), LayerShape(4, 2, 16, 8), CPU, torch.float32) > 0


@pytest.mark.kernels
@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width_k", "width_m"), [(16, 8), (5, 7), (150, 200)])
@pytest.mark.parametrize(
    "ends", [[3, 3, 10, 37], [0, 0, 37, 37], [0, 0, 0, 0], [200, 200, 330, 700], [1, 697, 698, 700]]
)
def test_triton_agrees_with_the_loop(dtype: torch.dtype, width_k: int, width_m: int, ends: list[int]) -> None:
    agree_on(TritonGrouped(), DEVICE, dtype, (width_k, width_m), ends)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["grouped_mm", "triton", "quack"])
@pytest.mark.parametrize(("width_k", "width_m"), [(64, 32), (2048, 1024), (200, 72)])
@pytest.mark.parametrize("ends", [[3, 3, 10, 37], [0, 0, 37, 37], [1, 1, 1, 1], [1000, 1000, 1130, 5000]])
def test_agrees_with_the_loop_on_cuda(name: str, width_k: int, width_m: int, ends: list[int]) -> None:
    cuda = torch.device("cuda")
    if name == "quack" and (reason := quack_backend.why_not(cuda)):
        pytest.skip(reason)
    backend, _ = resolve_backend(name, cuda, torch.bfloat16)
    agree_on(backend, cuda, torch.bfloat16, (width_k, width_m), ends)


def test_a_gpu_without_kernels_is_a_reason_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*given: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(GroupedMM, "rows", no_kernel)
    why = why_wrong.__wrapped__("grouped_mm", CPU, torch.bfloat16)
    assert why == "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_backend_with_a_wrong_product_is_not_taken(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert why_wrong.__wrapped__("grouped_mm", CPU, dtype) == ""
    products = {"rows": "rows", "outer": "outer products", "add_outer": "sums of outer products"}
    for method, said in products.items():
        right = getattr(GroupedMM, method)

        def wrong(self: GroupedMM, *given: torch.Tensor, right: Callable[..., torch.Tensor] = right) -> torch.Tensor:
            found = right(self, *given)
            (given[0] if found is None else found)[-1, -1] += 1  # of the last group
            return found

        with monkeypatch.context() as patch:
            patch.setattr(GroupedMM, method, wrong)
            assert why_wrong.__wrapped__("grouped_mm", CPU, dtype) == f"{said} were wrong in a trial"


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_passes_the_trial(dtype: torch.dtype) -> None:
    assert why_wrong("triton", DEVICE, dtype) == ""
