"""Means in which some contributors lie: `sync.aggregate: clip`."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.weights import weighed
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.sync.clipping import FEWEST, OPPOSED, clipped_mean, opposed
from spes_p2p.sync.reduce import weighted_mean
from tests import oracle
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.pretend_peer import PretendWork
from tests.sync.swarm_cases import Recorder, check_agreement, commits, in_swarm, small_config
from tests.sync.test_driver import MERGES

SIZE = 500
BASE = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
SIGNAL = np.random.default_rng(1).standard_normal(SIZE)


def changes(number: int, noise: float = 0.7, seed: int = 2) -> NDArray[np.float64]:
    """What honest peers change: the same, and each something of its own."""
    return SIGNAL + noise * np.random.default_rng(seed).standard_normal((number, SIZE))


def named(rows: NDArray[np.float64]) -> dict[PeerId, Values]:
    return {PeerId(f"p{at}"): (BASE + row).astype(np.float32) for at, row in enumerate(rows)}


NOISE = np.random.default_rng(3).standard_normal(SIZE)
LIES = {
    "turned": -SIGNAL,
    "turned and large": -10 * SIGNAL,
    "noise": 10 * NOISE,
    "nothing": 0 * SIGNAL,
    "huge": 1e30 * NOISE,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("honest", [2, 4, 8])
def test_who_points_another_way_stays_out(lie: str, honest: int) -> None:
    liars = 1 if honest < 8 else 2
    values = named(np.concatenate([changes(honest), np.tile(LIES[lie], (liars, 1))]))
    assert opposed(values, BASE) == {PeerId(f"p{honest + at}"): OPPOSED for at in range(liars)}


@pytest.mark.parametrize("noise", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 32])
def test_honest_peers_stay_in_however_far_they_went(number: int, noise: float) -> None:
    far = changes(number, noise) * np.linspace(1, 50, number)[:, None]
    assert opposed(named(far), BASE) == {}


def test_of_two_nobody_can_say_who_lies() -> None:
    assert opposed(named(np.stack([SIGNAL, -SIGNAL])), BASE) == {}


def test_nobody_is_refused_where_nobody_changed_anything() -> None:
    assert opposed(named(np.zeros((4, SIZE))), BASE) == {}


@given(st.integers(FEWEST, 9), st.integers(0, 2**32), st.floats(0.1, 100), st.data())
def test_the_mean_is_centered_clipping_by_the_oracle(
    number: int, seed: int, largest: float, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 10**9), min_size=number, max_size=number))
    scales = np.geomspace(1, largest, number)[:, None]
    values = named(changes(number, seed=seed) * scales)
    flat = {str(peer): own.astype(np.float64) for peer, own in values.items()}
    weight_of = dict(zip(flat, weights, strict=True))
    expected = oracle.mean_of(flat, weight_of, flat, slice(0, SIZE), BASE.astype(np.float64))
    found = clipped_mean(list(values.values()), BASE, weights)
    assert np.max(np.abs(found - expected)) <= 1e-5 * max(1.0, float(np.max(np.abs(expected))))


def test_what_one_far_away_can_do_is_bounded_by_how_much_the_others_differ() -> None:
    honest = changes(8)
    radius = float(np.max(np.linalg.norm(honest - honest.mean(0), axis=1)))
    for name, lie in LIES.items():
        if name == "huge":
            continue  # `screen` refuses it
        values = list(named(np.concatenate([honest, lie[None]])).values())
        pulled = clipped_mean(values, BASE, [1] * 9) - (BASE + honest.mean(0))
        assert np.linalg.norm(pulled) < radius


def test_of_fewer_than_three_it_is_the_weighted_mean() -> None:
    values = list(named(changes(2)).values())
    assert np.array_equal(clipped_mean(values, BASE, [1, 3]), weighted_mean(values, [1, 3]))
    assert np.array_equal(clipped_mean(values[:1], BASE, [1]), values[0])


def test_the_mean_may_take_the_place_of_any_of_its_values() -> None:
    values = list(named(changes(4)).values())
    whole = clipped_mean(values, BASE, [1, 2, 3, 4])
    for at in range(4):
        copies = [value.copy() for value in values]
        assert clipped_mean(copies, BASE, [1, 2, 3, 4], copies[at]) is copies[at]
        assert copies[at].tobytes() == whole.tobytes()


def test_nobody_weighs_more_than_twice_the_median() -> None:
    roster = [Contribution(PeerId(name), tokens, steps, 0) for name, tokens, steps in
              (("a", 100, 10), ("b", 110, 11), ("c", 90, 9), ("d", 5000, 80))]  # fmt: skip
    assert weighed(roster, False) == tuple(roster)
    assert [(entry.tokens, entry.steps) for entry in weighed(roster, True)] == [
        (100, 10),
        (110, 11),
        (90, 9),
        (200, 20),
    ]
    assert weighed([], True) == ()


SETTINGS = {
    "plain": (),
    "turns": ("sync.expert_rounds=3",),
    "overlap": ("sync.overlap=true",),
    "nesterov": ("sync.outer=nesterov",),
    "int8": ("sync.codec=int8",),
    "ternary": ("sync.codec=ternary",),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["plain", "turns", "overlap", "nesterov"])
def test_every_round_is_what_the_oracle_computes(folder: Path, setting: str) -> None:
    """Shared weights of five, columns of up to four owners, one peer five times as fast as another."""
    config = small_config(
        *MERGES, "sync.aggregate=clip", "swarm.target_replicas=4", "swarm.experts_per_peer=3",
        *SETTINGS[setting], peers=5,
    )  # fmt: skip

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start_organiser()
        speeds = zip("abcde", (0.1, 0.1, 0.13, 0.2, 0.5), strict=True)
        await asyncio.gather(*(swarm.add(name, PretendWork(seconds)) for name, seconds in speeds))
        await swarm.until_round(6)
        recorder.check(commits(swarm))
        check_agreement(swarm)

    in_swarm(folder, play, config)


def alike(round: int, block: int, values: Values) -> Values:
    """What honest peers learn all, on top of what each learns alone."""
    return values + np.float32(0.5) * np.random.default_rng(block).standard_normal(values.shape, np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_that_lies_is_left_out_of_what_enough_others_train(folder: Path, setting: str) -> None:
    config = small_config(
        "sync.merge_alpha=0", "sync.aggregate=clip", "swarm.target_replicas=4", "swarm.experts_per_peer=3",
        *SETTINGS[setting], peers=5,
    )  # fmt: skip

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        liar = PretendWork(alter=lambda round, block, values: -values)
        works = [PretendWork(alter=alike) for _ in range(4)]
        await asyncio.gather(*(swarm.add(name, work) for name, work in zip("abcde", [*works, liar], strict=True)))
        await swarm.until_round(6)
        check_agreement(swarm)
        for parent, child in pairwise(commit.manifest for commit in commits(swarm)):
            for piece in child.slices:
                trained = set("abcde") if piece.block == 0 else set(parent.ownership[piece.block - 1])
                brought = trained & {entry.peer for entry in child.roster}
                size = sum(swarm.layout.tiles[at].size for at in piece.tile_ids)
                if len(brought) < FEWEST or size < 100:  # of a few values all directions are near each other
                    continue
                assert "e" not in piece.contributors or "e" not in brought
                assert len(set(piece.contributors)) >= len(brought - {"e"})

    in_swarm(folder, play, config)
