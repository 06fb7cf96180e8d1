"""Decides how much this machine trains: measures its memory and lets `planning.budget` choose. Runs before the model
is made."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from spes_p2p.config.load import parse_override
from spes_p2p.config.schema import Config
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.peer.options import PeerOptions
from spes_p2p.planning import search
from spes_p2p.planning.budget import Device, fitted, most_with_options
from spes_p2p.planning.memory import pinned_bytes
from spes_p2p.planning.options import KEYS, Options
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.memory import free_and_total_bytes, least_free_and_total_bytes
from spes_p2p.train.others import Others

EIGHT_BIT, EIGHT_BIT_LIBRARY = "optimizer.name", "bitsandbytes"
PINNED_SHARE = 0.5
"""Most of the host's free memory that offloaded experts may take: the state on disk is cached in it, too."""


def measure(device: torch.device, ranks: int, cards: Sequence[int] = ()) -> Device:
    """Free memory now, the least of the `cards` that ranks use (none: of `device`); on the CPU all ranks share it."""
    is_gpu = device.type == "cuda"
    devices = [torch.device("cuda", number) for number in cards] or [device]
    free, total = min(map(free_and_total_bytes, devices))
    return Device(free if is_gpu else free // ranks, total, ranks, is_gpu, half_dtype(device) == torch.bfloat16)


def measure_ranks(device: torch.device, ranks: Ranks) -> Device:
    """The same by the ranks themselves, before they have built anything; each measures its own device.

    Raises SpesError where one has ended.
    """
    if ranks.world_size == 1:
        return measure(device, 1)
    with Others(ranks).told("measure"):
        free, total = least_free_and_total_bytes(ranks)
    is_gpu = device.type == "cuda"
    own, is_bf16 = free if is_gpu else free // ranks.world_size, half_dtype(device) == torch.bfloat16
    return Device(own, total, ranks.world_size, is_gpu, is_bf16)


def fit_config(config: Config, options: PeerOptions, device: Device) -> tuple[Config, str]:
    """`config` with local options that make the wanted columns fit (see `budget.fitted`); a CPU, which swaps, keeps it.

    Wanted is what was claimed by number, else what the organiser asks of everybody, at most `--max-experts`.
    """
    if not device.is_gpu:
        return config, ""
    wanted = wanted_columns(config, options)
    return fitted(config, device, wanted, _by_hand(options) | _not_here(config, device, wanted))


def sizes_to_time(config: Config, options: PeerOptions, device: torch.device, ranks: int) -> tuple[int, ...]:
    """Micro-batches of a fitted config that should be timed: on a GPU, where nobody has set one by hand."""
    if device.type != "cuda" or KEYS["micro_batch_sequences"] in _by_hand(options):
        return ()
    share = config.optimizer.batch_sequences // ranks
    return search.sizes_to_time(Options.of(config), share, config.data.sequence_length)


def eight_bit_would_help(config: Config, options: PeerOptions, device: Device) -> bool:
    """Whether more of the wanted columns would fit if the library of 8-bit moments were installed."""
    by_hand, wanted = _by_hand(options), wanted_columns(config, options)
    fixed = by_hand | _not_here(config, device, wanted)
    if not device.is_gpu or EIGHT_BIT in by_hand or EIGHT_BIT not in fixed:
        return False
    now = most_with_options(config, device, wanted, fixed)
    return most_with_options(config, device, wanted, fixed - {EIGHT_BIT}) > now


def wanted_columns(config: Config, options: PeerOptions) -> int:
    """Columns to train: the number claimed, else `swarm.experts_per_peer`; at most `--max-experts`."""
    wanted = len(options.owned_experts or ()) or config.swarm.experts_per_peer
    return wanted if options.max_experts is None else min(wanted, options.max_experts)


def _by_hand(options: PeerOptions) -> set[str]:
    return {parse_override(override)[0] for override in options.overrides}


def _not_here(config: Config, device: Device, wanted: int) -> set[str]:
    """Options that need what this machine does not have."""
    found = set() if find_spec(EIGHT_BIT_LIBRARY) else {EIGHT_BIT}
    host_free_bytes, _ = free_and_total_bytes(torch.device("cpu"))
    if device.ranks * pinned_bytes(device.workload(config, wanted)) > PINNED_SHARE * host_free_bytes:
        found.add("model.foreign_offload")
    return found
