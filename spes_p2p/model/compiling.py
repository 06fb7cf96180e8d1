"""torch.compile for a part of the model, where it works; where it does not, the same code runs as it is.

It makes Triton kernels on CUDA, which needs a C compiler as our own kernels do. A graph is made for each shape, never
one for all: a run has few shapes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

from spes_p2p.errors import first_line
from spes_p2p.experts.kernels import why_not

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def compiles_on(device: torch.device, wanted: bool | Literal["auto"]) -> bool:
    """Whether to compile for a device; says once why `auto` does not on CUDA."""
    if wanted != "auto" or device.type != "cuda":
        return wanted is True
    if reason := why_not(device, _try):
        _say_once(reason)
    return not reason


class Compiled(Generic[P, T]):
    """`function`, compiled at its first call; as it is from then on where that fails."""

    def __init__(self, function: Callable[P, T]) -> None:
        self._plain = function
        self._compiled: Callable[P, T] | None = torch.compile(function, dynamic=False)

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:  # what runs out of memory is a RuntimeError
                _say_once(first_line(getattr(error, "inner_exception", error)))
                self._compiled = None
        return self._plain(*args, **kwargs)


def as_it_is() -> AbstractContextManager[object]:
    """While it lasts the model runs as it is. Without a compiled one this loads no compiler: that takes a second."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _try(device: torch.device) -> None:
    """A small graph there and back. Raises whatever a compiler raises."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda y: torch.nn.functional.silu(y * 2).sum(), dynamic=False)(x).backward()


@cache
def _say_once(reason: str) -> None:
    logger.warning(
        "torch.compile does not work here (%s): the model runs as it is, slower. It needs a C compiler and "
        "Python's headers: install gcc and python3-dev; model.torch_compile=false asks for none of it",
        reason,
    )
