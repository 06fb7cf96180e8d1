"""Batches for the inner steps of one peer, resumable to the very next sequence.

`LeasedLoader` reads the positions that the run leased to this peer, `LocalLoader` an endless order of the peer's own;
`train/step.py` gives each rank of the peer its share. Sequences are `sequence_length` tokens, the shift to targets
happens in the model. The next batch is read on a thread while one is trained on. It leaves out who leases what
(`leases.py`) and moving tokens to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.data.copies import Spans
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.leases import Ranges, count, take
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.memmap import TokenSequences, count_sequences
from spes_p2p.data.order import MixedOrder, Order
from spes_p2p.data.pieces import Catalogue, hashes_of_parts
from spes_p2p.errors import CheckpointError, ConfigError, DataError, DataNotReady, LocalProtocolError, PermanentError
from spes_p2p.ids import PeerId, short

AnyDataset = Dataset | PieceDataset
"""On this machine, or coming from other peers piece by piece."""
RUN_STREAM = "run"
MOST_AHEAD = 2**18
"""Sequences that are fetched ahead; a lease is about two rounds of them."""


@dataclass(frozen=True)
class Batch:
    """What a peer trains on in one inner step."""

    tokens: NDArray[np.int64]
    """[B, S]"""
    loss_mask: NDArray[np.bool_]
    """[B]; False: this sequence gives no loss."""
    positions: NDArray[np.int64]
    """[B]; stream positions (for held-out batches: sequence numbers)."""

    def first(self, sequences: int) -> Batch:
        """Its first sequences."""
        return Batch(self.tokens[:sequences], self.loss_mask[:sequences], self.positions[:sequences])


def open_dataset(config: Config) -> Dataset:
    """The dataset at `data.path`. Raises DataError where it is damaged or its ids are not those of the config."""
    if not config.data.path:
        raise PermanentError(
            "no training data was given, and with data.source=local none comes from other peers",
            fix="give a folder of token shards, as spes-p2p tokenize makes it: --data DIR",
        )
    dataset = Dataset.open(config.data.path, config.data.raw_dtype, config.model.vocab_size)
    check_vocabulary(dataset, config)
    return dataset


def check_vocabulary(dataset: Dataset, config: Config) -> None:
    """Raises DataError where its ids do not fit `model.vocab_size`, or its documents end with another token."""
    if dataset.vocab_size is not None and dataset.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the dataset was made with tokenizer {dataset.tokenizer!r} of {dataset.vocab_size} ids, "
            f"but model.vocab_size is {config.model.vocab_size}",
            fix=f"set model.vocab_size to {dataset.vocab_size}, or tokenize with the run's tokenizer",
        )
    end = config.model.document_end
    if end is not None and dataset.eos_id not in (None, end):
        raise DataError(
            f"model.document_end is {end}, but the documents of the dataset end with token {dataset.eos_id}",
            fix=f"set model.document_end to {dataset.eos_id}, or tokenize with the run's tokenizer",
        )


def check_enough(tokens: int, config: Config) -> None:
    """Raises DataError where the run's first round would use more training sequences than a dataset of `tokens` has."""
    length, peers = config.data.sequence_length, config.swarm.min_peers
    steps = steps_per_round_at(config, 0)
    batch = config.optimizer.batch_sequences
    training = count_sequences(tokens, length, config.data.held_out_fraction)[0]
    if training < peers * steps * batch:
        raise DataError(
            f"the dataset's {tokens:,} tokens give {training:,} training sequences of {length} tokens, but a round "
            f"needs {peers * steps * batch:,} (swarm.min_peers {peers} x {steps} steps x {batch} sequences)",
            fix="tokenize more text, or lower sync.steps_per_round, optimizer.batch_sequences or data.sequence_length",
        )


