"""Decides how much this machine trains: measures its memory and lets `planning.budget` choose. Runs before the model
is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spes_p2p.config.load import parse_override
from spes_p2p.config.schema import Config
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.peer.options import PeerOptions
from spes_p2p.planning import search
from spes_p2p.planning.budget import Device, fitted
from spes_p2p.planning.options import KEYS, Options
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.memory import free_and_total_bytes, least_free_and_total_bytes
from spes_p2p.train.others import Others


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
    return fitted(config, device, wanted_columns(config, options), _by_hand(options))


def sizes_to_time(config: Config, options: PeerOptions, device: torch.device, ranks: int) -> tuple[int, ...]:
    """Micro-batches of a fitted config that should be timed: on a GPU, where nobody has set one by hand."""
    if device.type != "cuda" or KEYS["micro_batch_sequences"] in _by_hand(options):
        return ()
    share = config.optimizer.batch_sequences // ranks
    return search.sizes_to_time(Options.of(config), share, config.data.sequence_length)


def wanted_columns(config: Config, options: PeerOptions) -> int:
    """Columns to train: the number claimed, else `swarm.experts_per_peer`; at most `--max-experts`."""
    wanted = len(options.owned_experts or ()) or config.swarm.experts_per_peer
    return wanted if options.max_experts is None else min(wanted, options.max_experts)


def _by_hand(options: PeerOptions) -> set[str]:
    return {parse_override(override)[0] for override in options.overrides}
