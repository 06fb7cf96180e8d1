"""Loaders: the leased positions in order, exactly resumable, held-out sequences stay untouched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spes_p2p.data.leases import Leases, next_leases
from spes_p2p.data.loader import Batch, LeasedLoader, LocalLoader, check_enough, held_out_batches, open_dataset
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.memmap import TokenSequences
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import CheckpointError, ConfigError, DataError, LocalProtocolError
from spes_p2p.ids import PeerId
from tests.data.conftest import tiny_config

Counting = Callable[[int], Dataset]


def test_batches_follow_the_ranges_and_end_with_the_lease(counting: Counting) -> None:
    loader = LeasedLoader(counting(40), tiny_config())
    loader.use(((8, 12), (3, 7)), 2)
    first, second = loader.next_batch(4), loader.next_batch(2)
    assert first.positions.tolist() == [10, 11, 3, 4]
    assert second.positions.tolist() == [5, 6]
    assert first.tokens.dtype == np.int64
    assert first.tokens.shape == (4, 4)
    assert first.loss_mask.tolist() == [True] * 4
    assert loader.remaining() == 0
    with pytest.raises(LocalProtocolError, match="0 are leased"):
        loader.next_batch(1)


def test_an_epoch_of_leases_gives_every_training_sequence_once(counting: Counting) -> None:
    loader = LeasedLoader(counting(40), tiny_config("data.held_out_fraction=0.1"), ((0, 36),))
    seen = np.concatenate([loader.next_batch(4).tokens for _ in range(9)])
    assert sorted(seen[:, 0]) == list(range(36))
    assert (seen == seen[:, :1]).all()


def test_held_out_sequences_are_the_last_ones(counting: Counting) -> None:
    config = tiny_config("data.held_out_fraction=0.25", "optimizer.micro_batch_sequences=4")
    dataset = counting(40)
    batches = list(held_out_batches(dataset, config, 100))
    assert [len(batch.tokens) for batch in batches] == [4, 4, 2]
    assert [int(row[0]) for batch in batches for row in batch.tokens] == list(range(30, 40))
    few = list(held_out_batches(dataset, config, 3))
    assert few[0].positions.tolist() == [30, 33, 36]
    assert list(held_out_batches(dataset, tiny_config(), 100)) == []


def test_a_new_lease_goes_on_after_what_was_consumed_but_not_counted(counting: Counting) -> None:
    """Commits count what was reported earlier, while the loader has moved on: no sequence twice, none left out."""
    peer, leases, config = PeerId("a"), Leases(), tiny_config()
    leases = next_leases(leases, {}, [peer], {peer: 6}, 5)
    loader = LeasedLoader(counting(200), config, leases.of(peer))
    seen: list[int] = []
    for _ in range(10):
        seen += loader.next_batch(4).positions.tolist()
        reported = loader.consumed
        seen += loader.next_batch(3).positions.tolist()  # while the commit is under way
        leases = next_leases(leases, {peer: reported}, [peer], {peer: 6}, 5)
        loader.use(leases.of(peer), loader.consumed - reported)
    assert seen == list(range(70))


@pytest.mark.parametrize("kind", ["leased", "local"])
def test_the_very_next_batch_after_a_resume(counting: Counting, kind: str) -> None:
    dataset, config = counting(40), tiny_config()

    def make() -> LeasedLoader | LocalLoader:
        if kind == "leased":
            return LeasedLoader(dataset, config, ((0, 100),))
        return LocalLoader(dataset, config, PeerId("a"))

    loader = make()
    loader.next_batch(7)
    state = loader.state_dict()
    expected = [loader.next_batch(4) for _ in range(12)]
    resumed = make()
    resumed.load_state_dict(state)
    for batch in expected:
        again = resumed.next_batch(4)
        assert (again.tokens == batch.tokens).all()
        assert (again.positions == batch.positions).all()
    with pytest.raises(CheckpointError, match="data position"):
        resumed.load_state_dict({"offset": "x"})


def test_local_peers_read_their_data_in_orders_of_their_own(counting: Counting) -> None:
    dataset, config = counting(40), tiny_config()
    rows = [LocalLoader(dataset, config, PeerId(name)).next_batch(40).tokens[:, 0] for name in "ab"]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(40))
    assert rows[0].tolist() != rows[1].tolist()


def test_repetitive_sequences_give_no_loss(tmp_path: Path) -> None:
    tokens = np.arange(64 * 4, dtype="<u2").reshape(4, 64) % 256
    tokens[2] = 5
    (tmp_path / "raw").write_bytes(tokens.tobytes())
    (tmp_path / "paths.txt").write_text("raw")
    dataset = Dataset.open(tmp_path / "paths.txt", "uint16")
    for on in (True, False):
        config = tiny_config("data.sequence_length=64", f"data.mask_repetitions={str(on).lower()}")
        batch = LeasedLoader(dataset, config, ((0, 4),)).next_batch(4)
        masked = batch.tokens[:, 0] == 5
        assert (batch.loss_mask == ~(masked & on)).all()
        assert masked.sum() == 1


def test_data_shorter_than_one_batch_is_refused_with_numbers(counting: Counting) -> None:
    with pytest.raises(DataError, match=r"12 tokens are 3 training sequences of 4 tokens, fewer than one batch \(4\)"):
        LeasedLoader(counting(3), tiny_config())


def test_a_token_beyond_the_vocabulary_is_refused(counting: Counting) -> None:
    loader = LeasedLoader(counting(300), tiny_config(), ((0, 300),))
    with pytest.raises(DataError, match=r"holds token 299, but model.vocab_size is 257"):
        loader.next_batch(300)


def test_less_data_than_a_round_needs_is_refused(counting: Counting) -> None:
    config = tiny_config("swarm.min_peers=2", "sync.steps_per_round=5", "data.held_out_fraction=0.5")
    check_enough(counting(80).tokens, config)
    with pytest.raises(DataError, match=r"give 39 training sequences of 4 tokens, but a round needs 40 \(") as caught:
        check_enough(counting(78).tokens, config)
    assert "tokenize more text" in caught.value.fix


def test_a_dataset_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokenize([str(tmp_path / "a.txt")], tmp_path / "out", TokenizeOptions(processes=1, sequence_length=1))
    config = tiny_config(f"data.path={tmp_path / 'out'}")
    assert open_dataset(config).tokens == 10
    small = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 256})})
    with pytest.raises(DataError, match=r"'byte' of 257 ids, but model.vocab_size is 256"):
        open_dataset(small)
    with pytest.raises(ConfigError, match="no training data was given"):
        open_dataset(tiny_config())


def test_documents_that_end_otherwise_than_the_run_says_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokenize([str(tmp_path / "a.txt")], tmp_path / "out", TokenizeOptions(processes=1, sequence_length=1))
    path = f"data.path={tmp_path / 'out'}"
    assert open_dataset(tiny_config(path, "model.document_end=256")).eos_id == 256
    with pytest.raises(DataError, match=r"document_end is 0, but the documents of the dataset end with token 256") as e:
        open_dataset(tiny_config(path, "model.document_end=0"))
    assert e.value.fix.startswith("set model.document_end to 256")


def test_the_next_batch_is_read_on_a_thread_while_one_is_trained_on(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[str] = []
    real = TokenSequences.read

    def noted(self: TokenSequences, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        by.append(threading.current_thread().name.partition("_")[0])
        return real(self, sequences)

    monkeypatch.setattr(TokenSequences, "read", noted)
    for loader in (
        LeasedLoader(counting(40), tiny_config(), ((0, 12),)),
        LocalLoader(counting(40), tiny_config(), PeerId("a")),
    ):
        by.clear()
        place = loader.state_dict()
        batches = [loader.next_batch(4) for _ in range(3)]
        assert by[:3] == ["MainThread", "batches", "batches"]
        loader.load_state_dict(place)  # a step was given up: what was read ahead is of no use
        again = [loader.next_batch(4) for _ in range(3)]
        for left, right in zip(batches, again, strict=True):
            assert np.array_equal(left.tokens, right.tokens)
            assert np.array_equal(left.positions, right.positions)


def test_what_is_read_ahead_is_put_where_it_is_wanted_by_the_thread_that_reads(counting: Counting) -> None:
    loader, by = LeasedLoader(counting(40), tiny_config(), ((0, 12),)), list[str]()

    def put(batch: Batch) -> Batch:
        by.append(threading.current_thread().name.split("_")[0])
        return replace(batch, tokens=batch.tokens.copy())

    loader.put = put
    batches = [loader.next_batch(4) for _ in range(3)]
    assert by == ["batches", "batches"]  # the first was needed at once
    again = LeasedLoader(counting(40), tiny_config(), ((0, 12),))
    assert all(np.array_equal(batch.tokens, again.next_batch(4).tokens) for batch in batches)


def test_an_error_of_reading_ahead_comes_with_the_batch_that_has_it(counting: Counting) -> None:
    loader = LeasedLoader(counting(40), tiny_config("model.vocab_size=36"), ((0, 40),))
    read: list[int] = []

    def read_all() -> None:
        while True:
            read.extend(loader.next_batch(4).positions)

    with pytest.raises(DataError, match="holds token"):
        read_all()
    assert loader.consumed == len(read)
