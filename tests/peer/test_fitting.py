"""What a peer makes of the memory that it finds."""

from __future__ import annotations

from pathlib import Path

import torch

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.peer.fitting import fit_config, measure, sizes_to_time
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.planning.budget import Device
from spes_p2p.planning.units import GIB

SEVEN = load_config(bundled_config("spes-7b"))


def options(*overrides: str, owned: tuple[int, ...] | None = None, most: int | None = None) -> PeerOptions:
    return PeerOptions(NetworkOptions(), Path("peer"), owned_experts=owned, max_experts=most, overrides=overrides)


def gpu(gib: int) -> Device:
    return Device(gib * GIB, gib * GIB)


def test_a_cpu_is_measured_and_changes_nothing() -> None:
    device = measure(torch.device("cpu"), ranks=2)
    assert 0 < 2 * device.free_bytes <= device.total_bytes
    assert fit_config(SEVEN, options(), device) == (SEVEN, "")


def test_a_tight_gpu_gets_options_that_fit() -> None:
    config, words = fit_config(SEVEN, options(), gpu(56))
    assert config != SEVEN
    assert words.startswith("8 expert columns fit into")


def test_fewer_columns_by_hand_need_no_change() -> None:
    as_it_is = "optimizer.micro_batch_sequences=2", "model.activation_checkpointing=none"
    assert fit_config(SEVEN, options(*as_it_is, most=2), gpu(56)) == (SEVEN, "")
    assert fit_config(SEVEN, options(*as_it_is, owned=(3,)), gpu(56)) == (SEVEN, "")


def test_micro_batches_are_timed_on_a_gpu_unless_one_was_set_by_hand() -> None:
    config, cuda = fit_config(SEVEN, options(), gpu(140))[0], torch.device("cuda")
    assert sizes_to_time(config, options(), cuda, ranks=1) == (16, 8, 4)
    assert sizes_to_time(SEVEN, options(), cuda, ranks=1) == (2,), "smaller ones are too small"
    assert sizes_to_time(config, options(), torch.device("cpu"), ranks=1) == ()
    assert sizes_to_time(config, options("optimizer.micro_batch_sequences=2"), cuda, ranks=1) == ()


def test_nobody_leaves_the_runs_optimizer_by_himself() -> None:
    for gib in (24, 32, 40, 48, 56):
        config, _ = fit_config(SEVEN, options(), gpu(gib))
        assert config.optimizer.name == "adamw"


def test_what_was_set_by_hand_stays() -> None:
    config, words = fit_config(SEVEN, options("model.foreign_dtype=compute"), gpu(56))
    assert words
    assert config.model.foreign_dtype == "compute"
