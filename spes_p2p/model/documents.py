"""Several documents in one sequence, each as if it stood alone: its own positions, and attention to itself only.

A document ends with its end token. What follows belongs to the next one, whose first token is predicted from the end
of the one before: so the model learns what texts begin with, and every sequence keeps the same number of targets.

Legend: B sequences, S positions, C head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spes_p2p.model.attention import Context
from spes_p2p.model.layers import compute_dtype

if TYPE_CHECKING:
    from spes_p2p.config.schema import ModelConfig


def context_of(token_BS: Tensor, config: ModelConfig) -> Context:
    """Angles position * theta^(-2i / C), each for the pair of channels i and i + C/2 (RoFormer, arXiv 2104.09864).

    With `document_end`, positions count from the beginning of each document, and what is outside of it is masked: one
    matrix for all layers, of B S^2 values in the compute dtype.
    """
    cos_SC, sin_SC = _rotation(token_BS.shape[1], config.head_dim, config.rope_theta, token_BS.device)
    if config.document_end is None:
        return Context(cos_SC, sin_SC)
    start_BS = _starts(token_BS, config.document_end)
    place_S = torch.arange(token_BS.shape[1], device=token_BS.device)
    position_BS = place_S - start_BS
    seen_BSS = (start_BS[:, :, None] == start_BS[:, None, :]) & (place_S[:, None] >= place_S)
    bias_BSS = torch.zeros(seen_BSS.shape, dtype=compute_dtype(cos_SC), device=token_BS.device)
    bias_BSS.masked_fill_(~seen_BSS, float("-inf"))
    return Context(cos_SC[position_BS][:, None], sin_SC[position_BS][:, None], bias_BSS[:, None])


def _starts(token_BS: Tensor, end: int) -> Tensor:
    """Where the document of each position begins, as far as it is in the sequence."""
    place_S = torch.arange(1, token_BS.shape[1], device=token_BS.device)
    after_end_BS = torch.where(token_BS[:, :-1] == end, place_S, 0)
    first_B1 = torch.zeros_like(token_BS[:, :1], dtype=torch.long)
    return torch.cat((first_B1, after_end_BS), dim=1).cummax(dim=1).values


def _rotation(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, C], fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / theta**exponents)
    angles_SC = torch.cat((angles, angles), dim=-1)
    return angles_SC.cos(), angles_SC.sin()
