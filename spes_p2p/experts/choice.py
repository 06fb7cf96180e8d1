"""Which backend computes the experts here: the one asked for, or the fastest that works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from spes_p2p.errors import ConfigError, first_line
from spes_p2p.experts import megablocks_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.kernels import why_not

NAMES = ("auto", "grouped_mm", "triton", "megablocks", "eager")
_WARM, _TIMED, _TRIAL_TOKENS = 3, 5, 4096


@dataclass(frozen=True)
class LayerShape:
    """What a trial of the speed of a backend needs to know of a layer."""

    experts: int
    top_k: int
    d_model: int
    ffn: int


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
    if name == "grouped_mm":
        return "" if device.type == "meta" else _why_grouped_mm_fails(device, dtype)
    if name == "megablocks":
        return megablocks_backend.why_not(device)
    if device.type != "cuda":
        return f"Triton's kernels run on CUDA only, not on {device}"
    return why_not(device, _try_triton)


def _try_triton(device: torch.device) -> None:
    from spes_p2p.experts import triton_backend

    triton_backend.try_kernels(device)


def _made(name: str) -> Backend:
    """A backend that runs here."""
    if name == "triton":
        from spes_p2p.experts.triton_backend import TritonGrouped

        return TritonGrouped()
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
    """The fastest of a few passes, forward and backward, through one layer with one owned expert."""
    bank = ExpertBank(shape.experts, shape.d_model, shape.ffn, (0,), backend, device, dtype)
    x_TD = torch.zeros(_TRIAL_TOKENS, shape.d_model, device=device, dtype=dtype, requires_grad=True)
    choices = torch.arange(_TRIAL_TOKENS * shape.top_k, device=device) % shape.experts  # every expert has as many
    expert_TK = choices.view(_TRIAL_TOKENS, shape.top_k)
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


@cache
def _why_grouped_mm_fails(device: torch.device, dtype: torch.dtype) -> str:
    """The first line of the error of a small trial, or nothing."""
    backend = GroupedMM()
    try:
        x_NK = torch.ones(4, 16, device=device, dtype=dtype)
        w_EMK = torch.ones(2, 8, 16, device=device, dtype=dtype)
        ends_E = torch.tensor([1, 4], device=device, dtype=torch.int32)
        products = backend.rows(x_NK, w_EMK.transpose(1, 2), ends_E), backend.outer(x_NK, x_NK, ends_E[:1])
        sums = [float(product.sum()) for product in products]
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # among them: no kernel image for this GPU
        return first_line(error)
    return "" if sums == [4 * 8 * 16, 16 * 16] else f"a trial gave {sums}"
