"""What this machine takes on: measures its memory and lets `planning.budget` choose. Runs before the model is made."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from spes_p2p.config.load import parse_override
from spes_p2p.config.schema import Config
from spes_p2p.peer.options import PeerOptions
from spes_p2p.planning.budget import Device, fitted
from spes_p2p.planning.memory import pinned_bytes
from spes_p2p.train.memory import free_and_total_bytes

EIGHT_BIT_LIBRARY = "bitsandbytes"
PINNED_SHARE = 0.5
"""Most of the host's free memory that offloaded experts may take: the state on disk is cached in it, too."""


def measure(device: torch.device, ranks: int) -> Device:
    """Free memory now, of the first rank's device; on the CPU all ranks share it."""
    free, total = free_and_total_bytes(device)
    is_gpu = device.type == "cuda"
    return Device(free if is_gpu else free // ranks, total, ranks, is_gpu)


def fit_config(config: Config, options: PeerOptions, device: Device) -> tuple[Config, str]:
    """`config` with local options that make the wanted columns fit (see `budget.fitted`); a CPU, which swaps, keeps it.

    Wanted is what was claimed by number, else what the organiser asks of everybody, at most `--max-experts`.
    """
    if not device.is_gpu:
        return config, ""
    wanted = wanted_columns(config, options)
    by_hand = {parse_override(override)[0] for override in options.overrides}
    host_free, _ = free_and_total_bytes(torch.device("cpu"))
    return fitted(config, device, wanted, {*by_hand, *_not_here(config, device, wanted, host_free)})


def wanted_columns(config: Config, options: PeerOptions) -> int:
    """What was claimed by number, else what the organiser asks of everybody; at most `--max-experts`."""
    wanted = len(options.owned_experts or ()) or config.swarm.experts_per_peer
    return wanted if options.max_experts is None else min(wanted, options.max_experts)


def _not_here(config: Config, device: Device, wanted: int, host_free_bytes: int) -> Iterator[str]:
    """Options that need what this machine does not have."""
    if find_spec(EIGHT_BIT_LIBRARY) is None:
        yield "optimizer.name"
    if device.ranks * pinned_bytes(device.workload(config, wanted)) > PINNED_SHARE * host_free_bytes:
        yield "model.foreign_offload"
