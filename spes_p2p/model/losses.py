"""The training loss and its parts (design section 3, formulas of SPES, arXiv 2602.11543).

total = cross entropy
      + load_balancing * E / (L * T * k) * sum over layers l and experts e of f_e * n_le * p_le
      + router_z * sum over layers of mean(logsumexp(router logits)^2)
      + output_z * mean(logsumexp(output logits)^2)
with n tokens routed to the expert, p mean router probability, T tokens of the micro-batch, and f_e = 1, save with the
decayed auxiliary loss, where it is a factor for owned experts. Even routing makes the second term's value 1.

The two terms of the output logits come as sums from output_loss.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spes_p2p.model.router import Routing


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms beside the cross entropy; 0 turns one off (it is still reported)."""

    load_balancing: float = 0.01
    router_z: float = 0.001
    output_z: float = 1e-5


class LossParts(NamedTuple):
    """Scalars in fp32. `total` is what to differentiate, with a gradient of 1; the parts are without their weights."""

    total: Tensor
    cross_entropy: Tensor
    """Mean over the counted target tokens, in nats; 0 if none counts."""
    load_balancing: Tensor
    router_z: Tensor
    output_z: Tensor
    targets: Tensor
    """How many target tokens were counted: the weight of this micro-batch among others."""
    count_LE: Tensor
    """Assignments of each expert in each layer, masked sequences too."""


class HeadSums(NamedTuple):
    """Weighted sums over the targets."""

    total: Tensor
    """cross_entropy + the weight given * output_z: the one to differentiate."""
    cross_entropy: Tensor
    output_z: Tensor
    """These two have no gradient."""


def load_balancing_loss(routings: Sequence[Routing], factor_E: Tensor) -> Tensor:
    """E / (L T k) * sum of f_e n_le p_le."""
    products = [(factor_E * routing.count_E * routing.mean_probability_E).sum() for routing in routings]
    num_assignments = routings[0].expert_TK.numel()
    return factor_E.numel() / (len(routings) * num_assignments) * torch.stack(products).sum()


def combine(
    sums: HeadSums,
    targets: Tensor,
    routings: Sequence[Routing],
    factor_E: Tensor,
    weights: LossWeights,
    head_factor: float = 1.0,
    weight: float = 1.0,
) -> LossParts:
    """All parts and their weighted sum. Router terms count every token, masked or not: experts saw them all.

    `sums` must have been taken with `weights.output_z`, and each counted target with `target_weight`.
    """
    factor = head_factor * weight or 1.0  # without targets the sums are 0
    load_balancing = load_balancing_loss(routings, factor_E)
    router_z = torch.stack([routing.z_loss for routing in routings]).sum()
    total = sums.total + weight * (weights.load_balancing * load_balancing + weights.router_z * router_z)
    count_LE = torch.stack([routing.count_E for routing in routings])
    parts = sums.cross_entropy / factor, load_balancing.detach(), router_z.detach(), sums.output_z / factor
    return LossParts(total, *parts, targets, count_LE)


def target_weight(targets: Tensor, head_factor: float, weight: float) -> Tensor:
    """Of each counted target: `head_factor` scales its terms in the total, `weight` everything."""
    return head_factor * weight / targets.clamp(min=1)
