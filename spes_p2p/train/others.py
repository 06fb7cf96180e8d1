"""What rank 0 tells the other ranks of its peer, so that all call the same methods; they hear it in `worker`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from spes_p2p.consensus.manifest import Decay
from spes_p2p.data.loader import Batch
from spes_p2p.errors import LocalProtocolError, SpesError
from spes_p2p.train.ddp import Ranks, broadcast_object


class Others:
    """The other ranks, seen from rank 0. Elsewhere, and where it is alone, nobody is told anything."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._broken = False

    @contextmanager
    def told(self, name: str, **arguments: Any) -> Iterator[None]:
        """Around what rank 0 does itself: tells the others to do it, and names the one that is lost where it breaks."""
        if self._ranks.world_size == 1 or self._ranks.rank:
            yield
            return
        self._ranks.check()
        if self._broken:
            raise LocalProtocolError(f"{name} was called after a failure or close: the ranks are no longer in step")
        try:
            with self._ranks.watch(name):
                broadcast_object(self._ranks, [name, {key: _packed(value) for key, value in arguments.items()}])
                yield
            self._ranks.check()
        except BaseException as error:
            self._broken = True
            if isinstance(error, RuntimeError):  # what torch.distributed raises
                self._ranks.explain()
            raise

    def stop(self) -> None:
        """Lets them end. Never raises for a rank that has ended already."""
        if not self._broken:
            with suppress(SpesError, RuntimeError), self.told("stop"):  # whoever is gone needs no telling
                self._broken = True  # nothing may follow


class _OfRanks(Protocol):
    others: Others

    def wake(self) -> None: ...


Self = TypeVar("Self", bound=_OfRanks)
P = ParamSpec("P")
R = TypeVar("R")
_Method = Callable[Concatenate[Self, P], R]


def on_all_ranks(
    *kept: str, while_parked: bool = False
) -> Callable[[Callable[Concatenate[Self, P], R]], Callable[Concatenate[Self, P], R]]:
    """A method that every rank calls: who calls it on rank 0 has the others called with the same arguments.

    Arguments in `kept` are rank 0's alone, and have a default. What is parked is brought back before, unless the method
    can do without.
    """

    def decorate(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(self: Self, *args: P.args, **named: P.kwargs) -> R:
            if not while_parked:
                self.wake()
            given = dict(list(signature.bind(self, *args, **named).arguments.items())[1:])
            with self.others.told(method.__name__, **{key: given[key] for key in given if key not in kept}):
                return method(self, *args, **named)

        return call

    return decorate


def _packed(value: Any) -> Any:
    """As msgpack can hold it: `unpacked` gives it back."""
    if isinstance(value, Batch):
        tokens = value.tokens.astype(np.int32)
        return {"shape": tokens.shape, "tokens": tokens.tobytes(), "loss_mask": value.loss_mask.tobytes()}
    if isinstance(value, Decay):
        return {"begin_step": value.begin_step, "steps": value.steps}
    return value


def unpacked(value: Any) -> Any:
    """An argument that rank 0 sent; a batch comes without positions."""
    if isinstance(value, dict) and "tokens" in value:
        tokens = np.frombuffer(value["tokens"], np.int32).reshape(value["shape"]).astype(np.int64)
        return Batch(tokens, np.frombuffer(value["loss_mask"], np.bool_), np.empty(0, np.int64))
    if isinstance(value, dict) and "begin_step" in value:
        return Decay(**value)
    return tuple(value) if isinstance(value, list) else value
