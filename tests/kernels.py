"""Where the tests of Triton's kernels run: compiled on a GPU, elsewhere by Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def there(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def _from_bf16(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _mend_products_of_the_interpreter() -> None:
    """It holds bf16 as 16-bit integers, and multiplies those."""
    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(self, _from_bf16(left), _from_bf16(right), *rest)

    InterpreterBuilder.create_dot = create_dot


_mend_products_of_the_interpreter()
