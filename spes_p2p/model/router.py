"""Which experts see a token: dropless top-k of an fp32 softmax, and what the two router losses need.

Legend: T tokens, D d_model, E experts, K chosen experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.config.schema import ModelConfig
from spes_p2p.model.layers import unloaded


class Routing(NamedTuple):
    """Where each token goes. All floats are fp32."""

    expert_TK: Tensor
    weight_TK: Tensor
    count_E: Tensor
    """n_e: assignments of each expert, a float without gradient."""
    mean_probability_E: Tensor
    """p_e: mean of the router's probability over the tokens."""
    z_loss: Tensor
    """mean over tokens of logsumexp(router logits)^2."""


class Router(nn.Module):
    """Chooses the top k of softmax(weight @ x), all in fp32 whatever autocast says."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.top_k, self.norm_topk = config.top_k, config.norm_topk
        self.weight = unloaded(config.num_experts, config.d_model, device=device)

    def forward(self, x_TD: Tensor) -> Routing:
        """Routes each of T tokens to k experts."""
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.weight)
        probability_TE = logits_TE.softmax(dim=-1)
        weight_TK, expert_TK = probability_TE.topk(self.top_k, dim=-1)
        if self.norm_topk:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        return Routing(
            expert_TK,
            weight_TK,
            _count(expert_TK, logits_TE.shape[1]),
            probability_TE.mean(dim=0),
            logits_TE.logsumexp(dim=-1).square().mean(),
        )


def _count(expert_TK: Tensor, num_experts: int) -> Tensor:
    """Like bincount, which would wait for the device; sums of ones are exact in any order (below 2^24)."""
    chosen_N = expert_TK.flatten()
    counts_E = torch.zeros(num_experts, device=chosen_N.device)
    return counts_E.scatter_add_(0, chosen_N, torch.ones_like(chosen_N, dtype=counts_E.dtype))
