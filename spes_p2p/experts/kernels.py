"""Whether Triton's kernels can be used on a device: they are compiled at their first launch, which needs a C compiler.

Where that fails, plain torch does the same work, slower; it is said once, with what mends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from spes_p2p.errors import first_line

logger = logging.getLogger(__name__)


BF16_CAPABILITY = (8, 0)
"""From here on (RTX 30xx, A100) GPUs compute in bf16; older ones in fp16."""


def half_dtype(device: torch.device) -> torch.dtype:
    """What matrix products run in on a GPU; bf16 for a device that only stands for one."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < BF16_CAPABILITY:
        return torch.float16
    return torch.bfloat16


Trial = Callable[[torch.device], None]
"""Launches all of a module's kernels on a device, in the dtypes of training; raises anything where one fails."""


def has_kernels(x: Tensor, trial: Trial) -> bool:
    """Whether the kernels of `trial` compute where `x` lies. The first call for a device compiles them there."""
    return x.is_cuda and _said_why_not(x.device, trial) == ""


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def why_not(device: torch.device, trial: Trial) -> str:
    """The first line of the error with which the kernels of `trial` fail on a device, or nothing."""
    try:
        trial(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 (a compiler's, a linker's, a driver's)
        return first_line(error)
    return ""


@cache
def _said_why_not(device: torch.device, trial: Trial) -> str:
    if reason := why_not(device, trial):
        logger.warning(
            "Triton's kernels cannot be used on %s (%s): plain torch is used instead, which is slower. "
            "They need a C compiler and Python's headers: install gcc and python3-dev",
            device,
            reason,
        )
    return reason