class _Reader:
    """Sequence numbers to checked batches."""

    def __init__(self, dataset: AnyDataset, config: Config) -> None:
        data = config.data
        self.sequences = _sequences(dataset, config)
        self._mask_repetitions = data.mask_repetitions
        self._vocab_size = config.model.vocab_size

    def batch(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> Batch:
        tokens = self.sequences.read(sequences)
        if tokens.size and (largest := int(tokens.max())) >= self._vocab_size:
            row = int(tokens.max(axis=1).argmax())
            raise DataError(
                f"sequence {sequences[row]} holds token {largest}, but model.vocab_size is {self._vocab_size}",
                fix="tokenize with the run's tokenizer, or check data.raw_dtype",
            )
        repeated = has_repetition(tokens) if self._mask_repetitions else np.zeros(len(tokens), dtype=bool)
        return Batch(tokens, ~repeated, positions)


class _Loader:
    """What both loaders share: an order of the training sequences."""

    def __init__(self, dataset: AnyDataset, config: Config, stream: str) -> None:
        self._reader = _Reader(dataset, config)
        training, batch = self._reader.sequences.training, config.optimizer.batch_sequences
        if training < batch:
            raise DataError(
                f"the dataset's {dataset.tokens} tokens are {training} training sequences of "
                f"{config.data.sequence_length} tokens, fewer than one batch ({batch})",
                fix="use more data, a smaller optimizer.batch_sequences or a smaller data.sequence_length",
            )
        self._order = _order(dataset, self._reader.sequences, config, stream)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self.put: Callable[[Batch], Batch] = lambda batch: batch
        """Where a batch that is read ahead lies, by the thread that reads: pinned for a GPU (`train.step.pinned`)."""
        self._ahead: tuple[NDArray[np.int64], Future[Batch]] | None = None
        """Positions of the batch that is being read ahead."""

    def _batch(self, positions: NDArray[np.int64]) -> Batch:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.array_equal(ahead[0], positions):
            with suppress(DataNotReady):  # it may have come since
                return ahead[1].result()
        return self._read(positions)

    def _read_ahead(self, positions: NDArray[np.int64]) -> None:
        """On a thread, while the batch before is trained on; of no use where another one is asked for next."""
        self._ahead = positions, self._thread.submit(lambda: self.put(self._read(positions)))

    def _read(self, positions: NDArray[np.int64]) -> Batch:
        return self._reader.batch(self._order.sequences_at(positions), positions)


class LeasedLoader(_Loader):
    """Batches from the positions that are leased to this peer, in the order of its ranges."""

    def __init__(self, dataset: AnyDataset, config: Config, ranges: Ranges = ()) -> None:
        super().__init__(dataset, config, RUN_STREAM)
        self.ranges = ranges
        """What this peer holds by the newest certificate."""
        self.consumed = 0
        """Sequences at the front of the held ranges that were handed out by `next_batch`."""
        self._need_rest()

    def remaining(self) -> int:
        """Leased sequences that `next_batch` has not handed out yet."""
        return count(self.ranges) - self.consumed

    def next_batch(self, sequences: int) -> Batch:
        """The next `sequences` leased sequences.

        Raises LocalProtocolError when fewer remain (ask `remaining` first; who runs out waits for the next commit).
        """
        if sequences > self.remaining():
            raise LocalProtocolError(
                f"a batch of {sequences} sequences was asked for, but only {self.remaining()} are leased"
            )
        batch = self._batch(self._next_positions(sequences))
        self.consumed += sequences
        if self._reader.sequences.is_tight:
            self._need_rest()
        if sequences <= self.remaining():
            self._read_ahead(self._next_positions(sequences))
        return batch

    def wait_for_data(self, sequences: int, should_stop: Callable[[], bool]) -> bool:
        """Until the tokens of the next batch are on this machine; False where `should_stop` said so first."""
        if sequences > self.remaining() or not self._reader.sequences.come_from_others:
            return True
        wanted = self._order.sequences_at(self._next_positions(sequences))
        return self._reader.sequences.wait(wanted, should_stop)

    def _next_positions(self, sequences: int) -> NDArray[np.int64]:
        taken, _ = take(take(self.ranges, self.consumed)[1], sequences)
        return _positions(taken)

    def _need_rest(self) -> None:
        """What is leased and not read yet should be fetched, where data comes from others."""
        if self._reader.sequences.come_from_others:
            unread = take(take(self.ranges, self.consumed)[1], MOST_AHEAD)[0]
            self._reader.sequences.need(self._order.sequences_at(_positions(unread)))

    def use(self, ranges: Ranges, consumed: int) -> None:
        """Goes on with what a new certificate says that this peer holds, after the first `consumed` positions of it."""
        self.ranges, self.consumed = ranges, consumed
        self._need_rest()

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": [list(span) for span in self.ranges], "offset": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The very next batch is the one that would have come after `state_dict`. Raises CheckpointError."""
        try:
            ranges, offset = tuple((int(start), int(stop)) for start, stop in state["ranges"]), int(state["offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged_state(error) from error
        self.use(ranges, offset)


class LocalLoader(_Loader):
    """Batches from the peer's own data, without leases: its own order, epoch after epoch."""

    def __init__(self, dataset: AnyDataset, config: Config, peer: PeerId) -> None:
        super().__init__(dataset, config, f"local/{peer}")
        self._position = 0

    def next_batch(self, sequences: int) -> Batch:
        """The next `sequences` sequences."""
        start, self._position = self._position, self._position + sequences
        batch = self._batch(np.arange(start, self._position))
        self._read_ahead(np.arange(self._position, self._position + sequences))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The very next batch is the one that would have come after `state_dict`. Raises CheckpointError."""
        try:
            self._position = int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged_state(error) from error


def held_out_batches(
    dataset: AnyDataset, config: Config, max_sequences: int, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Batch]:
    """At most `max_sequences` held-out sequences, spread evenly, in batches of `optimizer.micro_batch_sequences`.

    The same at every peer with the same dataset; nothing where nothing is held out. Raises DataNotReady where data that
    comes from others is not here when `should_stop` says so.
    """
    reader = _Reader(dataset, config)
    chosen = _held_out(reader.sequences, max_sequences)
    size = config.optimizer.micro_batch_sequences
    for start in range(0, len(chosen), size):
        sequences = chosen[start : start + size]
        if not reader.sequences.wait(sequences, should_stop):
            raise DataNotReady(f"{len(chosen) - start} held-out sequences have not arrived yet")
        yield reader.batch(sequences, sequences)


def need_held_out(dataset: AnyDataset, config: Config, max_sequences: int) -> None:
    """Those of `held_out_batches` should be fetched, and stay, where data comes from others.

    Replaces what was needed before.
    """
    sequences = _Reader(dataset, config).sequences
    sequences.need(_held_out(sequences, max_sequences), always=True)


def _held_out(sequences: TokenSequences, most: int) -> NDArray[np.int64]:
    chosen = min(sequences.held_out, most)
    return sequences.training + np.arange(chosen, dtype=np.int64) * sequences.held_out // max(chosen, 1)


def _parts(dataset: AnyDataset, config: Config) -> list[tuple[str, int]]:
    """Name and tokens of each dataset of a mixture; none where nothing is mixed."""
    data = config.data
    if not data.mix:
        return []
    found = [(name, tokens) for name, tokens, _ in data.datasets]
    if not found and isinstance(dataset, Dataset):
        found = list(dataset.tokens_of_parts())
    if len(found) != len(data.mix[0]) - 1:
        raise ConfigError(
            f"data.mix has {len(data.mix[0]) - 1} weights, but data.path lists {len(found)} datasets",
            fix="let data.path name a text file with a line for each weight: a folder of token shards",
        )
    return found


def with_datasets(config: Config, dataset: Dataset, catalogue: Catalogue) -> Config:
    """The config that is published: it names the datasets of a mixture. Raises ConfigError for others than it names."""
    parts = _parts(dataset, config)
    hashes = hashes_of_parts(catalogue, [tokens for _, tokens in parts]) if parts else []
    found = tuple((name, tokens, one.hex()) for (name, tokens), one in zip(parts, hashes, strict=True))
    if config.data.datasets not in ((), found):
        raise ConfigError("data.datasets are not those that data.path lists", fix="leave it out: bootstrap fills it in")
    return config.model_copy(update={"data": config.data.model_copy(update={"datasets": found})})


def check_datasets(catalogue: Catalogue, config: Config) -> None:
    """Raises DataError where a run's data is not made of the datasets that its config names."""
    named = config.data.datasets
    hashes = hashes_of_parts(catalogue, [tokens for _, tokens, _ in named]) if named else []
    for (name, _, wanted), found in zip(named, hashes, strict=True):
        if found.hex() != wanted:
            raise DataError(
                f"dataset {name} of the run has hash {short(found)}, but its config says {wanted[:10]}",
                fix="ask the organiser: the run was begun with other data",
            )


def _sequences(dataset: AnyDataset, config: Config) -> TokenSequences:
    data = config.data
    parts = [tokens for _, tokens in _parts(dataset, config)]
    return TokenSequences(dataset, data.sequence_length, data.held_out_fraction, parts)


def _order(dataset: AnyDataset, sequences: TokenSequences, config: Config, stream: str) -> Order | MixedOrder:
    if not config.data.mix:
        return Order(sequences.training, config.run.seed, stream)
    names = [name for name, _ in _parts(dataset, config)]
    return MixedOrder(config.data.mix, names, sequences.training_of, config.run.seed, stream)


def spans_of(dataset: PieceDataset, config: Config) -> Spans:
    """The run's stream of sequences in spans. Raises ValueError where not one sequence is trained on."""
    sequences = _sequences(dataset, config)
    return Spans(dataset.feed.grid, _order(dataset, sequences, config, RUN_STREAM), sequences)


def _positions(ranges: Ranges) -> NDArray[np.int64]:
    return np.concatenate([np.arange(*span, dtype=np.int64) for span in ranges] or [np.empty(0, np.int64)])


def _damaged_state(error: Exception) -> CheckpointError:
    return CheckpointError(f"the saved data position is damaged: {error!r}", fix="resume from an older checkpoint")


MAX_PERIOD = 13
MIN_REPEATS = 32
_STRIDE = 8


def has_repetition(
    tokens: NDArray[np.integer], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS
) -> NDArray[np.bool_]:
    """Which rows of `tokens` [B, S] repeat 1 to `max_period` tokens `min_repeats` times on end -> bool [B].

    Log spam and tables of zeros spoil training; the published SPES configs leave them out of the loss in this way.
    A pattern of period p repeats r times where token[i] == token[i + p] holds for p * (r - 1) neighbouring i.
    """
    found = np.zeros(len(tokens), dtype=bool)
    for period in range(1, max_period + 1):
        run = period * (min_repeats - 1)
        if run + period > tokens.shape[1]:
            break
        rows = np.flatnonzero(~found & _may_have_run(tokens, period, run))
        if len(rows):
            found[rows] = _has_run(tokens[rows, period:] == tokens[rows, :-period], run)
    return found


def _may_have_run(tokens: NDArray[np.integer], period: int, run: int) -> NDArray[np.bool_]:
    """False where a look at every eighth token shows that there is no such run: real text is done with after this.

    A run of 24 or more covers three neighbouring multiples of eight.
    """
    if run < 3 * _STRIDE:
        return np.ones(len(tokens), dtype=bool)
    same = tokens[:, period::_STRIDE] == tokens[:, :-period:_STRIDE]
    return np.any(same[:, :-2] & same[:, 1:-1] & same[:, 2:], axis=1, keepdims=True)[:, 0]


def _has_run(flags: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Which rows of `flags` [B, N] are true at `length` neighbours; the window doubles, so log2(length) passes."""
    window = 1
    while window < length:
        step = min(window, length - window)
        flags = flags[:, :-step] & flags[:, step:]
        window += step
    return np.any(flags, axis=1, keepdims=True)[:, 0]
