"""Whether Triton's kernels can be used on a device: they are compiled at their first launch, which needs a C compiler.

Where that fails, plain torch does the same work, slower; it is said once, with what mends it.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from spes_p2p.errors import first_line

logger = logging.getLogger(__name__)


def has_kernels(x: Tensor) -> bool:
    """Whether Triton computes where `x` lies. The first call for a device compiles a small kernel there."""
    return x.is_cuda and _why_not(x.device) == ""


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def _why_not(device: torch.device) -> str:
    try:
        from spes_p2p.experts import swiglu_kernels

        swiglu_kernels.forward(torch.zeros(1, 2, device=device), torch.zeros(1, device=device))
    except Exception as error:  # noqa: BLE001 (a compiler's, a linker's, a driver's)
        reason = first_line(error)
        logger.warning(
            "Triton's kernels cannot be used on %s (%s): plain torch takes their place, which is slower. "
            "They need a C compiler and Python's headers: install gcc and python3-dev",
            device,
            reason,
        )
        return reason
    return ""
