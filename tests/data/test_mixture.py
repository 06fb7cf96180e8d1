"""Mixtures: the weights hold at every place, and a position has one sequence for whoever is leased it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config.fingerprint import fingerprint
from spes_p2p.config.load import bundled_config, config_from_text, load_config, published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.leases import Leases, next_leases
from spes_p2p.data.loader import (
    LeasedLoader,
    check_datasets,
    held_out_batches,
    open_dataset,
    spans_of,
    with_datasets,
)
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.order import Mixture, handed_out
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.ids import PeerId
from spes_p2p.peer.run_data import open_run_data
from tests.data.piece_makers import PIECE_BYTES, hand_over, make_feed

STAGES = ((25, 8, 2, 0), (60, 1, 1, 1), (0, 0, 1, 3))
SIZES = {"web": 4003, "code": 402, "math": 1205}
"""Bytes of each; of its own letter."""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A list of three datasets, whose ends are not those of sequences."""
    for name, size in SIZES.items():
        text = tmp_path / f"{name}.txt"
        text.write_text(name[0] * size)
        options = TokenizeOptions(processes=1, sequence_length=1, max_shard_bytes=1000)
        tokenize([str(text)], tmp_path / name, options)
    listed = tmp_path / "mix.txt"
    listed.write_text("# the datasets\n" + "\n".join(SIZES))
    return listed


def config_of(path: Path, *overrides: str) -> Config:
    small = [
        "data.sequence_length=10",
        "optimizer.batch_sequences=4",
        "data.held_out_fraction=0.01",
        f"data.path={path}",
    ]
    mix = f"data.mix={[list(stage) for stage in STAGES]}"
    return load_config(bundled_config("tiny"), [*small, mix, *overrides])


def dataset_of(tokens: np.ndarray) -> str:
    """By its letter."""
    return {ord(name[0]): name for name in SIZES}[int(tokens[0])]


def test_every_cycle_has_its_weights_and_no_index_is_left_out() -> None:
    mixture, positions = Mixture(STAGES), np.arange(200)
    datasets, indices = mixture.at(positions)
    counts = [0, 0, 0]
    for position, dataset, index in zip(positions, datasets, indices, strict=True):
        assert mixture.counts(int(position)) == counts
        assert index == counts[dataset]
        counts[dataset] += 1
    assert np.bincount(datasets[:10], minlength=3).tolist() == [8, 2, 0]
    assert np.bincount(datasets[25:28], minlength=3).tolist() == [1, 1, 1]
    assert np.bincount(datasets[60:64], minlength=3).tolist() == [0, 1, 3]
    shuffled = np.random.default_rng(0).permutation(positions)
    assert np.array_equal(mixture.at(shuffled)[0], datasets[shuffled])
    far = 10**15
    assert sum(mixture.counts(far)) == far


def test_a_mixture_reads_each_dataset_in_an_order_of_its_own(folders: Path) -> None:
    config = config_of(folders)
    dataset = open_dataset(config)
    batch = LeasedLoader(dataset, config, ((0, 60),)).next_batch(60)
    names = list(SIZES)
    expected = [names[number] for number in Mixture(STAGES).at(np.arange(60))[0]]
    assert [dataset_of(tokens) for tokens in batch.tokens] == expected
    assert all((tokens == tokens[0]).all() for tokens in batch.tokens)  # none has tokens of two
    held_out = next(iter(held_out_batches(dataset, config_of(folders, "optimizer.batch_sequences=8"), 8)))
    assert Counter(map(dataset_of, held_out.tokens)) == {"web": 4, "math": 1, "code": 1}


def test_an_epoch_of_each_dataset_has_each_sequence_once(folders: Path) -> None:
    config = config_of(folders, "data.mix=[[0, 10, 1, 3]]")
    dataset = open_dataset(config)
    loader = LeasedLoader(dataset, config, ((0, 1000),))
    chosen, (kinds, _) = loader._order.sequences_at(np.arange(1000)), Mixture(config.data.mix).at(np.arange(1000))
    first = 0
    for number, sequences in enumerate(loader._reader.sequences.training_of):
        epoch = chosen[kinds == number][:sequences]
        assert sorted(epoch) == list(range(first, first + sequences))
        first += sequences


def test_peers_come_and_go_and_nothing_is_lost_or_read_twice(folders: Path) -> None:
    """Whoever dies, and whoever takes over: all positions are used once, each with the tokens that it always has."""
    config, chance = config_of(folders), random.Random(1)
    dataset, leases, used, seen = open_dataset(config), Leases(), dict[PeerId, int](), dict[int, bytes]()
    alone = LeasedLoader(dataset, config, ((0, 10_000),))
    for _ in range(40):
        peers = [PeerId(name) for name in "abcdef" if chance.random() < 0.6]  # the others are gone without a word
        leases = next_leases(leases, used, peers, dict.fromkeys(peers, 8), 5)
        used = {}
        for peer, ranges in leases.held:
            loader = LeasedLoader(dataset, config, ranges)
            used[peer] = chance.randrange(0, min(9, loader.remaining() + 1))
            batch = loader.next_batch(used[peer])
            for position, tokens in zip(batch.positions.tolist(), batch.tokens, strict=True):
                assert position not in seen
                seen[position] = tokens.tobytes()
    leases = next_leases(leases, used, [], {}, 5)  # all give back what they have
    unused = {position for start, stop in leases.returned for position in range(start, stop)}
    assert unused | set(seen) == set(range(leases.cursor))
    assert not unused & set(seen)
    everything = alone.next_batch(leases.cursor)
    assert all(seen.get(at, row.tobytes()) == row.tobytes() for at, row in enumerate(everything.tokens))


