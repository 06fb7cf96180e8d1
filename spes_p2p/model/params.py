"""The parameters of a model as tensors with places, and copying blocks of the committed state in and out.

A block is a flat fp32 array (shared parameters, or one expert column). Which tensors it holds, in which order, is told
by a table from above (interop/hf), since that order goes by Hugging Face names, which the model does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spes_p2p.errors import StateError
from spes_p2p.experts.bank import Matrix
from spes_p2p.experts.stores import PARTS
from spes_p2p.model.transformer import Transformer


@dataclass(frozen=True)
class SharedPlace:
    """A shared parameter, by its name inside the model."""

    parameter: str


@dataclass(frozen=True)
class ExpertPlace:
    """One matrix of one expert in one layer."""

    layer: int
    expert: int
    which: Matrix


Place = SharedPlace | ExpertPlace
Table = Sequence[Sequence[Place]]
"""For each block, the places of its tensors in order; block 0 is shared, block 1 + e is column e."""


def named_shared(model: Transformer) -> dict[str, nn.Parameter]:
    """The shared parameters by name: all that are not masters of experts."""
    others = {id(parameter) for parameter in masters_of(model)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in others}


def masters_of(model: Transformer) -> Iterator[nn.Parameter]:
    """The masters [O, out, in] of the owned experts, by layer and part (gate_up, down); see ExpertBank.master."""
    for bank in model.banks:
        for part in PARTS:
            master = bank.master(part)
            if master is not None:
                yield master


def place(model: Transformer, where: Place) -> Tensor:
    """The tensor at a place without gradient, to be read."""
    if isinstance(where, ExpertPlace):
        return model.banks[where.layer].read(where.expert, where.which)
    return model.get_parameter(where.parameter).detach()


def load_block(model: Transformer, table: Table, block_index: int, flat: NDArray[np.float32]) -> None:
    """Copies a block of the state into the model; a column goes into the banks and, where owned, into the masters.

    Raises StateError unless `flat` is fp32 with exactly the values of the block.
    """
    pieces = _pieces(model, table, block_index)
    _check(flat, block_index, pieces[-1][2])
    _load(model, flat, pieces)


@torch.no_grad()
def _load(model: Transformer, flat: NDArray[np.float32], pieces: Iterable[tuple[Place, int, int]]) -> None:
    for where, start, stop in pieces:
        values = torch.from_numpy(np.array(flat[start:stop])).view(_shape(model, where))
        if isinstance(where, ExpertPlace):
            model.banks[where.layer].load(where.expert, where.which, values)
        else:
            model.get_parameter(where.parameter).copy_(values)


def read_block(model: Transformer, table: Table, block_index: int) -> NDArray[np.float32]:
    """The block's values as the model has them: [block size] fp32.

    Foreign columns come from the bank, so on CUDA rounded to bf16: the committed state is their source, not this.
    """
    pieces = _pieces(model, table, block_index)
    flat = np.empty(pieces[-1][2], dtype=np.float32)
    for where, start, stop in pieces:
        flat[start:stop] = place(model, where).float().cpu().numpy().reshape(-1)
    return flat


def _pieces(model: Transformer, table: Table, block_index: int) -> list[tuple[Place, int, int]]:
    """(place, start, stop) of each tensor of a block, in values of its flat array."""
    pieces, start = [], 0
    for where in table[block_index]:
        stop = start + _shape(model, where).numel()
        pieces.append((where, start, stop))
        start = stop
    return pieces


def _shape(model: Transformer, where: Place) -> torch.Size:
    """Of the tensor at a place, without reading it: a foreign expert may be packed."""
    if isinstance(where, ExpertPlace):
        return model.banks[where.layer].shape_of(where.which)
    return model.get_parameter(where.parameter).shape


def _check(flat: NDArray[np.float32], block_index: int, size: int) -> None:
    if flat.dtype != np.float32 or flat.shape != (size,):
        raise StateError(
            f"block {block_index} is {flat.dtype} of shape {flat.shape}, not float32 of shape ({size},)",
            fix="check that model and state come from the same config",
        )
