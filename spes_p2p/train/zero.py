"""Several ranks of one peer share gradients, moments and the update: ZeRO stage 2 (`optimizer.sharding: zero2`).

After Rajbhandari et al., arXiv 1910.02054. A tensor's rows are dealt to the ranks. As soon as the backward pass of a
micro-batch has a whole gradient, its rows go to whom they belong, in fp32, and the rest is freed; each rank steps its
own rows, then all ranks fetch each other's. Forward and backward pass use whole values and fetch nothing.

Not torch's `fully_shard`: it would fetch every layer twice a micro-batch, the masters of experts too, which no forward
pass reads (the bank has their values), to save the values of attention alone: embedding and head, seven tenths
of what is shared in a 7B model, are wanted whole at both ends of each pass. What is dealt here is 12 bytes of a trained
value's 16. What guests train is small and stays whole at each rank.

Legend: O owned experts. Rows of a master [O, out, in] are those of each expert, so that a rank has a part of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spes_p2p.train.moment_store import Stored, cut, form_of, stored_shapes

if TYPE_CHECKING:
    from spes_p2p.train.ddp import Ranks

MOST_UNDER_WAY = 2
"""Whole gradients that may wait for their exchange."""


@dataclass(frozen=True)
class Share:
    """Which rows of each tensor a rank steps: all of them where it is `of` one."""

    rank: int = 0
    of: int = 1

    def rows(self, count: int, rank: int | None = None) -> slice:
        """This rank's, or another's, of `count` rows; there may be none."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.of, count * (rank + 1) // self.of)


ALL_ROWS = Share()


@dataclass
class _Exchange:
    """A gradient on its way; `parts` by rank."""

    parameter: nn.Parameter
    parts: list[Tensor]
    works: list[Any]


class Sharded(nn.Module):
    """`model`, whose gradients are dealt to the ranks. Called like the model, as DDP would be."""

    def __init__(self, model: nn.Module, ranks: Ranks, whole: Collection[nn.Parameter], dtype: torch.dtype) -> None:
        """`whole`: parameters that every rank steps, with the mean gradient. `dtype`: of gradients that are kept."""
        super().__init__()
        self.model, self._ranks, self._dtype = model, ranks, dtype
        self._share = Share(ranks.rank, ranks.world_size)
        self._whole = list(whole)
        left_out = {id(parameter) for parameter in self._whole}
        self._dealt = [one for one in model.parameters() if one.requires_grad and id(one) not in left_out]
        self._hooks = [one.register_post_accumulate_grad_hook(self._send) for one in self._dealt]
        self._own: dict[int, Tensor] = {}
        self._under_way: deque[_Exchange] = deque()
        self._exchanges = True

    def forward(self, *arguments: Any) -> Any:
        self._receive_all()  # so that nothing of the last backward pass lies beside the activations of this one
        return self.model(*arguments)

    def close(self) -> None:
        """The model's gradients are its own again."""
        for hook in self._hooks:
            hook.remove()
        self.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, each rank keeps its rows of its own gradients: as much memory, and nobody waits for anybody."""
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def _send(self, parameter: Tensor) -> None:
        import torch.distributed as dist

        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        assert isinstance(parameter, nn.Parameter)
        parts = [_rows(gradient, self._share, rank).contiguous().float() for rank in range(self._share.of)]
        del gradient
        works = [
            dist.reduce(part, rank, group=self._ranks.group, async_op=True)
            for rank, part in enumerate(parts)
            if self._exchanges and part.numel()
        ]
        self._under_way.append(_Exchange(parameter, parts, works))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._receive(self._under_way.popleft())

    def _receive(self, exchange: _Exchange) -> None:
        for work in exchange.works:
            work.wait()
        mean, key = exchange.parts[self._share.rank] / self._share.of, id(exchange.parameter)
        if key in self._own:
            self._own[key] += mean
        else:
            self._own[key] = mean.to(self._dtype)

    def _receive_all(self) -> None:
        while self._under_way:
            self._receive(self._under_way.popleft())

    def finish(self) -> None:
        """After the last backward pass of a step: all gradients are here."""
        import torch.distributed as dist

        self._receive_all()
        for parameter in self._whole:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._ranks.group)
                parameter.grad /= self._share.of

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's rows of a gradient, or all of one that is not dealt."""
        return self._own.get(id(parameter), parameter.grad)

    def gradients(self) -> list[Tensor]:
        """Of all parameters."""
        return [*self.counted(0), *(one.grad for one in self._whole if one.grad is not None and self._ranks.rank)]

    def counted(self, rank: int | None = None) -> list[Tensor]:
        """Those that this rank stands for, so that all ranks together have each value once."""
        rank = self._ranks.rank if rank is None else rank
        return [*self._own.values(), *(one.grad for one in self._whole if one.grad is not None and rank == 0)]

    def clear(self) -> None:
        """Drops all gradients."""
        while self._under_way:
            for work in self._under_way.popleft().works:
                work.wait()
        self._own.clear()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def fetch(self) -> None:
        """After each rank has stepped its rows: everybody has all."""
        import torch.distributed as dist

        for parameter in self._dealt:
            parts = [_rows(parameter.detach(), self._share, rank) for rank in range(self._share.of)]
            sent = [part.contiguous() for part in parts]
            works = [
                dist.broadcast(part, rank, group=self._ranks.group, async_op=True)
                for rank, part in enumerate(sent)
                if part.numel()
            ]
            for work in works:
                work.wait()
            for part, new in zip(parts, sent, strict=True):
                if new.data_ptr() != part.data_ptr():
                    part.copy_(new)


def whole_moments(ranks: Ranks, shape: torch.Size, moments: Stored) -> Stored:
    """The moments of a tensor of this shape from all ranks' rows: on rank 0 in host memory. All ranks call it."""
    if ranks.world_size == 1:
        return moments
    import torch.distributed as dist

    share, whole = Share(ranks.rank, ranks.world_size), Stored()
    for name, (size, dtype) in stored_shapes(shape, form_of(moments)).items():
        if ranks.rank:
            if moments[name].numel():
                dist.send(moments[name].contiguous(), 0, group=ranks.group)
            continue
        whole[name] = torch.empty(size, dtype=dtype)
        for rank in range(share.of):
            place = whole[name][cut(name, shape, share.rows(shape[0], rank))]
            part = moments[name] if rank == 0 else torch.empty_like(place, device=ranks.device)
            if rank and part.numel():
                dist.recv(part, rank, group=ranks.group)
            place.copy_(part)
    return whole


def _rows(values: Tensor, share: Share, rank: int) -> Tensor:
    dim = 1 if values.ndim == 3 else 0
    rows = share.rows(values.shape[dim], rank)
    return values.narrow(dim, rows.start, rows.stop - rows.start)
