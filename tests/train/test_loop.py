"""The loop of a round: when it ends, what it counts, and what it does with steps that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import LeasedLoader, LocalLoader
from spes_p2p.data.manifest import Dataset
from spes_p2p.errors import SpesError
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Event, Warning
from spes_p2p.train.loop import run_inner_steps
from spes_p2p.train.trainer import StepResult, Trainer
from tests.train.small import VOCABULARY, same_bits, small_config, trainer_of, values_of

TOKENS_OF_A_STEP = 8 * 12


def never() -> bool:
    return False


def ignore(result: StepResult) -> None:
    pass


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=100 * 12)
    (tmp_path / "tokens.raw").write_bytes(tokens.astype("<u2").tobytes())
    (tmp_path / "paths.txt").write_text("tokens.raw")
    return Dataset.open(tmp_path / "paths.txt", "uint16")


def local(dataset: Dataset, config: Config) -> LocalLoader:
    return LocalLoader(dataset, config, PeerId("anna"))


def test_a_round_of_steps(dataset: Dataset) -> None:
    config = small_config()
    trainer, heard = trainer_of(config, step=40), list[StepResult]()
    for _ in range(2):
        loader = local(dataset, config)
        work = run_inner_steps(trainer, loader, 3, never, heard.append)
        assert (work.steps, loader.state_dict()) == (3, {"position": 24})
        assert work.seconds > 0
    assert [result.step for result in heard] == [41, 42, 43, 44, 45, 46]
    assert all(result.tokens == TOKENS_OF_A_STEP and not result.skipped for result in heard)


def test_it_ends_when_the_lease_is_used_up(dataset: Dataset) -> None:
    config = small_config()
    loader = LeasedLoader(dataset, config, ((0, 20),))
    work = run_inner_steps(trainer_of(config), loader, 100, never, ignore)
    assert (work.steps, loader.consumed, loader.remaining()) == (2, 16, 4)


def test_it_stops_between_two_steps_when_asked(dataset: Dataset) -> None:
    config = small_config()
    trainer = trainer_of(config)
    work = run_inner_steps(trainer, local(dataset, config), 100, lambda: trainer.round_steps == 2, ignore)
    assert work.steps == 2


def poison(trainer: Trainer) -> None:
    trainer.learner.model.norm.weight.detach()[0] = np.inf


def test_one_warning_then_an_error_after_ten_steps_that_are_not_finite(dataset: Dataset) -> None:
    config = small_config()
    trainer, events, heard = trainer_of(config), list[Event](), list[StepResult]()
    poison(trainer)
    loader = local(dataset, config)
    work = run_inner_steps(trainer, loader, 5, lambda: trainer.skipped_in_row == 4, heard.append, events.append)
    assert (work.steps, loader.state_dict(), [result.skipped for result in heard]) == (0, {"position": 32}, [True] * 4)
    with pytest.raises(SpesError, match="10 steps in a row") as raised:
        run_inner_steps(trainer, local(dataset, config), 5, never, ignore, events.append)
    assert "optimizer.lr" in raised.value.fix
    assert [event.event for event in events] == ["warning"]


def test_what_the_trainer_did_to_save_memory_is_told_once(dataset: Dataset) -> None:
    config, told = small_config(), list[Event]()
    trainer = trainer_of(config)
    trainer.learner.notes.append("the step is made again with less")
    run_inner_steps(trainer, local(dataset, config), 2, never, ignore, told.append)
    assert told == [Warning("the step is made again with less")]


def test_a_step_that_is_given_up_did_not_happen(dataset: Dataset) -> None:
    """Asked to stop after half of the third step, and to go on: the same bits as without a stop."""
    config = small_config("optimizer.micro_batch_sequences=2")
    whole, stopped = trainer_of(config), trainer_of(config)
    run_inner_steps(whole, LeasedLoader(dataset, config, ((0, 40),)), 4, never, ignore)
    loader, asked = LeasedLoader(dataset, config, ((0, 40),)), list[float]()

    def should_drop(share: float) -> bool:
        asked.append(share)
        return stopped.round_steps == 2 and share == 0.5

    work = run_inner_steps(stopped, loader, 4, never, ignore, should_drop=should_drop)
    assert (work.steps, loader.consumed, stopped.round_steps) == (2, 16, 2)
    assert asked == [0.25, 0.5, 0.75, 0.25, 0.5, 0.75, 0.25, 0.5]
    run_inner_steps(stopped, loader, 2, never, ignore)
    assert same_bits(values_of(stopped), values_of(whole))


def test_who_stops_does_not_wait_for_the_end_of_a_step(dataset: Dataset) -> None:
    config = small_config("optimizer.micro_batch_sequences=1")
    trainer, answers = trainer_of(config), iter([False, False, True])
    loader = local(dataset, config)
    work = run_inner_steps(trainer, loader, 4, lambda: next(answers), ignore)
    assert (work.steps, loader.state_dict()) == (0, {"position": 0})
