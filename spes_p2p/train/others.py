"""What rank 0 tells the other ranks of its peer, so that all make the same calls; they hear it in `worker`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from spes_p2p.data.loader import Batch
from spes_p2p.errors import LocalProtocolError, SpesError
from spes_p2p.train.ddp import Ranks, broadcast_object


class Others:
    """The other ranks, seen from rank 0; where it is alone, nobody is told anything."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._broken = False

    @contextmanager
    def told(self, name: str, batch: Batch | None = None, **arguments: Any) -> Iterator[None]:
        """Around what rank 0 does itself: tells the others to do it, and names the one that is lost where it breaks."""
        if self._ranks.world_size == 1:
            yield
            return
        self._ranks.check()
        if self._broken:
            raise LocalProtocolError(f"{name} was called after a failure or close: the ranks are no longer in step")
        try:
            with self._ranks.watch(name):
                broadcast_object(self._ranks, [name, arguments if batch is None else arguments | _packed(batch)])
                yield
            self._ranks.check()
        except BaseException as error:
            self._broken = True
            if isinstance(error, RuntimeError):  # what torch.distributed raises
                self._ranks.explain()
            raise

    def told_each(self, name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, each told with `name` when it is asked for."""
        for batch in batches:
            with self.told(name, batch):
                yield batch

    def stop(self) -> None:
        """Lets them end. Never raises for a rank that has ended already."""
        if not self._broken:
            with suppress(SpesError, RuntimeError), self.told("stop"):  # whoever is gone needs no telling
                self._broken = True  # nothing may follow


def _packed(batch: Batch) -> dict[str, Any]:
    tokens = batch.tokens.astype(np.int32)
    return {"shape": tokens.shape, "tokens": tokens.tobytes(), "loss_mask": batch.loss_mask.tobytes()}


def unpacked(shape: list[int], tokens: bytes, loss_mask: bytes) -> Batch:
    """The batch that rank 0 sent, without positions."""
    return Batch(
        np.frombuffer(tokens, np.int32).reshape(shape).astype(np.int64),
        np.frombuffer(loss_mask, np.bool_),
        np.empty(0, np.int64),
    )
