"""How the experts of one layer are held for the forward pass: whole in the compute dtype, or foreign ones cheaper.

`Dense` is the bank itself. `QuantizedStore` holds foreign experts alone, in eight or four bits, and puts the matrices
together in a workspace that all layers share whenever they are asked for, those of owned experts from their masters:
some copying each time, for less memory.

Both answer the same calls (`Store`); who is owned, and the fp32 masters, are the bank's business (bank.py). Slots count
owned experts first. Values are NaN until written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from spes_p2p.experts.masters import halves_of, nearest_bf16, put_away
from spes_p2p.experts.quantise import Kind, Quantised, dequantise, empty, quantise

Part = Literal["gate_up", "down"]
PARTS: tuple[Part, ...] = ("gate_up", "down")
ForeignDtype = Literal["compute"] | Kind


class Store(Protocol):
    """The matrices of all experts of a layer, [E, out, in] for each part. `masters`: [O, out, in] of the owned ones."""

    def matrices(self, part: Part, masters: Tensor | None) -> Tensor:
        """[E, out, in] in the compute dtype, to be read, until another layer is asked."""

    def write(self, part: Part, slot: int, rows: slice, values: Tensor) -> None:
        """Writes some rows of one expert's matrix; of an owned one, the master has them, too."""

    def read(self, part: Part, slot: int) -> Tensor:
        """A foreign expert's matrix [out, in] in the compute dtype, to be read."""

    def refresh(self, part: Part, masters: nn.Parameter) -> None:
        """The masters have changed; where half of their bits lie here, their memory is no longer needed."""

    def reorder(self, old_slots: Sequence[int], num_owned: int, masters: Mapping[Part, Tensor | None]) -> None:
        """Slot s becomes what slot `old_slots[s]` was; the first `num_owned` are owned from now on.

        `masters` are those before, whose values go into the store where their experts become foreign.
        """


@dataclass
class Workspace:
    """Memory for the matrices of one layer at a time, shared by all layers of a model."""

    buffers: dict[Part, Tensor] = field(default_factory=dict)
    holds: dict[Part, object] = field(default_factory=dict)
    """Whose matrices a buffer has now; None once they changed."""

    def buffer(self, part: Part, like: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """[E, out, in] in the dtype and on the device of `like`."""
        buffer = self.buffers.get(part)
        if buffer is None or buffer.shape != shape or buffer.device != like.device:
            buffer = self.buffers[part] = like.new_empty(shape)
            self.holds[part] = None
        return buffer


@dataclass
class Foreign:
    """How experts are held that are not trained here; one for all layers of a model."""

    dtype: ForeignDtype = "compute"
    workspace: Workspace = field(default_factory=Workspace)


class Dense(nn.Module):
    """All experts in the compute dtype: nothing to put together."""

    def __init__(
        self, shapes: dict[Part, tuple[int, int, int]], device: torch.device | None, dtype: torch.dtype
    ) -> None:
        """`shapes`: [E, out, in] of each part."""
        super().__init__()
        for part, shape in shapes.items():
            self.register_buffer(part, torch.full(shape, torch.nan, device=device, dtype=dtype), persistent=False)

    def matrices(self, part: Part, masters: Tensor | None = None) -> Tensor:
        return cast(Tensor, getattr(self, part))

    def write(self, part: Part, slot: int, rows: slice, values: Tensor) -> None:
        target = self.matrices(part)[slot, rows]
        target.copy_(nearest_bf16(values) if target.dtype == torch.bfloat16 else values)

    def read(self, part: Part, slot: int) -> Tensor:
        return self.matrices(part)[slot]

    def refresh(self, part: Part, masters: nn.Parameter) -> None:
        if halves_of(masters) is None:
            self.matrices(part)[: len(masters)].copy_(masters)
        else:
            put_away(masters)

    def reorder(self, old_slots: Sequence[int], num_owned: int, masters: Mapping[Part, Tensor | None]) -> None:
        for part in PARTS:
            setattr(self, part, self.matrices(part)[torch.tensor(old_slots, device=self.matrices(part).device)])


class QuantizedStore(nn.Module):
    """Foreign experts quantised; nothing of owned ones."""

    _like: Tensor

    def __init__(
        self,
        shapes: dict[Part, tuple[int, int, int]],
        device: torch.device | None,
        dtype: torch.dtype,
        kind: Kind,
        workspace: Workspace,
    ) -> None:
        super().__init__()
        self._kind, self._workspace = kind, workspace
        self._shapes, self._num_owned = shapes, 0
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)
        self._foreign: dict[Part, Quantised] = {part: empty(kind, shape, device) for part, shape in shapes.items()}

    @property
    def foreign_bytes(self) -> int:
        """Of foreign experts, scales included."""
        return sum(tensor.nbytes for tensors in self._foreign.values() for tensor in tensors)

    @torch.no_grad()
    def matrices(self, part: Part, masters: Tensor | None) -> Tensor:
        whole = self._workspace.buffer(part, self._like, self._shapes[part])
        if self._workspace.holds.get(part) is not self:
            self._workspace.holds[part] = None  # until all of it is here: memory may run out on the way
            if masters is not None:
                whole[: self._num_owned].copy_(masters)
            dequantise(self._foreign[part], whole[self._num_owned :])
            self._workspace.holds[part] = self
        return whole

    def write(self, part: Part, slot: int, rows: slice, values: Tensor) -> None:
        if slot >= self._num_owned:
            for whole, new in zip(self._foreign[part], quantise(self._kind, values), strict=True):
                whole[slot - self._num_owned, rows].copy_(new)
        self._put_together_anew(part)

    def read(self, part: Part, slot: int) -> Tensor:
        out = torch.empty(self._shapes[part][1:], dtype=self._like.dtype, device=self._like.device)
        return dequantise(Quantised(*(tensor[slot - self._num_owned] for tensor in self._foreign[part])), out)

    def refresh(self, part: Part, masters: nn.Parameter) -> None:
        self._put_together_anew(part)

    def reorder(self, old_slots: Sequence[int], num_owned: int, masters: Mapping[Part, Tensor | None]) -> None:
        for part in PARTS:
            old_foreign, owned = self._foreign[part], masters[part]
            shape = (len(old_slots) - num_owned, *self._shapes[part][1:])
            foreign = empty(self._kind, shape, self._like.device)
            for at, old in enumerate(old_slots[num_owned:]):
                if owned is not None and old < self._num_owned:
                    new = quantise(self._kind, owned[old])
                else:  # the same bits as before
                    new = Quantised(*(tensor[old - self._num_owned] for tensor in old_foreign))
                for whole, one in zip(foreign, new, strict=True):
                    whole[at].copy_(one)
            self._foreign[part] = foreign
            self._put_together_anew(part)
        self._num_owned = num_owned

    def _put_together_anew(self, part: Part) -> None:
        if self._workspace.holds.get(part) is self:
            self._workspace.holds[part] = None
