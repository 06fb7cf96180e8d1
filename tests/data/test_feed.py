"""Reading from pieces: the same batches as from files, in the order of need, and waiting that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.feed import PATIENCE_SECONDS, Feed, PieceDataset
from spes_p2p.data.loader import LeasedLoader, held_out_batches, need_held_out
from spes_p2p.errors import DataNotReady
from tests.data.conftest import tiny_config
from tests.data.piece_makers import hand_over, make_dataset, make_feed, make_pieces
from tests.data.test_piece_cache import files_at_most

CONFIG = tiny_config("data.held_out_fraction=0.1", "optimizer.batch_sequences=2", "model.vocab_size=1000")
"""Sequences of 4 tokens, two a batch."""


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def test_batches_are_those_of_the_files(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    feed, _ = make_feed(tmp_path / "cache", pieces)
    ranges = ((3, 9), (20, 24))
    there = LeasedLoader(make_dataset(tmp_path), CONFIG, ranges)
    ours = LeasedLoader(PieceDataset(feed), CONFIG, ranges)
    assert 0 < hand_over(pieces, feed) < pieces.held
    assert hand_over(pieces, feed) == 0
    while there.remaining():
        assert ours.wait_for_data(2, at_once)
        batch, other = there.next_batch(2), ours.next_batch(2)
        assert np.array_equal(batch.tokens, other.tokens)
        assert np.array_equal(batch.positions, other.positions)
    ours.use(((24, 28),), 0)
    assert not ours.wait_for_data(2, at_once)
    hand_over(pieces, feed)
    assert ours.wait_for_data(4, at_once)
    assert len(ours.next_batch(4).tokens) == 4


def test_held_out_sequences_come_first_and_stay(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    feed, _ = make_feed(tmp_path / "cache", pieces)
    dataset = PieceDataset(feed)
    need_held_out(dataset, CONFIG, 2)
    held_out = feed.missing(100).pieces
    assert held_out
    LeasedLoader(dataset, CONFIG, ((0, 8),))
    assert feed.missing(100).pieces[: len(held_out)] == held_out
    with pytest.raises(DataNotReady):
        list(held_out_batches(dataset, CONFIG, 2, at_once))
    hand_over(pieces, feed)
    there = [batch.tokens.tolist() for batch in held_out_batches(make_dataset(tmp_path), CONFIG, 2)]
    assert [batch.tokens.tolist() for batch in held_out_batches(dataset, CONFIG, 2, at_once)] == there
    need_held_out(dataset, CONFIG, 0)
    assert not feed.missing(100).pieces


def test_what_training_waits_for_is_first_and_the_wait_ends_when_it_has_come(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    feed, said = make_feed(tmp_path / "cache", pieces)
    loader = LeasedLoader(PieceDataset(feed), CONFIG, ((0, 20),))
    asked = threading.Event()
    feed.changed = asked.set
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(loader.wait_for_data(2, never)))
    waiting.start()
    assert asked.wait(10)
    missing = feed.missing(100)
    assert missing.urgent
    for piece in missing.pieces[1:]:
        feed.take([(piece, pieces.find(piece) or b"")])
    assert waiting.is_alive()
    feed.take([(missing.pieces[0], pieces.find(missing.pieces[0]) or b"")])
    waiting.join(10)
    assert results == [True]
    assert not feed.missing(100).urgent
    assert len(said) <= 2


def test_a_long_wait_is_said_once_with_the_reason(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path)
    feed, said = make_feed(tmp_path / "cache", pieces)
    now = [0.0]
    late = Feed(feed.cache, said.append, now=lambda: now[0])
    late.trouble = "nobody has them"

    def should_stop() -> bool:
        now[0] += PATIENCE_SECONDS
        return now[0] > 5 * PATIENCE_SECONDS

    for _ in range(2):
        assert not late.wait(np.array([0]), 4, should_stop)
    assert len(said) == 1
    assert "training is waiting for data" in said[0]
    assert "nobody has them" in said[0]


def test_with_little_room_what_is_next_comes_first_and_all_comes_in_the_end(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path, (400,))
    feed, _ = make_feed(tmp_path / "cache", pieces, slots=6)
    ours = LeasedLoader(PieceDataset(feed), CONFIG, ((0, 60),))
    there = LeasedLoader(make_dataset(tmp_path, (400,)), CONFIG, ((0, 60),))
    assert feed.is_tight
    fetched = 0
    while ours.remaining():
        fetched += hand_over(pieces, feed)
        assert feed.missing(100).pieces == ()  # never more than there is room for: nothing is fetched in vain
        assert ours.wait_for_data(2, at_once)
        assert np.array_equal(ours.next_batch(2).tokens, there.next_batch(2).tokens)
    assert fetched <= 60
    assert feed.cache.held <= 6


@pytest.mark.parametrize("room", [0, 2])
def test_a_full_disk_is_said_once_and_training_goes_on(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.data.feed._LOOK_SECONDS", 0.001)
    pieces = make_pieces(tmp_path)
    feed, said = make_feed(tmp_path / "cache", pieces)
    loader = LeasedLoader(PieceDataset(feed), CONFIG, ((0, 20),))
    there = LeasedLoader(make_dataset(tmp_path), CONFIG, ((0, 20),))
    with files_at_most(room * pieces.grid.max_bytes):
        while loader.remaining():
            stop = fed(pieces, feed)
            assert loader.wait_for_data(2, stop)
            assert np.array_equal(loader.next_batch(2).tokens, there.next_batch(2).tokens)
    assert len(said) == 1
    assert "File too large; training continues with" in said[0]
    assert len(feed.missing(1000).pieces) <= room  # nothing that there is no room for


def fed(pieces: object, feed: Feed) -> Callable[[], bool]:
    """Asked whether to stop waiting, it brings what is missing; gives up after a few times."""
    left = [20]

    def should_stop() -> bool:
        hand_over(pieces, feed, 5)  # type: ignore[arg-type]
        left[0] -= 1
        return left[0] == 0

    return should_stop
