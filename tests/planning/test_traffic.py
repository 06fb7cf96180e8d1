"""Bytes of a round: the formula against the very plan that peers follow, and the figures of the design."""

from __future__ import annotations

import pytest

from spes_p2p.consensus.slices import plan_slices
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.ownership.assign import OwnershipRequest, assign, nobody
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import Link, Spread, round_traffic, stored_bytes, sync_costs
from tests.planning.runs import run_named

TILES = 120
"""Tiles of each block, which every number of peers in the cases divides; a tile stands for a value."""


def planned(peers: int, experts: int, replicas: int) -> list[tuple[int, int]]:
    """(sent, received) of each peer in tiles, counted slice by slice; columns are dealt in turn."""
    roster = [PeerId(f"peer-{index}") for index in range(peers)]
    owners = tuple(tuple(sorted(roster[(column + r) % peers] for r in range(replicas))) for column in range(experts))
    sent, received = dict.fromkeys(roster, 0), dict.fromkeys(roster, 0)
    for piece in plan_slices(roster, owners, {}, [TILES] * (1 + experts), slice_tiles=16):
        for peer in roster:
            if peer != piece.reducer:
                received[peer] += piece.tiles  # what is handed out
        sent[piece.reducer] += piece.tiles * (peers - 1)
        for peer in piece.contributors:
            if peer != piece.reducer:
                sent[peer] += piece.tiles
        received[piece.reducer] += piece.tiles * (len(piece.contributors) - 1)
    return [(sent[peer], received[peer]) for peer in roster]


def sizes(experts: int) -> Sizes:
    """Shared parameters and each column of TILES values."""
    return Sizes(
        embedding=0, attention=TILES, router=0, norms=0, expert=1, column=TILES, num_experts=experts, top_k=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("peers", "experts", "replicas"), [(1, 4, 1), (2, 2, 1), (4, 8, 1), (4, 8, 2), (4, 4, 4), (5, 5, 3), (6, 12, 2)]
)
def test_the_formula_is_what_the_plan_moves(peers: int, experts: int, replicas: int) -> None:
    owned = experts * replicas // peers
    traffic = round_traffic(sizes(experts), Spread.of(experts, peers, owned, owned, replicas))
    counted = planned(peers, experts, replicas)
    assert sum(sent for sent, _ in counted) == pytest.approx(peers * traffic.up.values)
    assert sum(received for _, received in counted) == pytest.approx(peers * traffic.down.values)
    for sent, received in counted:  # tiles are dealt whole
        assert sent == pytest.approx(traffic.up.values, rel=0.15)
        assert received == pytest.approx(traffic.down.values, rel=0.15)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_column_has_more_owners_than_the_run_asks_for(replicas: int) -> None:
    """Sixteen peers with room for four owners a column: who owns what is agreed by `assign`."""
    wishes = {PeerId(f"peer-{index:02d}"): OwnershipRequest(2) for index in range(16)}
    owners = assign(nobody(8), wishes, replicas)
    assert {len(peers) for peers in owners} == {replicas}
    spread = Spread.in_run(run_named("small", f"swarm.target_replicas={replicas}"), peers=16, owned=2)
    assert (spread.replicas, spread.covered) == (replicas, 8)
    traffic, counted = round_traffic(sizes(8), spread), planned(16, 8, replicas)
    assert sum(sent for sent, _ in counted) == pytest.approx(16 * traffic.up.values)
    assert sum(received for _, received in counted) == pytest.approx(16 * traffic.down.values)


def test_columns_that_nobody_owns_do_not_travel() -> None:
    one_each = round_traffic(sizes(8), Spread.of(8, peers=2, owned=1, owned_by_others=1, most_replicas=1))
    assert (one_each.up.values, one_each.down.values) == (2 * TILES, 2 * TILES)


