"""What a peer takes on by itself: columns that fit with a margin, and options that make them fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.planning.budget import MARGIN_SHARE, Device, columns_by_experience, columns_that_fit, fitted
from spes_p2p.planning.memory import CONTEXT_BYTES, MASTERS, Workload, predict
from spes_p2p.planning.options import Options
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.units import GIB
from tests.planning.runs import run_named

SEVEN = run_named("spes-7b")


def gpu(gib: float, ranks: int = 1) -> Device:
    return Device(round(gib * GIB), round(gib * GIB), ranks)


@pytest.mark.parametrize("gib", [24, 48, 80, 140])
def test_columns_fit_with_a_margin_and_one_more_does_not(gib: int) -> None:
    columns = columns_that_fit(SEVEN, gpu(gib))
    room = (1 - MARGIN_SHARE) * gib * GIB
    needs = [predict(Workload.of(SEVEN, owned)) for owned in (columns, columns + 1)]
    if columns:
        assert needs[0].total - needs[0].context <= room
    assert columns == SEVEN.model.num_experts or needs[1].total - needs[1].context > room


def test_a_cpu_computes_in_fp32() -> None:
    tiny = run_named("tiny")
    assert columns_that_fit(tiny, Device(GIB, GIB, is_gpu=False)) == tiny.model.num_experts
    assert columns_that_fit(tiny, Device(2**20, 2**20, is_gpu=False)) == 0


def test_a_gpu_that_computes_in_fp16_has_whole_masters_beside_its_copies() -> None:
    old = replace(gpu(80), is_bf16=False)
    parts = [predict(device.workload(SEVEN, 8)).parts[MASTERS] for device in (gpu(80), old)]
    assert parts == [2 * 8 * Sizes.of(SEVEN.model).column, 4 * 8 * Sizes.of(SEVEN.model).column]


BY_HAND = ("optimizer.micro_batch_sequences", "model.activation_checkpointing")


def test_what_fits_is_left_alone_where_a_person_has_set_it() -> None:
    assert fitted(SEVEN, gpu(140), wanted=8, chosen_by_hand=BY_HAND) == (SEVEN, "")


@pytest.mark.parametrize(("gib", "sequences"), [(80, 4), (140, 16)])
def test_the_micro_batch_is_the_largest_that_fits(gib: int, sequences: int) -> None:
    """With full checkpointing configured, too: it is left out where there is room."""
    slow = SEVEN.model_copy(update={"model": SEVEN.model.model_copy(update={"activation_checkpointing": "full"})})
    for given in (SEVEN, slow):
        config, words = fitted(given, gpu(gib), wanted=8, chosen_by_hand=())
        assert config.optimizer.micro_batch_sequences == sequences
        assert config.model.activation_checkpointing == "none"
        assert f"optimizer.micro_batch_sequences={sequences}" in words
        assert "gradients stay" not in words


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_larger_micro_batch_divides_a_ranks_batch(ranks: int) -> None:
    small = SEVEN.model_copy(update={"optimizer": SEVEN.optimizer.model_copy(update={"batch_sequences": 24})})
    config, _ = fitted(small, gpu(140, ranks), wanted=1, chosen_by_hand=())
    assert config.optimizer.micro_batch_sequences == {1: 12, 4: 6}[ranks]


def test_local_options_make_it_fit_and_are_named() -> None:
    config, words = fitted(SEVEN, gpu(48), wanted=8, chosen_by_hand=())
    need = predict(Workload.of(config, 8))
    assert need.total - need.context <= (1 - MARGIN_SHARE) * 48 * GIB
    assert all(change in words for change in Options.of(config).changes(Options.of(SEVEN)))
    assert words.startswith("8 expert columns fit into 44.2 GiB with ")


def test_what_a_person_has_set_stays() -> None:
    config, _ = fitted(SEVEN, gpu(48), wanted=8, chosen_by_hand={"model.activation_checkpointing"})
    assert config.model.activation_checkpointing == SEVEN.model.activation_checkpointing
    assert config.optimizer.name == "adamw"  # nobody leaves the run's method by himself
    kept, _ = fitted(SEVEN, gpu(60), wanted=8, chosen_by_hand={"optimizer.micro_batch_sequences"})
    assert kept.optimizer.micro_batch_sequences == SEVEN.optimizer.micro_batch_sequences


def test_what_fits_in_no_way_is_said_and_left_to_the_person() -> None:
    config, words = fitted(SEVEN, gpu(12), wanted=8, chosen_by_hand=())
    assert config == SEVEN
    assert "8 expert columns need" in words


def test_what_training_left_at_its_peak_is_for_more_columns() -> None:
    column = 10**6 * 14  # half a master, gradient, moments
    assert columns_by_experience(3, 8 * 10**9 + 2 * column, 160 * 10**9, 10**6) == 5
    assert columns_by_experience(3, 10**9, 160 * 10**9, 10**6) == 3  # what was trained does fit
    lean = Options(optimizer="muon")
    assert columns_by_experience(3, 8 * 10**9 + 2 * column, 160 * 10**9, 10**6, lean) == 5
    assert columns_by_experience(3, 8 * 10**9 + 3 * column, 160 * 10**9, 10**6, lean) == 7


def test_what_ranks_need_to_talk_was_not_paid_when_memory_was_measured() -> None:
    pair = gpu(80, ranks=2)
    columns = columns_that_fit(SEVEN, pair)
    assert columns
    assert predict(pair.workload(SEVEN, columns)).total - CONTEXT_BYTES <= pair.usable_bytes
    assert pair.limit == gpu(80).limit