def test_the_very_next_batch_after_a_resume(folders: Path) -> None:
    config = config_of(folders)
    dataset = open_dataset(config)
    loader = LeasedLoader(dataset, config, ((20, 70),))
    loader.next_batch(7)
    state, expected = loader.state_dict(), loader.next_batch(30)
    again = LeasedLoader(dataset, config)
    again.load_state_dict(state)
    assert np.array_equal(again.next_batch(30).tokens, expected.tokens)


def test_a_run_names_the_hash_of_each_dataset(folders: Path, tmp_path: Path) -> None:
    config = config_of(folders)
    dataset = open_dataset(config)
    pieces = FolderPieces.open(dataset, tmp_path / "own", print)
    published = with_datasets(config, dataset, pieces.catalogue)
    alone = [FolderPieces.open(Dataset.open(tmp_path / name), tmp_path / "other", print) for name in SIZES]
    assert published.data.datasets == tuple(
        (name, size + 1, one.dataset_hash.hex()) for (name, size), one in zip(SIZES.items(), alone, strict=True)
    )
    assert with_datasets(published, dataset, pieces.catalogue) == published
    check_datasets(pieces.catalogue, published)
    assert handed_out(published.data, 25) == dict(zip(SIZES, Mixture(STAGES).counts(25), strict=True))
    assert handed_out(config_of(folders, "data.mix=[]").data, 25) == {}
    name, tokens, _ = published.data.datasets[0]
    wrong = ((name, tokens, "0" * 64), *published.data.datasets[1:])
    other = published.model_copy(update={"data": published.data.model_copy(update={"datasets": wrong})})
    with pytest.raises(DataError, match="dataset web of the run has hash"):
        check_datasets(pieces.catalogue, other)
    with pytest.raises(ConfigError, match=r"data.datasets are not those that data.path lists"):
        with_datasets(other, dataset, pieces.catalogue)


def test_a_peer_that_knows_the_published_config_alone_reads_the_same_from_others(folders: Path, tmp_path: Path) -> None:
    config = config_of(folders)
    dataset = open_dataset(config)
    pieces = FolderPieces.open(dataset, tmp_path / "own", print, PIECE_BYTES)
    published = config_from_text(published_yaml(with_datasets(config, dataset, pieces.catalogue)))
    feed, _ = make_feed(tmp_path / "cache", pieces)
    theirs, ours = (LeasedLoader(one, published, ((15, 70),)) for one in (dataset, PieceDataset(feed)))
    assert 0 < hand_over(pieces, feed) < pieces.held
    assert np.array_equal(ours.next_batch(55).tokens, theirs.next_batch(55).tokens)
    spans = spans_of(PieceDataset(feed), published)
    starts = ours._reader.sequences.starts(ours._order.sequences_at(np.arange(spans.sequences)))
    assert set(spans.pieces(0)) == set(feed.grid.of_tokens(starts, 10))
    assert (starts < dataset.tokens).all()


def test_the_organiser_publishes_the_datasets_and_begins_the_same_run_again(folders: Path, tmp_path: Path) -> None:
    config, source = asyncio.run(open_run_data(config_of(folders), tmp_path / "node", None, print))
    again, _ = asyncio.run(open_run_data(config, tmp_path / "third", None, print))
    assert source is not None
    assert [name for name, _, _ in config.data.datasets] == list(SIZES)
    assert fingerprint(again) == fingerprint(config) != fingerprint(config_of(folders))


def test_weights_and_datasets_that_do_not_go_together_are_refused(folders: Path, tmp_path: Path) -> None:
    config = config_of(folders, "data.mix=[[0, 1, 2]]")
    with pytest.raises(ConfigError, match=r"data.mix has 2 weights, but data.path lists 3 datasets"):
        LeasedLoader(open_dataset(config), config)
    alone = config_of(tmp_path / "web")
    with pytest.raises(ConfigError, match="lists 0 datasets"):
        LeasedLoader(open_dataset(alone), alone)
    folders.write_text("web\nweb\n")
    with pytest.raises(DataError, match="two have the same name"):
        open_dataset(config)
    folders.write_text("web\ncode\n")
    other = tmp_path / "code" / "manifest.json"
    other.write_text(other.read_text().replace('"eos_id": 256', '"eos_id": 0'))  # tokenize --eos-token
    with pytest.raises(DataError, match=r"datasets web and code in .* were not made with the same tokenizer"):
        open_dataset(config)
    other.write_text(other.read_text().replace('"eos_id": 0', '"eos_id": 256'))
    long = config_of(folders, "data.mix=[[0, 1, 2]]", "data.sequence_length=500")
    with pytest.raises(DataError, match="dataset code of the mixture has not one training sequence"):
        LeasedLoader(open_dataset(long), long)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.mix=[[0]]", "no list of stages"),
        ("data.mix=[[5, 1]]", "no list of stages"),
        ("data.mix=[[]]", "no list of stages"),
        ("data.mix=[[9, 1], [5, 1], [0, 1]]", "no list of stages"),
        ("data.mix=[[9, 1, 1], [0, 1]]", "no list of stages"),
        (f"data.mix=[[{2**64}, 1], [0, 1]]", "no list of stages"),
        ("data.mix=[[0, 0, 0]]", "add up to nothing"),
        ("data.mix=[[0, 1000, 1]]", "more than 1000"),
    ],
)
def test_a_mix_that_says_nothing_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, override)
