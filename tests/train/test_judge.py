"""Expert columns on held-out text: which make the committed model worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import Batch, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.state.layout import Values
from spes_p2p.train.judge import LONGEST, HeldOutJudge, Trial, rises
from tests.train.small import VOCABULARY, batch_of, small_config, trainer_of, values_of

OWNED = (1, 2, 4)
STEPS = 30


def config_of(*more: str) -> Config:
    return small_config("sync.aggregate=clip", "data.held_out_fraction=0.5", "sync.trial_sequences=12", *more)


@dataclass
class Blocks:
    """A state in memory."""

    values: dict[int, Values]

    def block(self, index: int) -> Values:
        return self.values[index]


@dataclass
class Trained:
    """A state, what honest training of two of its columns gives, and text of the same kind."""

    config: Config
    base: Blocks
    columns: dict[int, Values]
    judge: HeldOutJudge

    def judged(self, lie: Callable[[Values], Values], column: int = OWNED[0]) -> frozenset[int]:
        """What is found where somebody changes one column's change so; the other is as it was trained."""
        base = self.base.block(1 + column)
        lied = base + lie(self.columns[column] - base).astype(np.float32)
        return self.judge.harmful(self.base, self.new({**self.columns, column: lied}), OWNED)

    def new(self, columns: dict[int, Values]) -> dict[int, Values]:
        """All blocks with other values in these columns."""
        return {**self.base.values, **{1 + column: values for column, values in columns.items()}}


def text_of(folder: Path, config: Config) -> Dataset:
    """Sequences as `batch_of` makes them, one after the other."""
    length = config.data.sequence_length
    tokens = batch_of(3, sequences=96).tokens.reshape(-1)
    assert tokens.size % length == 0
    folder.mkdir()
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    (folder / "list.txt").write_text(f"{folder / 'tokens.bin'}\n")
    return Dataset.open(folder / "list.txt", "uint16", VOCABULARY)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    config = config_of()
    trainer = trainer_of(config, tuple(range(config.model.num_experts)))
    for step in range(5 * STEPS):
        trainer.train_step(batch_of(step))
    base = Blocks(values_of(trainer))
    trainer.adopt(OWNED, base, trainer.step)
    for step in range(STEPS):
        trainer.train_step(batch_of(1000 + step))
    columns = {column: trainer.contribution(1 + column) for column in OWNED}
    data = text_of(tmp_path_factory.mktemp("text") / "data", config)
    return Trained(config, base, columns, HeldOutJudge(config, data))


def test_honest_columns_are_not_harmful(trained: Trained) -> None:
    assert trained.judged(lambda change: change) == frozenset()


LIES: dict[str, Callable[[Values], Values]] = {
    "a turned sign": lambda change: -change,
    "a hundred times the other way": lambda change: -100 * change,
    "a step that is far too long": lambda change: 1000 * change,
    "not finite": lambda change: change * np.float32(np.nan),
    "huge": lambda change: np.full_like(change, 1e30),
    "large noise": lambda change: 300 * np.linalg.norm(change) / np.sqrt(len(change))
    * np.random.default_rng(0).standard_normal(len(change)),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_harmful_columns_are_found_and_no_others(trained: Trained, lie: str) -> None:
    assert trained.judged(LIES[lie]) == {OWNED[0]}


def test_a_column_that_is_tried_alone_is_compared_with_what_others_changed(trained: Trained) -> None:
    """Its values may come late, or again: that is no way to be noticed less."""
    config, data, [first, *others] = trained.config, trained.judge._dataset, OWNED
    base = {column: trained.base.block(1 + column) for column in OWNED}
    short = {c: base[c] + np.float32(0.1 / LONGEST) * (trained.columns[c] - base[c]) for c in others}
    alone, beside = (trained.new({first: trained.columns[first], **more}) for more in ({}, short))
    judge = HeldOutJudge(config, data)
    assert judge.harmful(trained.base, alone, (first,)) == frozenset()  # nothing is known of others
    assert HeldOutJudge(config, data).harmful(trained.base, beside, (first,)) == {first}
    judge = HeldOutJudge(config, data)
    assert judge.harmful(trained.base, trained.new(short), others) == frozenset()
    assert judge.harmful(trained.base, alone, (first,)) == {first}


def test_a_change_of_nothing_is_not_harmful(trained: Trained) -> None:
    assert trained.judged(lambda change: 0 * change) == frozenset()


def test_losses_are_those_of_the_trainer_and_slopes_those_of_differences(trained: Trained) -> None:
    """Layer by layer, with documents too, against the whole model at once."""
    config = trained.config
    for more in ((), ("model.document_end=0",)):
        config = config_of(*more)
        trainer = trainer_of(config, OWNED)
        trainer.adopt(OWNED, trained.base, 0)
        batch = batch_of(99, sequences=6)
        trial = Trial(config.model, trained.base, torch.from_numpy(batch.tokens))
        changes = {column: values - trained.base.block(1 + column) for column, values in trained.columns.items()}
        losses, slopes = trial.slopes(changes)

        def one(at: int, batch: Batch = batch) -> Batch:
            return Batch(batch.tokens[at : at + 1], batch.loss_mask[at : at + 1], batch.positions[at : at + 1])

        whole = [trainer.evaluate([one(at)]) for at in range(len(batch.tokens))]
        np.testing.assert_allclose(losses, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(trial.losses({}), whole, rtol=1e-5, atol=1e-6)
        for column, change in changes.items():
            base, small = trained.base.block(1 + column), np.float32(0.02)
            up, down = (trial.losses({1 + column: base + sign * small * change}) for sign in (1, -1))
            np.testing.assert_allclose(slopes[column], (up - down) / (2 * small), rtol=0.05, atol=2e-3)


def test_nothing_is_said_without_enough_text(trained: Trained, tmp_path: Path) -> None:
    config = config_of("sync.trial_sequences=3")
    judge = HeldOutJudge(config, text_of(tmp_path / "data", config))
    lied = trained.new({OWNED[0]: -trained.columns[OWNED[0]]})
    assert judge.harmful(trained.base, lied, OWNED) == frozenset()


def test_a_rise_by_chance_is_none() -> None:
    rng = np.random.default_rng(0)
    assert not any(rises(rng.standard_normal(16), 0) for _ in range(50))
    assert rises(1 + 0.1 * rng.standard_normal(16), 0)
    assert not rises(np.zeros(16), 0)
    assert not rises(0.01 + 1e-4 * rng.standard_normal(16), 0.02)


def test_the_text_is_held_out(trained: Trained) -> None:
    batches = held_out_batches(trained.judge._dataset, trained.config, 12)
    assert sum(len(batch.tokens) for batch in batches) == 12
