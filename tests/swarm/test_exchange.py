"""Four real peers: every round is what the formulas give, and without the exchange their models are worse."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from spes_p2p.observe.events import Eval, Round
from tests import oracle
from tests.swarm.micro import MOST, Finished, dump_initial_state, recomputed_state, run_to_the_end

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
PEERS = ("p0", "p1", "p2", "p3")
ROUNDS = 5
OWN_TWO = ("swarm.experts_per_peer=2", "sync.steps_per_round=30", "sync.merge_interval=60")
SURE = ("eval.sequences=64",)
"""Enough held-out text to tell models of 150 steps apart."""


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Finished:
    return run_to_the_end(tmp_path_factory.mktemp("exchanged"), tokens, PEERS, ROUNDS, OWN_TWO, SURE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Finished:
    """The same peers without any exchange."""
    folder = tmp_path_factory.mktemp("alone")
    return run_to_the_end(folder, tokens, PEERS, ROUNDS, (*OWN_TWO, "sync.enabled=false"), SURE)


def test_every_round_is_what_the_formulas_give(exchanged: Finished) -> None:
    dump_initial_state(exchanged.folder, exchanged.config, "p0")
    dumps = exchanged.folder / "dumps"
    assert oracle.check_dumps(dumps, exchanged.config.sync.tile_values, MOST) == list(range(ROUNDS + 1))
    rounds = oracle.read_dumps(dumps)
    about = [next(iter(rounds[round].values())).about for round in range(1, ROUNDS + 1)]
    assert sum(one["merge_alpha"] > 0 for one in about) >= 2
    full = [one for one in about if len(one["roster"]) == len(PEERS)]  # a busy machine may make a peer late for some
    assert full
    assert all(len(one["slices"]) > 10 for one in full)


def test_what_goes_into_a_round_was_trained(exchanged: Finished) -> None:
    """Shared parameters and owned columns, each tensor of them, differ from the state that the round began with."""
    rounds = oracle.read_dumps(exchanged.folder / "dumps")
    for round in range(2, ROUNDS + 1):
        committed = next(iter(rounds[round - 1].values())).after
        owned = {entry["peer_id"]: set(entry["owned"]) for entry in next(iter(rounds[round].values())).about["roster"]}
        assert owned
        for peer, columns in owned.items():
            dump = rounds[round][peer]
            assert {block - 1 for block in map(oracle.block_of, dump.before) if block} == columns
            unchanged = [name for name, value in dump.before.items() if np.array_equal(value, committed[name])]
            assert not unchanged, f"round {round}, {peer}: {unchanged}"


def test_all_peers_end_with_the_same_state(exchanged: Finished) -> None:
    hashes = {recomputed_state(exchanged.folder / name, exchanged.config) for name in PEERS}
    said = {(event.round, event.model_hash) for events in exchanged.of(Round).values() for event in events[-1:]}
    assert hashes == said
    assert len(hashes) == 1


def test_without_exchange_the_model_is_worse(exchanged: Finished, alone: Finished) -> None:
    """Of as many tokens: rounds end by the clock, so the loss with exchange is taken between two of its rounds."""
    trained, evaluated = counted_tokens(exchanged), losses(exchanged)
    rounds = sorted(evaluated)
    together = np.interp(
        counted_tokens(alone)[ROUNDS], [trained[round] for round in rounds], [evaluated[round][0] for round in rounds]
    )
    apart = losses(alone)[ROUNDS]
    assert len(apart) == len(PEERS)
    assert np.mean(apart) > together


def test_without_exchange_every_peer_has_a_model_of_its_own(alone: Finished) -> None:
    models = {load_shared(alone.folder / "dumps" / name / f"round-{ROUNDS:06d}").tobytes() for name in PEERS}
    assert len(models) == len(PEERS)
    # nothing was committed but the count of tokens: the agreed state is still the initial one
    assert {recomputed_state(alone.folder / name, alone.config)[1] for name in PEERS} == {initial_hash(alone)}


def losses(run: Finished) -> dict[int, list[float]]:
    """The held-out losses of each round that was evaluated, by whoever did."""
    evals = [event for events in run.of(Eval).values() for event in events]
    return {round: [event.loss for event in evals if event.round == round] for round in {e.round for e in evals}}


def counted_tokens(run: Finished) -> dict[int, int]:
    """What all rounds up to each had counted."""
    of_round = {event.round: event.tokens for events in run.of(Round).values() for event in events}
    rounds = sorted(of_round)
    return {0: 0} | dict(zip(rounds, accumulate(of_round[round] for round in rounds), strict=True))


def load_shared(folder: Path) -> NDArray[np.float32]:
    before = load_file(folder / "before.safetensors")
    shared = [before[name].reshape(-1) for name in sorted(before) if oracle.block_of(name) == 0]
    return np.concatenate(shared)


def initial_hash(run: Finished) -> str:
    return run.of(Round)["p0"][-1].model_hash
