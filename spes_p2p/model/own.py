"""A model of somebody else's in the place of ours: any torch module with a loss, as shared parameters and columns.

What the trainer needs of a model, and no more: blocks of the state in and out, which parameters are trained, the loss
of a micro-batch. Nothing is known of how the module computes; which parameters are an expert column's is told by
whoever gives it (interop/own.py). Columns that this peer does not own get no gradient, but pass gradients on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spes_p2p.errors import ConfigError
from spes_p2p.model.losses import LossParts

Loss = Callable[[nn.Module, Tensor], Tensor]
"""loss(module, token_BS): the mean loss of these sequences, one fp32 number that can be differentiated."""


class OwnModel(nn.Module):
    """`blocks[b]` names the parameters of block b in the order of the state: shared ones, then those of each column."""

    def __init__(self, module: nn.Module, loss: Loss, blocks: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self._blocks = tuple(map(tuple, blocks))
        self.owned: tuple[int, ...] = ()
        """The columns trained here."""

    def set_owned(self, owned: Sequence[int]) -> None:
        """Changes which columns are trained here."""
        self.owned = tuple(owned)
        for block, names in enumerate(self._blocks):
            for name in names:
                self.module.get_parameter(name).requires_grad_(block == 0 or block - 1 in self.owned)

    def masters_in_fp32(self) -> AbstractContextManager[None]:
        """Nothing to do: the parameters that are stepped are those that compute."""
        return nullcontext()

    def refresh(self) -> None:
        """Nothing to do for the same reason."""

    def parameters_of(self, block: int) -> dict[str, nn.Parameter]:
        """The parameters of a block, by name, in the order of the state."""
        return {name: self.module.get_parameter(name) for name in self._blocks[block]}

    @torch.no_grad()
    def load_block(self, block: int, flat: NDArray[np.float32]) -> None:
        """Copies a block of the state, flat fp32, into the module."""
        for name, place in self.pieces(block):
            parameter = self.module.get_parameter(name)
            parameter.copy_(torch.from_numpy(np.array(flat[place])).view(parameter.shape))

    def read_block(self, block: int) -> NDArray[np.float32]:
        """The present values of a block, flat fp32, a copy."""
        parts = [parameter.detach().cpu().numpy().reshape(-1) for parameter in self.parameters_of(block).values()]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def pieces(self, block: int) -> Iterator[tuple[str, slice]]:
        """(name, place in the block's flat values) of each parameter."""
        start = 0
        for name, parameter in self.parameters_of(block).items():
            stop = start + parameter.numel()
            yield name, slice(start, stop)
            start = stop

    def forward(
        self,
        token_BS: Tensor,
        counted_B: Tensor | None = None,
        owned_balance_factor: float = 1.0,
        head_factor: float = 1.0,
        weight: float = 1.0,
    ) -> LossParts:
        """As `Transformer.forward`: all of the loss is what that calls cross entropy; there are no other parts.

        Raises ConfigError where the loss is no number that can be differentiated.
        """
        self.module.train(torch.is_grad_enabled())  # no dropout where it is only measured
        if counted_B is not None:
            token_BS = token_BS[counted_B]
        zero = torch.zeros((), device=token_BS.device)
        targets = torch.tensor(float(token_BS[:, 1:].numel()), device=token_BS.device)
        nothing = torch.zeros(0, 0, device=token_BS.device)
        if not len(token_BS):  # all sequences are masked: a gradient of zeros
            total = torch.stack([p.sum() for p in self.module.parameters() if p.requires_grad]).sum() * 0.0
            return LossParts(total, zero, zero, zero, zero, targets, nothing)
        loss = self._checked(self._loss(self.module, token_BS))
        return LossParts(loss * head_factor * weight, loss.detach(), zero, zero, zero, targets, nothing)

    def _checked(self, loss: object) -> Tensor:
        what = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            if loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
                return loss.float().reshape(())
            what = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else "a number without a gradient"
        raise ConfigError(
            f"the loss returned {what}", fix="let loss(module, token_BS) return the mean loss, a tensor of one number"
        )
