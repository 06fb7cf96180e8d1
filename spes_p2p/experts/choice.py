"""Which backend computes the experts here: the one asked for, or the fastest that works."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from spes_p2p.errors import ConfigError
from spes_p2p.experts import megablocks_backend
from spes_p2p.experts.backends import Backend, Eager, GroupedMM

NAMES = ("auto", "grouped_mm", "megablocks", "eager")


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, str]:
    """The backend for a configured name, and why it was taken, in words for the log.

    `auto` takes grouped_mm where a small trial of it runs, then megablocks, else eager: the order of their speed on
    one layer (docs/performance.md). Raises ConfigError for an unknown name, or for a backend asked for by name that
    does not run on `device` with `dtype`.
    """
    if name not in NAMES:
        raise ConfigError(f"model.expert_backend is {name!r}, an unknown backend", fix=f"use one of {', '.join(NAMES)}")
    if name == "eager":
        return Eager(), "asked for"
    grouped_mm = "" if device.type == "meta" else _why_grouped_mm_fails(device, dtype)
    if name in ("auto", "grouped_mm") and not grouped_mm:
        return GroupedMM(), "asked for" if name == "grouped_mm" else f"grouped_mm runs on {device} in {dtype}"
    if name == "grouped_mm":
        raise ConfigError(
            f"model.expert_backend is grouped_mm, which fails on {device} in {dtype}: {grouped_mm}",
            fix="set it to auto",
        )
    megablocks = megablocks_backend.why_not(device)
    if not megablocks:
        return megablocks_backend.MegaBlocks(), "asked for" if name == "megablocks" else f"grouped_mm: {grouped_mm}"
    if name == "megablocks":
        raise ConfigError(
            f"model.expert_backend is megablocks, which cannot be used: {megablocks}", fix="set it to auto"
        )
    return Eager(), f"grouped_mm fails on {device} in {dtype}: {grouped_mm}; megablocks: {megablocks}"


@cache
def _why_grouped_mm_fails(device: torch.device, dtype: torch.dtype) -> str:
    """The first line of the error of a small trial, or nothing."""
    x_NK = torch.ones(4, 16, device=device, dtype=dtype)
    w_EMK = torch.ones(2, 8, 16, device=device, dtype=dtype)
    ends_E = torch.tensor([1, 4], device=device, dtype=torch.int32)
    backend = GroupedMM()
    trials: tuple[Callable[[], Tensor], ...] = (
        lambda: backend.rows(x_NK, w_EMK.transpose(1, 2), ends_E),
        lambda: backend.outer(x_NK, x_NK, ends_E[:1]),
    )
    try:
        sums = [float(trial().sum()) for trial in trials]
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return "" if sums == [4 * 8 * 16, 16 * 16] else f"a trial gave {sums}"
