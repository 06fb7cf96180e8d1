"""The feed-forward part of a layer: a router and its bank of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from spes_p2p.experts.backends import Backend
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.stores import Foreign
from spes_p2p.model.router import Router, Routing

if TYPE_CHECKING:
    from spes_p2p.config.schema import ModelConfig


class MoE(nn.Module):
    """y = sum of the chosen experts' outputs, weighted by the router. No shared expert, no capacity limit."""

    def __init__(
        self,
        config: ModelConfig,
        owned: Sequence[int],
        backend: Backend,
        device: torch.device | None,
        dtype: torch.dtype,
        foreign: Foreign | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(config, device)
        self.experts = ExpertBank(
            config.num_experts, config.d_model, config.expert_ffn, owned, backend, device, dtype, foreign
        )

    def route(self, x_BSD: Tensor) -> Routing:
        """Which experts will see the tokens of [B, S, D]."""
        return cast(Routing, self.router(x_BSD.flatten(0, 1)))

    def forward(self, x_BSD: Tensor, routing: Routing) -> Tensor:
        """[B, S, D] to [B, S, D], with the tokens routed so."""
        return cast(Tensor, self.experts(x_BSD.flatten(0, 1), routing.expert_TK, routing.weight_TK)).view_as(x_BSD)
