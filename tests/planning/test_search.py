"""What fits: always really fits, the cheapest options first, and one sentence about it."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from spes_p2p.planning.memory import Workload, predict
from spes_p2p.planning.options import FOR_ALL, KEYS, Options
from spes_p2p.planning.report import Question, answer, usable
from spes_p2p.planning.search import most_columns, one_step_down, rungs, search
from spes_p2p.planning.units import GIB
from tests.planning.runs import PUBLISHED, run_named

FEW = settings(max_examples=40)
"""Each example searches a whole ladder of options."""
MEMORIES = st.integers(2, 200).map(lambda size: size * GIB)


def work_of(name: str, owned: int | None = None, **options: object) -> Workload:
    config = run_named(name)
    wanted = config.swarm.experts_per_peer if owned is None else owned
    return Workload.of(config, wanted, replace(Options.of(config), **options))  # type: ignore[arg-type]


@FEW
@given(st.sampled_from(PUBLISHED), st.integers(0, 8), MEMORIES)
def test_what_is_chosen_fits_and_so_does_what_is_nearest(name: str, owned: int, memory: int) -> None:
    work = work_of(name, owned)
    found = search(work, memory)
    assert found.chosen is None or found.nearest is None
    for fit in (found.chosen, found.nearest):
        if fit is not None:
            assert fit.memory == predict(replace(work, owned=fit.owned, options=fit.options))
            assert fit.memory.total <= memory
    if found.chosen is None and found.nearest is None:
        assert found.least_bytes > memory
    if found.chosen is not None:
        assert found.chosen.owned == owned
    elif found.nearest is not None:
        assert found.nearest.owned < owned


@FEW
@given(st.sampled_from(PUBLISHED), MEMORIES, MEMORIES)
def test_more_memory_never_holds_fewer_columns(name: str, one: int, other: int) -> None:
    work, (less, more) = work_of(name), sorted((one, other))
    few, many = (-1 if held is None else held for held in (most_columns(work, less), most_columns(work, more)))
    assert few <= many


@FEW
@given(st.sampled_from(PUBLISHED), MEMORIES)
def test_the_rungs_say_what_fits_and_what_does_not(name: str, memory: int) -> None:
    work = work_of(name)
    for rung in search(work, memory).rungs:
        tried = replace(work, options=rung.options)
        if rung.most_columns is not None:
            assert predict(replace(tried, owned=rung.most_columns)).total <= memory
        if rung.most_columns is not None and rung.most_columns < work.model.num_experts:
            assert predict(replace(tried, owned=rung.most_columns + 1)).total > memory
        if rung.largest_micro_batch:
            sized = replace(rung.options, micro_batch_sequences=rung.largest_micro_batch)
            assert predict(replace(work, options=sized)).total <= memory


def test_a_config_that_fits_is_left_alone() -> None:
    work = work_of("spes-1b")
    found = search(work, 80 * GIB)
    assert found.chosen is not None
    assert found.chosen.options == work.options


def test_options_are_tried_in_the_order_of_what_they_cost() -> None:
    work = work_of("spes-7b")
    ladder = rungs(work.options)
    needs = [predict(replace(work, options=options)).total for options, _ in ladder]
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == len(needs)
    for need in needs:
        chosen = search(work, need).chosen
        assert chosen is not None
        assert chosen.memory.total == need


def test_a_smaller_micro_batch_comes_before_options_while_it_is_large_enough() -> None:
    work = work_of("spes-2b", micro_batch_sequences=8)
    need = predict(work_of("spes-2b", micro_batch_sequences=2)).total
    chosen = search(work, need).chosen
    assert chosen is not None
    assert chosen.options == replace(work.options, micro_batch_sequences=2)  # 4,096 tokens


def test_what_is_fixed_stays_on_every_rung() -> None:
    options = work_of("spes-7b").options
    found = [changed for changed, _ in rungs(options, fixed={"foreign_dtype", FOR_ALL})]
    assert len(found) > 1
    assert {(each.foreign_dtype, each.optimizer) for each in found} == {("compute", "adamw")}


@pytest.mark.parametrize(("columns", "gib", "optimizer"), [(1, 24, "muon"), (8, 48, "adamw")])
def test_a_7b_peer_fits_into_a_home_gpu_with_one_column_and_into_a_larger_one_with_eight(
    columns: int, gib: int, optimizer: str
) -> None:
    config = run_named("spes-7b")
    told = answer(Question(config, columns, peers=4, memory_bytes=gib * GIB))
    assert told.search is not None
    assert told.search.chosen is not None
    assert told.search.chosen.memory.total <= usable(gib * GIB)
    assert told.search.chosen.options.optimizer == optimizer


def test_steps_down_end_at_one_sequence_with_full_checkpointing() -> None:
    options, config = Options(micro_batch_sequences=12), run_named("spes-7b")
    taken = []
    while (lower := one_step_down(options, batch_sequences=12, sequence_length=2048)) is not None:
        taken.append(lower.changes(options)[0])
        options = lower
    assert taken[:2] == [f"{KEYS['micro_batch_sequences']}={size}" for size in (6, 3)]
    assert taken[-2:] == ["model.activation_checkpointing=full", "optimizer.micro_batch_sequences=1"]
    assert options.applied(config).optimizer.micro_batch_sequences == 1
    assert options.applied(config).model.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("name", "gib", "words"),
    [
        ("spes-1b", 80, "4 expert columns fit with these settings"),
        ("spes-7b", 48, "8 expert columns as configured need 5"),
        ("spes-7b", 24, "8 expert columns do not fit into the 22.1 GiB that 24.0 GiB leave after a margin"),
        ("spes-9b", 4, "nor does a peer without columns, which needs"),
    ],
)
def test_one_sentence_says_whether_it_fits(name: str, gib: int, words: str) -> None:
    config = run_named(name)
    told = answer(Question(config, config.swarm.experts_per_peer, peers=4, memory_bytes=gib * GIB))
    sentence = told.sentence()
    assert words in sentence
    assert sentence.endswith(".")
    assert told.search is not None
    if told.search.nearest is not None:
        assert f"the closest option that fits: {told.search.nearest.owned} expert column" in sentence
        assert told.search.nearest.memory.total <= usable(gib * GIB)