def test_the_7b_run_moves_what_the_design_says() -> None:
    """6.2e9 values each way on 4 peers, 24.7 GB in fp32; 2.5e9 with experts every 4th round; 8.4e9 at 1,000 peers."""
    seven = Sizes.of(run_named("spes-7b").model)
    four = Spread.of(32, peers=4, owned=8, owned_by_others=8, most_replicas=1)
    traffic = round_traffic(seven, four)
    assert traffic.up.values == pytest.approx(traffic.down.values) == pytest.approx(6.2e9, rel=0.01)
    assert traffic.up.bytes_in("fp32") / 1e9 == pytest.approx(24.7, abs=0.05)
    assert round_traffic(seven, four, expert_rounds=4).up.values == pytest.approx(2.5e9, rel=0.02)
    many = round_traffic(seven, Spread(peers=1000, owned=32 / 1000, replicas=1, covered=32))
    assert many.down.values == pytest.approx(many.up.values)
    assert 8.0e9 < many.down.values < 8.5e9


def test_time_and_share_on_a_link() -> None:
    config = run_named("spes-7b")
    cost = sync_costs(config, 4, 8, Link(up=2.5e6, down=12.5e6), tokens_per_second=20_000)[0]
    seconds = 24.67e9 / 2.5e6  # the uplink is the tighter one
    training = 100 * 1024 * 2048 / 20_000
    assert cost.codec == "fp32"
    assert cost.seconds == pytest.approx(seconds, rel=0.001)
    assert cost.share == pytest.approx(seconds / (seconds + training), rel=0.001)
    assert cost.bytes_per_day == pytest.approx(2 * 24.67e9 * 86400 / (seconds + training), rel=0.001)


def test_overlap_hides_as_much_of_a_sync_as_its_steps_take() -> None:
    link, training = Link(up=1.25e6, down=12.5e6), 100 * 1024 * 2048 / 20_000
    part = sync_costs(run_named("spes-7b", "sync.overlap=true"), 4, 8, link, 20_000)
    whole = sync_costs(run_named("spes-7b", "sync.overlap=true", "sync.codec=int8"), 4, 8, link, 20_000)
    waits = 24.67e9 / 1.25e6 - training
    assert waits > 0
    assert part[0].share == pytest.approx(waits / (waits + training), rel=0.001)
    assert whole[0].seconds is not None
    assert 0 < whole[0].seconds < training
    assert whole[0].share == 0


def test_vocabulary_that_is_averaged_seldom_saves_its_share() -> None:
    config = run_named("spes-7b")
    whole, seldom = (
        sync_costs(run_named("spes-7b", *more), 4, 8, Link(), None)[0] for more in ((), ("sync.vocabulary_rounds=5",))
    )
    vocabulary = 2 * config.model.embedding_rows * config.model.d_model
    assert whole.bytes_up - seldom.bytes_up == pytest.approx(4 * 2 * 3 / 4 * vocabulary * 4 / 5)


def test_what_is_not_known_is_not_made_up() -> None:
    cost = sync_costs(run_named("tiny"), 3, 2, Link(), tokens_per_second=None)[0]
    assert (cost.seconds, cost.share, cost.bytes_per_day) == (None, None, None)


def test_an_outer_optimizer_makes_states_larger_and_rounds_not() -> None:
    plain, stepped = run_named("spes-7b"), run_named("spes-7b", "sync.outer=nesterov")
    assert sync_costs(stepped, 4, 8, Link(), None) == sync_costs(plain, 4, 8, Link(), None)
    assert stored_bytes(plain) == 4 * state_layout(plain).num_values
    assert stored_bytes(stepped) == 4 * state_layout(stepped).num_values == 2 * stored_bytes(plain)


def test_what_is_configured_comes_first_and_then_every_codec() -> None:
    plain = sync_costs(run_named("spes-7b"), 4, 8, Link(), None)
    assert [cost.codec for cost in plain] == ["fp32", "bf16", "int8", "int4", "ternary"]
    shares = [round(cost.bytes_up / plain[0].bytes_up, 3) for cost in plain]
    assert shares == [1.0, 0.5, 0.254, 0.141, 0.054]
    mixed = sync_costs(run_named("spes-7b", "sync.codec=int8", "sync.expert_codec=int4"), 4, 8, Link(), None)
    assert mixed[0].codec == "int8, experts int4"
    assert plain[3].bytes_up < mixed[0].bytes_up < plain[2].bytes_up
