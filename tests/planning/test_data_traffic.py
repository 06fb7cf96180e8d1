"""Bytes of data by the formula, against pieces that are counted one by one, and the figures of docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.merkle import EMPTY_ROOT, HASH_BYTES
from spes_p2p.data.order import Order
from spes_p2p.data.pieces import CATALOGUE_VERSION, PIECE_BYTES, Catalogue, PieceGrid, ShardRoot
from spes_p2p.planning import data_traffic
from spes_p2p.planning.data_traffic import data_cost, fetched_share
from spes_p2p.planning.traffic import Link, sync_costs
from tests.planning.runs import run_named

SHARD_TOKENS = (2**28 - 128) // 2
BENCH = Path(__file__).parents[2] / "docs" / "performance.md"
ROWS = re.findall(r"^\| (\d+) KiB \| [\d.]+ \([\d.]+\) \| ([\d.]+) \(([\d.]+)\)", BENCH.read_text(), re.M)


def test_pieces_and_proofs_are_those_of_the_data() -> None:
    grid = PieceGrid(Catalogue(CATALOGUE_VERSION, "uint16", PIECE_BYTES, (ShardRoot(SHARD_TOKENS, EMPTY_ROOT),)))
    assert (PIECE_BYTES, grid.max_proof_bytes) == (data_traffic.PIECE_BYTES, data_traffic.PROOF_BYTES)
    assert data_traffic.PROOF_BYTES % HASH_BYTES == 0


@pytest.mark.parametrize("peers", [1, 3, 16])
@pytest.mark.parametrize("length", [300, 2000, 5000])
def test_the_formula_is_what_an_epoch_needs(peers: int, length: int) -> None:
    """One peer's part of an epoch in the run's own order; each piece that it needs is fetched once."""
    shards = tuple(ShardRoot(250_007, EMPTY_ROOT) for _ in range(160))
    grid = PieceGrid(Catalogue(CATALOGUE_VERSION, "uint16", PIECE_BYTES, shards))
    order = Order(grid.tokens // length, seed=0)
    mine = order.sequences_at(np.arange(order.sequences // peers, dtype=np.int64))
    fetched = len(grid.of_tokens(mine * length, length)) * (PIECE_BYTES + data_traffic.PROOF_BYTES)
    counted = fetched / (len(mine) * length * 2)
    assert counted == pytest.approx(fetched_share(peers, 1 + PIECE_BYTES / (2 * length)), rel=0.04)


@pytest.mark.parametrize(("kib", "first", "epoch"), ROWS)
def test_the_measured_table_says_the_same(kib: str, first: str, epoch: str) -> None:
    together = 1 + PIECE_BYTES / (1024 * int(kib))
    assert fetched_share(None, together) == pytest.approx(float(first), rel=0.03)
    assert fetched_share(1, together) == pytest.approx(float(epoch), abs=0.006)


def test_all_rows_of_the_table_are_looked_at() -> None:
    assert len(ROWS) == 3


def test_a_day_and_what_holders_serve() -> None:
    config = run_named("spes-7b")
    sync = sync_costs(config, 4, 8, Link(2.5e6, 12.5e6), 1000.0)[0]
    cost, timeless = data_cost(config, 4, 1000.0, sync), data_cost(config, 4, None, sync)
    assert cost is not None
    assert timeless is not None
    assert sync.share is not None
    token_bytes = 2 if config.model.vocab_size <= 2**16 else 4
    day = cost.per_day(cost.round_bytes)
    assert day == pytest.approx(1000 * token_bytes * 86_400 * cost.per_trained_byte * (1 - sync.share))
    assert cost.served_bytes == 4 * cost.round_bytes > cost.least_served_bytes
    assert timeless.per_day(1.0) is None


def test_what_is_not_kept_costs_more_and_own_data_nothing() -> None:
    sync = sync_costs(run_named("small"), 4, 2, Link(), None)[0]
    cost = data_cost(run_named("small", "data.copies=0"), 4, None, sync)
    assert cost is not None
    assert cost.per_trained_byte < cost.most_per_trained_byte
    assert data_cost(run_named("small", "data.source=local"), 4, None, sync) is None


def test_copies_for_others_are_counted() -> None:
    """A dataset that fits comes as a whole to each of 8 peers; of another one each takes 3/8, and what it trains on."""
    sync = sync_costs(run_named("small"), 8, 2, Link(), None)[0]
    with_copies, alone = (data_cost(run_named("small", f"data.copies={copies}"), 8, None, sync) for copies in (3, 0))
    assert with_copies is not None
    assert alone is not None
    assert with_copies.per_trained_byte == pytest.approx(8 * fetched_share(1, 1.0))
    assert with_copies.most_per_trained_byte == pytest.approx(alone.most_per_trained_byte * (3 + 5 / 8))
