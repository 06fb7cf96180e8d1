"""Gradients that are kept apart from their parameters: dealt to the ranks of a peer, in bf16, or both.

As soon as the backward pass of a micro-batch has a gradient, it goes to where it is kept, and its memory is free.

**Dealt** (`optimizer.sharding`): ZeRO, Rajbhandari et al., arXiv 1910.02054. A tensor's rows are dealt to the ranks.
Each gets the sum of its rows in fp32, and has moments of those alone, which it steps. With `zero2` all ranks then fetch
each other's: forward and backward pass use whole values and fetch nothing. With `zero3` each has its rows of the shared
values alone, and fetches the others when it computes with them (experts/shards.py); of masters of owned experts, which
no forward pass reads where the bank has their values in bf16, it has its rows' lower halves, and fetches others' bf16
after a step (experts/masters.py). Masters that are whole stay so: on a CPU and in fp16, where no half of one would do,
and where foreign experts are packed, since matrices are put together from them in each pass.

**In bf16** (`optimizer.gradient_dtype: bf16`): sums are rounded stochastically, up with the probability that makes the
mean exact. Rounded to nearest, a sum would stand still once a term is below 2^-9 of it, after some 256 micro-batches;
so, n terms of one size are off by about sqrt(n) / 1000 of their sum, as often up as down.

Legend: O owned experts. Rows of a master [O, out, in] are those of each expert, so that a rank has a part of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spes_p2p.experts.gradients import add_in_bf16, add_rounded
from spes_p2p.experts.masters import tensors_of
from spes_p2p.experts.shards import Share
from spes_p2p.train.moment_store import Stored, cut, form_of, stored_shapes

if TYPE_CHECKING:
    from spes_p2p.train.ddp import Ranks

MOST_UNDER_WAY = 2
"""Whole gradients that may wait for their exchange."""


@dataclass
class _Exchange:
    """A gradient on its way; `parts` by rank, in fp32."""

    parameter: nn.Parameter
    parts: list[Tensor]
    works: list[Any]


class KeptGradients(nn.Module):
    """`model` with its gradients kept here. Called like the model, as DDP would be."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        share: Share,
        dtype: torch.dtype,
        rounds: Collection[nn.Parameter] = (),
    ) -> None:
        """`dtype`: of what is kept.

        `rounds`: those for which the model itself can add to sums in bf16, piece by piece.
        """
        super().__init__()
        self.model, self._ranks, self._share, self._dtype = model, ranks, share, dtype
        parameters = [one for one in model.parameters() if one.requires_grad]
        self._dealt = parameters if share.of > 1 else []
        self._is_dealt = {id(one) for one in self._dealt}
        self._hooks = [one.register_post_accumulate_grad_hook(self._take) for one in parameters]
        self._kept: dict[int, Tensor] = {}
        self._under_way: deque[_Exchange] = deque()
        self._noise = torch.Generator(ranks.device)
        for parameter in rounds if dtype == torch.bfloat16 and not self._dealt else ():
            add_in_bf16(parameter, partial(self._sum_of, parameter), self._noise)

    def forward(self, *arguments: Any) -> Any:
        self._receive_all()  # so that nothing of the last backward pass lies beside the activations of this one
        return self.model(*arguments)

    def begin(self, seed: int) -> None:
        """A step, whose rounding follows from `seed`: made again, it comes out the same."""
        self._noise.manual_seed(seed)

    def close(self) -> None:
        """The model's gradients are its own again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.model.parameters():
            add_in_bf16(parameter, None, self._noise)
        self.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, each rank keeps its rows of its own gradients: as much memory, and nobody waits for anybody."""
        self._share.exchanges = False
        try:
            yield
        finally:
            self._share.exchanges = True

    @property
    def exchanges_each(self) -> bool:
        """Whether ranks exchange gradients after each micro-batch, not after the last one alone."""
        return bool(self._dealt)

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # the model has added it
            return
        assert isinstance(parameter, nn.Parameter)
        if id(parameter) not in self._is_dealt:
            self._keep(parameter, gradient)
            return
        parts = [_rows(gradient, self._share, rank).contiguous().float() for rank in range(self._share.of)]
        del gradient
        self._under_way.append(_Exchange(parameter, parts, self._sent(parts) if self._share.exchanges else []))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._receive(self._under_way.popleft())

    def _sent(self, parts: list[Tensor]) -> list[Any]:
        filled = [(rank, part) for rank, part in enumerate(parts) if part.numel()]
        return [dist.reduce(part, rank, group=self._ranks.group, async_op=True) for rank, part in filled]

    def _receive(self, exchange: _Exchange) -> None:
        for work in exchange.works:
            work.wait()
        self._keep(exchange.parameter, exchange.parts[self._share.rank] / self._share.of)

    def _receive_all(self) -> None:
        while self._under_way:
            self._receive(self._under_way.popleft())

    @torch.no_grad()
    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        kept = self._kept.get(id(parameter))
        if kept is None:
            self._kept[id(parameter)] = gradient.to(self._dtype)
        elif self._dtype == torch.float32:
            kept += gradient
        else:
            add_rounded(kept, gradient, self._noise)

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._kept:
            self._kept[id(parameter)] = torch.zeros_like(parameter, dtype=self._dtype)
        return self._kept[id(parameter)]

    def finish(self) -> None:
        """After the last backward pass of a step: all gradients are here, those that are not dealt as their mean."""
        self._receive_all()
        if self._ranks.world_size == 1:
            return
        for key, gradient in self._kept.items():
            if key not in self._is_dealt:
                dist.all_reduce(gradient, group=self._ranks.group)
                gradient /= self._ranks.world_size

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's rows of a gradient, or all of one that is not dealt."""
        return self._kept.get(id(parameter))

    def gradients(self) -> list[Tensor]:
        """Of all parameters."""
        return list(self._kept.values())

    def counted(self) -> list[Tensor]:
        """Those that this rank stands for, so that all ranks together have each value once."""
        return [one for key, one in self._kept.items() if key in self._is_dealt or self._ranks.rank == 0]

    def clear(self) -> None:
        """Drops all gradients."""
        while self._under_way:
            for work in self._under_way.popleft().works:
                work.wait()
        self._kept.clear()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def fetch(self) -> None:
        """After each rank has stepped its rows: everybody has all, but of what is dealt itself."""
        if not self._dealt:
            return
        for values in (tensor for parameter in self._dealt for tensor in tensors_of(parameter)):
            parts = [_rows(values, self._share, rank) for rank in range(self._share.of)]
            sent = [part.contiguous() for part in parts]
            filled = [(rank, part) for rank, part in enumerate(sent) if part.numel()]
            works = [dist.broadcast(part, rank, group=self._ranks.group, async_op=True) for rank, part in filled]
            for work in works:
                work.wait()
            for part, new in zip(parts, sent, strict=True):
                if new.data_ptr() != part.data_ptr():
                    part.copy_(new)


def whole_moments(ranks: Ranks, shape: torch.Size, moments: Stored) -> Stored:
    """The moments of a tensor of this shape from all ranks' rows: on rank 0 in host memory. All ranks call it."""
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
