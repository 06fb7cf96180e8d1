"""What a change remembers of the text that it is said to have been trained on, with real training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.leases import Range
from spes_p2p.data.loader import LeasedLoader
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import DataNotReady
from spes_p2p.ids import sha256
from spes_p2p.state.layout import Values
from spes_p2p.sync.surroundings import Text
from spes_p2p.train import work_judge
from spes_p2p.train.work_judge import FEWEST_SEQUENCES, Memory, MemoryJudge, memory_of, verdict_on
from tests.data.piece_makers import hand_over, make_feed
from tests.train.small import VOCABULARY, initial, small_config, small_layout, trainer_of
from tests.train.test_judge import Blocks

LEASE = 64
THEIRS, OWN, THIRD, FRESH = ((at * LEASE, (at + 1) * LEASE) for at in range(4))
STEPS = 24


@dataclass
class Round:
    """A state, and what three have trained on top of it, each on a lease of its own."""

    config: Config
    dataset: Dataset
    base: Blocks
    theirs: Values
    own: Values
    third: Values
    flipped_labels: Values

    @property
    def judge(self) -> MemoryJudge:
        return MemoryJudge(self.config, self.dataset)

    def finding(self, theirs: Values, text: Text | None = None) -> str | None:
        return self.judge.finding(self.base, theirs, self.own, text or text_of())


def text_of(mark: bytes = b"") -> Text:
    return Text((THEIRS,), (OWN,), (FRESH, (4 * LEASE, 5 * LEASE)), sha256(mark))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Round:
    config = small_config("data.sequence_length=32", "optimizer.lr=0.004", "data.held_out_fraction=0.0")
    folder = tmp_path_factory.mktemp("text")
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=32 * 6 * LEASE, dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")
    (folder / "list.txt").write_text(f"{folder / 'tokens.bin'}\n")
    dataset = Dataset.open(folder / "list.txt", "uint16", VOCABULARY)
    state, layout = initial(config), small_layout(config)
    base = Blocks({block.index: np.array(state.block(block.index)) for block in layout.model_blocks})
    theirs, own, third = (_trained(config, dataset, lease) for lease in (THEIRS, OWN, THIRD))
    flipped = _trained(config, dataset, THEIRS, lambda t: VOCABULARY - 1 - t)
    return Round(config, dataset, base, theirs, own, third, flipped)


def _trained(
    config: Config, dataset: Dataset, lease: Range, change: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens
) -> Values:
    trainer = trainer_of(config)
    for step in range(STEPS):
        start = lease[0] + 8 * step % LEASE
        batch = LeasedLoader(dataset, config, ((start, start + 8),)).next_batch(8)
        trainer.train_step(type(batch)(change(batch.tokens), batch.loss_mask, batch.positions))
    values = trainer.contribution(0)
    trainer.close()
    return values


@pytest.mark.parametrize("mark", [b"one", b"two", b"three"])
def test_honest_work_passes(done: Round, mark: bytes) -> None:
    assert done.finding(done.theirs, text_of(mark)) == PASSED


LIES: dict[str, Callable[[Round], Values]] = {
    "nothing": lambda done: done.base.block(0),
    "a copy": lambda done: done.third,
    "a turned sign": lambda done: 2 * done.base.block(0) - done.theirs,
    "noise": lambda done: done.base.block(0) + _noise(done, 1.0),
    "large noise": lambda done: done.base.block(0) + _noise(done, 10.0),
    "other labels": lambda done: done.flipped_labels,
    "not finite": lambda done: np.full_like(done.theirs, np.nan),
}


def _noise(done: Round, times: float) -> Values:
    change = done.theirs - done.base.block(0)
    noise = np.random.default_rng(5).standard_normal(len(change), np.float32)
    return noise * np.float32(times * np.linalg.norm(change) / np.linalg.norm(noise))


@pytest.mark.parametrize("lie", LIES)
def test_what_was_not_trained_on_that_text_fails(done: Round, lie: str) -> None:
    findings = [done.finding(LIES[lie](done), text_of(mark)) for mark in (b"one", b"two", b"three")]
    assert findings.count(FAILED) >= 2
    assert PASSED not in findings or lie == "large noise"


def test_where_our_own_change_shows_nothing_nothing_is_said(done: Round) -> None:
    assert done.judge.finding(done.base, done.theirs, done.base.block(0), text_of()) is None
    assert done.judge.finding(done.base, done.theirs, np.full_like(done.own, np.nan), text_of()) is None


def test_a_copy_of_our_own_shows_nothing_to_us(done: Round) -> None:
    """The other auditors find it."""
    assert done.finding(done.own) is None


def test_too_little_text_says_nothing(done: Round) -> None:
    few = Text((THEIRS,), ((OWN[0], OWN[0] + FEWEST_SEQUENCES - 1),), (FRESH,), sha256(b""))
    assert done.finding(done.theirs, few) is None


def test_text_that_is_not_here_yet_is_waited_for(done: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_yet(*arguments: object) -> None:
        raise DataNotReady("none yet")

    monkeypatch.setattr(work_judge, "leased_tokens", none_yet)
    with pytest.raises(DataNotReady):
        done.finding(done.theirs)


def test_text_that_an_auditor_has_not_comes_from_others_where_it_is_little(done: Round, tmp_path: Path) -> None:
    whole = FolderPieces.open(done.dataset, tmp_path / "own", lambda text: None, 256)
    feed, _ = make_feed(tmp_path / "cache", whole)
    judge = MemoryJudge(done.config, PieceDataset(feed))
    enough = LEASE * 2 * whole.grid.max_bytes

    def finding(most_bytes: int) -> str | None:
        return judge.finding(done.base, done.theirs, done.own, replace(text_of(), most_bytes=most_bytes))

    with pytest.raises(DataNotReady):
        finding(whole.grid.max_bytes)
    assert feed.missing(10**4).pieces == ()
    found = None
    for _ in range(3):  # theirs, then ours, then that of nobody
        with pytest.raises(DataNotReady):
            finding(enough)
        assert 0 < hand_over(whole, feed) * whole.grid.max_bytes <= enough
    found = finding(enough)
    assert found == PASSED


def test_memory_is_measured_against_text_that_nobody_trained_on() -> None:
    differences = np.array([0.5, 0.7, -0.3, -0.5, 0.1, 0.1, 0.0, 0.2])
    memory = memory_of(differences, [2, 2, 4])
    assert memory.theirs == pytest.approx(0.5)
    assert memory.own == pytest.approx(0.5)
    assert memory.error == pytest.approx(np.sqrt(0.02 / 2 + 0.02 / 3 / 4))


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (Memory(0.3, 1.0, 0.1), PASSED),
        (Memory(0.2, 1.0, 0.1), FAILED),
        (Memory(-1.0, 1.0, 0.1), FAILED),
        (Memory(1.0, 1.0, 0.7), None),
        (Memory(0.3, 1.0, 0.5), PASSED),
        (Memory(0.2, 1.0, 0.5), None),
        (Memory(float("nan"), 1.0, 0.1), FAILED),
    ],
)
def test_a_quarter_of_our_own_memory_is_enough(memory: Memory, found: str | None) -> None:
    assert verdict_on(memory) == found
