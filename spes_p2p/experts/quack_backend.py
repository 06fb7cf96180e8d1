"""QuACK's grouped products as a backend: kernels of its own for compute capability 8.0 to 12.0, sums added in place.

Taken where the package is installed, its products are right and a trial finds it the fastest (choice.py). Its standard
tiles are used; to tune them it would compile dozens of kernels before the first step.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.errors import first_line
from spes_p2p.experts.backends import TorchDispatch


def why_not(device: torch.device) -> str:
    """Why it cannot be used on `device`, or nothing."""
    if device.type != "cuda":
        return f"QuACK runs on CUDA only, not on {device}"
    try:
        importlib.import_module("quack.gemm_interface")
    except Exception as error:  # noqa: BLE001 (a CUDA or a compiler that it does not know fails in many ways)
        return f"{first_line(error)} (pip install 'spes-p2p[quack]')"
    return ""


class Quack(TorchDispatch):
    """Needs `why_not` to be empty, and widths that are multiples of 16 bytes."""

    name = "quack"

    def __init__(self) -> None:
        self._products: Any = importlib.import_module("quack.gemm_interface")

    def rows(self, x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
        x_NK = x_NK.contiguous()
        return cast(Tensor, self._products.gemm(x_NK, w_EKM, cu_seqlens_m=_bounds(ends_E), tuned=False))

    def outer(self, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> Tensor:
        x_NM, y_NK = x_NM.contiguous(), y_NK.contiguous()
        return cast(Tensor, self._products.gemm(x_NM.T, y_NK, cu_seqlens_k=_bounds(ends_G), tuned=False))

    def add_outer(self, w_GMK: Tensor, x_NM: Tensor, y_NK: Tensor, ends_G: Tensor) -> None:
        """In the product itself, so that nothing is rounded and no value is written twice."""
        x_NM, y_NK = x_NM.contiguous(), y_NK.contiguous()
        self._products.gemm_add_inplace(x_NM.T, y_NK, w_GMK, cu_seqlens_k=_bounds(ends_G), tuned=False)


def _bounds(ends_G: Tensor) -> Tensor:
    """[G + 1]: where groups begin, and where the last one ends."""
    return F.pad(ends_G, (1, 0))
