"""The ranks of one peer: their process groups, and what one rank tells the others.

A peer of one rank needs none of this: `Ranks()` then makes every function here a plain pass-through. Who starts the
processes is `worker`'s job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spes_p2p.state.layout import Values

ANSWER_TIMEOUT = timedelta(minutes=30)
"""How long one rank waits for another in the middle of work, NCCL's too: ranks meet after every micro-batch, so this is
far longer than GPUs of different speed drift apart. One that ends is noticed at once, one that is frozen by rank 0's
watchdog; under torchrun, which has none, by this."""
_IDLE_TIMEOUT = timedelta(days=365)
_CHUNK_VALUES = 2**26
_CPU = torch.device("cpu")


def _nothing_to_check() -> None:
    """One rank alone, or ranks that somebody else watches."""


def _nothing_to_watch(command: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its peer."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    group: dist.ProcessGroup | None = None
    """Values and gradients: nccl on CUDA, gloo on CPU."""
    control: dist.ProcessGroup | None = None
    """Commands of rank 0, always gloo; the others wait for the next one without limit."""
    check: Callable[[], None] = _nothing_to_check
    """Raises SpesError where another rank has ended. On rank 0 only."""
    explain: Callable[[], None] = _nothing_to_check
    """As `check`, when something broke: gives a rank a moment to be seen as ended."""
    watch: Callable[[str], AbstractContextManager[None]] = _nothing_to_watch
    """Put around each command that all ranks carry out: notices where it takes far too long."""
    progress: Callable[[], None] = _nothing_to_check
    """Tells it that all ranks are moving: what counts is the time between two such calls."""
    cards: tuple[int, ...] = ()
    """The numbers of all ranks' GPUs, where they were chosen here."""


def connect(ranks: Ranks, store: dist.Store | None = None) -> Ranks:
    """The same in process groups; every rank calls it. Without a `store`, MASTER_ADDR and MASTER_PORT tell where."""
    rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
    if world_size == 1:
        return ranks
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=ANSWER_TIMEOUT, store=store, rank=rank, world_size=world_size)
    # time-outs are each rank's own: rank 0 never waits long for one that takes a command
    control = dist.new_group(backend="gloo", timeout=ANSWER_TIMEOUT if rank == 0 else _IDLE_TIMEOUT)
    return replace(ranks, group=dist.group.WORLD, control=control)


def disconnect(ranks: Ranks) -> None:
    """Leaves the process groups, also broken ones."""
    if ranks.world_size > 1:
        dist.destroy_process_group()


def abort(ranks: Ranks) -> None:
    """Ends what hangs on the device because a rank is gone; gloo notices such a loss by itself."""
    if ranks.group is not None and ranks.device.type == "cuda":
        ranks.group.abort()


def broadcast_object(ranks: Ranks, value: Any = None) -> Any:
    """Rank 0's `value` (what msgpack can hold) at every rank."""
    if ranks.world_size == 1:
        return value
    data = msgpack.packb(value) if ranks.rank == 0 else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=ranks.control)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if ranks.rank == 0:
        buffer.numpy()[:] = np.frombuffer(data, np.uint8)
    dist.broadcast(buffer, 0, group=ranks.control)
    return value if ranks.rank == 0 else msgpack.unpackb(buffer.numpy().tobytes(), strict_map_key=False)


def broadcast_array(ranks: Ranks, values: Values | None, size: int) -> Values:
    """Rank 0's flat fp32 `values` of length `size` at every rank."""
    if ranks.world_size == 1:
        assert values is not None
        return values
    received = np.empty(size if values is None else 0, np.float32)
    for start in range(0, size, _CHUNK_VALUES):
        stop = min(start + _CHUNK_VALUES, size)
        part = received[start:stop] if values is None else np.array(values[start:stop], np.float32)
        chunk = torch.from_numpy(part).to(ranks.device)
        dist.broadcast(chunk, 0, group=ranks.group)
        if values is None and ranks.device.type != "cpu":  # on the CPU it is the same memory
            part[:] = chunk.cpu().numpy()
    return received if values is None else values


def sum_over_ranks(ranks: Ranks, values: Tensor) -> Tensor:
    """`values` added up over the ranks, in place."""
    if ranks.world_size > 1:
        dist.all_reduce(values, group=ranks.group)
    return values


def agreed(ranks: Ranks, wish: bool) -> bool:
    """Whether any rank wishes it; all have come here then, which `watch` is told."""
    if ranks.world_size == 1:
        return wish
    wishes = torch.tensor([int(wish)])
    dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=ranks.control)
    ranks.progress()
    return bool(wishes.item())


def least_over_ranks(ranks: Ranks, values: Sequence[int]) -> list[int]:
    """The least of each of `values` over the ranks."""
    if ranks.world_size == 1:
        return list(values)
    least = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=ranks.control)
    return list(map(int, least.tolist()))


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Every rank's short ASCII `text` (of one length), by rank, at every rank."""
    if ranks.world_size == 1:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    all_texts = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(all_texts, own, group=ranks.control)
    return [bytes(values.tolist()).decode() for values in all_texts]


def wrap(model: nn.Module, ranks: Ranks, compiled: bool = False) -> nn.Module:
    """`model` with its gradients averaged over the ranks. Values are not made equal: that is `adopt`'s job.

    The expert banks, all the buffers there are, are left out by `_ddp_params_and_buffers_to_ignore` of the model;
    masters of experts that saw no token get gradients of zeros, so that DDP need not search for unused parameters.
    Gradients that are there when DDP is made become views of its buckets at once; else they would only after the first
    exchange, and lie beside the buckets until then.
    """
    if ranks.world_size == 1:
        return model
    if compiled:  # it would cut compiled code by DDP's buckets, also between the two ends of an autocast region
        from torch import _dynamo

        _dynamo.config.optimize_ddp = False
    for parameter in model.parameters():
        parameter.grad = None  # may be in the buckets of a DDP that was there before
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return DistributedDataParallel(model, process_group=ranks.group, init_sync=False, gradient_as_bucket_view=True)
