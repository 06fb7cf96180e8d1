"""Causal grouped-query attention with rotary positions and optional QK norm and QKV bias. No cache, no dropout.

Legend: B sequences, S positions, D d_model, H query heads, G key-value heads, C head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.config.schema import ModelConfig
from spes_p2p.model.layers import Linear, RMSNorm, compute_dtype


class Context(NamedTuple):
    """Where each token stands, and what it sees: the same in all layers."""

    cos: Tensor
    """Cosines and sines of the rotary position embedding, fp32: [S, C], or [B, 1, S, C] where positions restart."""
    sin: Tensor
    bias_B1SS: Tensor | None = None
    """Added to the scores, in the compute dtype: -inf for what a position does not see. None: it sees 0..s."""


def rotate(x_BHSC: Tensor, context: Context) -> Tensor:
    """Turns each pair of channels by its angle, computed in fp32."""
    low, high = x_BHSC.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x_BHSC * context.cos + turned * context.sin).to(x_BHSC.dtype)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v for each head; every key-value head serves H / G query heads."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm_per_head = config.qk_norm == "head"
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = Linear(config.d_model, query_width, device, config.qkv_bias)
        self.key = Linear(config.d_model, key_width, device, config.qkv_bias)
        self.value = Linear(config.d_model, key_width, device, config.qkv_bias)
        self.output = Linear(query_width, config.d_model, device)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            norm_widths = (config.head_dim,) * 2 if self.norm_per_head else (query_width, key_width)
            self.query_norm, self.key_norm = (RMSNorm(width, config.rms_eps, device) for width in norm_widths)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """[B, S, D] to [B, S, D]; position s sees positions 0..s, of its document alone where `context` says so."""
        q_BHSC = rotate(self._heads(self.query(x_BSD), self.query_norm), context)
        k_BGSC = rotate(self._heads(self.key(x_BSD), self.key_norm), context)
        v_BGSC = self._heads(self.value(x_BSD), None)
        grouped = q_BHSC.shape[1] != k_BGSC.shape[1]
        bias = context.bias_B1SS
        if bias is not None and grouped:  # no fused kernel of CUDA takes both a bias and groups
            heads_per_group, grouped = q_BHSC.shape[1] // k_BGSC.shape[1], False
            k_BGSC, v_BGSC = (x_BGSC.repeat_interleave(heads_per_group, dim=1) for x_BGSC in (k_BGSC, v_BGSC))
        y_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BGSC, v_BGSC, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )
        return self.output(y_BHSC.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """[B, S, heads * C] to [B, heads, S, C], normalised over the full width or over each head."""
        if norm is not None and not self.norm_per_head:
            x = norm(x)
        x_heads = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norm_per_head:
            x_heads = norm(x_heads)
        return x_heads.transpose(1, 2)


def context_of(token_BS: Tensor, config: ModelConfig) -> Context:
    """Angles position * theta^(-2i / C), each for the pair of channels i and i + C/2 (RoFormer, arXiv 2104.09864).

    With `document_end`, positions count from the beginning of each document, and what is outside of it is masked: one
    matrix for all layers, of B S^2 values in the compute dtype. A document ends with its end token. What follows
    belongs to the next one, whose first token is predicted from the end of the one before: so the model learns what
    texts begin with, and every sequence keeps the same number of targets.
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
