"""Which backend computes the experts here: the one asked for, or the fastest of those whose products are right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from spes_p2p.errors import ConfigError, first_line
from spes_p2p.experts import megablocks_backend, quack_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.gradients import add_in_place

NAMES = ("auto", "grouped_mm", "triton", "quack", "megablocks", "eager")
_OPTIONAL = {"quack": quack_backend, "megablocks": megablocks_backend}
_WARM, _TIMED, _TRIAL_TOKENS = 3, 5, 4096


@dataclass(frozen=True)
class LayerShape:
    """What a trial of the speed of a backend needs to know of a layer."""

    experts: int
    top_k: int
    d_model: int
    ffn: int
    owned: int = 1


_SMALL = LayerShape(experts=8, top_k=2, d_model=256, ffn=256)


def resolve_backend(
    name: str, device: torch.device, dtype: torch.dtype, shape: LayerShape | None = None
) -> tuple[Backend, str]:
    """The backend for a configured name, and why it was taken, in words for the log.

    `auto` takes the fastest of those that run on `device` with `dtype`, by a trial of one layer of `shape`; eager where
    none does. Raises ConfigError for an unknown name, or for a backend asked for by name that does not run there.
    """
    if name not in NAMES:
        raise ConfigError(f"model.expert_backend is {name!r}, an unknown backend", fix=f"use one of {', '.join(NAMES)}")
    if name == "eager":
        return Eager(), "asked for"
    where = f"on {device} in {dtype}"
    if name != "auto":
        if failure := _why_not(name, device, dtype):
            raise ConfigError(f"model.expert_backend is {name}, which does not run {where}: {failure}", fix="use auto")
        return _made(name), "asked for"
    failures = {kind: _why_not(kind, device, dtype) for kind in NAMES[1:-1]}
    running = [kind for kind, failure in failures.items() if not failure]
    failed = "; ".join(f"{kind}: {failure}" for kind, failure in failures.items() if failure)
    if not running:
        return Eager(), f"nothing else runs {where}: {failed}"
    if len(running) == 1:
        return _made(running[0]), f"{running[0]} runs {where}; {failed}"
    return _fastest(running, shape or _SMALL, device, dtype)


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a backend does not run on `device` with `dtype`, or nothing."""
    if name == "grouped_mm" and device.type == "meta":
        return ""
    if name == "triton" and device.type != "cuda":
        return f"Triton's kernels run on CUDA only, not on {device}"
    if name in _OPTIONAL and (reason := _OPTIONAL[name].why_not(device)):
        return reason
    return why_wrong(name, device, dtype)


@cache
def why_wrong(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The first line of the error of a small trial, or which product is not the loop's; nothing where all is right.

    The values are small whole numbers, whose sums all of the dtypes hold exactly: there is one right answer.
    """
    try:
        x_NK, y_NM, w_EMK = (_whole_numbers(*size).to(device, dtype) for size in ((40, 32), (40, 64), (4, 64, 32)))
        ends_E = torch.tensor([9, 9, 33, 40], device=device, dtype=torch.int32)
        for what, got, want in zip(
            _PRODUCTS, *(_products(one, x_NK, y_NM, w_EMK, ends_E) for one in (_made(name), Eager()))
        ):
            if not torch.equal(got, want):
                return f"{what} were wrong in a trial"
    except Exception as error:  # noqa: BLE001 (a compiler's, another project's, or no kernel image for this GPU)
        return first_line(error)
    return ""


_PRODUCTS = ("rows", "rows by transposed matrices", "outer products", "sums of outer products")


def _products(backend: Backend, x_NK: Tensor, y_NM: Tensor, w_EMK: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """One of each of `_PRODUCTS`: with an empty group, and rows that belong to none."""
    ends_G = ends_E[:3]
    sums_GMK = torch.ones(3, *w_EMK.shape[1:], device=w_EMK.device)
    backend.add_outer(sums_GMK, y_NM, x_NK, ends_G)
    rows = backend.rows(y_NM, w_EMK, ends_E), backend.rows(x_NK, w_EMK.mT, ends_E)
    return *rows, backend.outer(y_NM, x_NK, ends_G), sums_GMK


def _whole_numbers(*size: int) -> Tensor:
    """From -2 to 2, in no order."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(0))


def _made(name: str) -> Backend:
    """A backend that runs here."""
    if name == "triton":
        from spes_p2p.experts.triton_backend import TritonGrouped

        return TritonGrouped()
    if name == "quack":
        return quack_backend.Quack()
    return GroupedMM() if name == "grouped_mm" else megablocks_backend.MegaBlocks()


def _fastest(names: Sequence[str], shape: LayerShape, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The fastest of these, as far as a trial of them runs; else eager."""
    times: list[tuple[float, Backend]] = []
    failures: list[str] = []
    for name in names:
        try:
            backend = _made(name)
            times.append((trial_milliseconds(backend, shape, device, dtype), backend))
        except Exception as error:  # noqa: BLE001 (a compiler's or another project's: another backend can do)
            failures.append(f"{name} fails: {first_line(error)}")
    times.sort(key=lambda pair: pair[0])
    rest = [f"{backend.name} {took:.2f} ms" for took, backend in times[1:]] + failures
    if not times:
        return Eager(), "; ".join(failures)
    took, best = times[0]
    return best, "; ".join([f"one layer forward and backward in {took:.2f} ms", *rest])


def trial_milliseconds(backend: Backend, shape: LayerShape, device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of a few passes, forward and backward, through one layer as it is trained."""
    bank = ExpertBank(shape.experts, shape.d_model, shape.ffn, range(shape.owned), backend, device, dtype)
    for master in bank.parameters():
        add_in_place(master)
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_TRIAL_TOKENS, shape.d_model, generator=generator).to(device, dtype).requires_grad_()
    expert_TK = torch.randint(shape.experts, (_TRIAL_TOKENS, shape.top_k), generator=generator).to(device)
    weight_TK = torch.full(expert_TK.shape, 1 / shape.top_k, device=device)
    seconds = []
    for _ in range(_WARM + _TIMED):
        _wait_for(device)
        started = time.perf_counter()
        bank(x_TD, expert_TK, weight_TK).backward(x_TD.detach())
        _wait_for(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds[_WARM:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
