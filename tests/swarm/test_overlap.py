"""Four real peers that train on while they sync, half of the columns at a time: exact, agreed, the bytes of `plan`.

In every run of the tests the same is shown in memory, in tests/sync/test_overlap.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spes_p2p.observe.events import Eval, Event, Round, Step
from spes_p2p.planning.traffic import Link, sync_costs
from tests import oracle
from tests.swarm.micro import MOST, Finished, dump_initial_state, recomputed_state, run_to_the_end

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
PEERS = ("p0", "p1", "p2", "p3")
ROUNDS = 8
STEPS = 6
AGREED = (
    "swarm.experts_per_peer=2", "sync.overlap=true", "sync.expert_rounds=2", f"sync.steps_per_round={STEPS}",
    "model.d_model=128", "model.num_layers=3", "model.num_heads=4", "model.expert_ffn=256", "sync.tile_values=32768",
    "swarm.heartbeat_seconds=3.0",
)  # fmt: skip
"""So many values, and so few heartbeats, that messages (130 KB a round and peer) are few bytes beside them."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Finished:
    folder = tmp_path_factory.mktemp("overlap")
    return run_to_the_end(folder, tokens, PEERS, ROUNDS, AGREED, ("eval.sequences=32",))


def test_every_sync_is_what_the_formulas_give(finished: Finished) -> None:
    dump_initial_state(finished.folder, finished.config, "p0")
    dumps = finished.folder / "dumps"
    assert oracle.check_dumps(dumps, finished.config.sync.tile_values, MOST) == list(range(ROUNDS + 1))


def test_all_peers_end_with_the_same_state(finished: Finished) -> None:
    hashes = {recomputed_state(finished.folder / name, finished.config) for name in PEERS}
    assert hashes == {(events[-1].round, events[-1].model_hash) for events in finished.of(Round).values()}
    assert len(hashes) == 1


def test_steps_are_made_while_rounds_are_synced(finished: Finished) -> None:
    """Between a peer's snapshot and the commit; who is always the last to hand in has little time for any."""
    ahead = {name: steps_ahead(seen) for name, seen in finished.seen.items()}
    assert sum(ahead.values()) >= MOST * ROUNDS * len(PEERS), ahead
    made = sum(step.tokens for steps in finished.of(Step).values() for step in steps)
    counted = {event.round: event.tokens for events in finished.of(Round).values() for event in events}
    assert made >= sum(counted.values()) > 0
    first, last = (
        statistics.mean(event.loss for events in finished.of(Eval).values() for event in events if event.round == round)
        for round in (0, ROUNDS)
    )
    assert last < first - 0.3


def test_the_bytes_are_those_that_plan_says(finished: Finished) -> None:
    """Of most rounds: on a busy machine a peer is late for one, and fetches what it missed while the next is made."""
    cost = sync_costs(finished.config, len(PEERS), 2, Link(), None)[0]
    events = [event for events in finished.of(Round).values() for event in events if event.round > 1]
    full = [[e for e in events if e.round == round and e.roster_size == len(PEERS)] for round in range(2, ROUNDS + 1)]
    told = [some for some in full if len(some) == len(PEERS)]
    halves = [[some for some in told if some[0].round % 2 == half] for half in (0, 1)]
    assert all(halves), [some[0].round for some in told]

    def usual(bytes_of: Callable[[Round], int]) -> float:
        """What a peer moves in a round, on average over peers and both turns of columns."""
        means = ([statistics.mean(map(bytes_of, some)) for some in half] for half in halves)
        return statistics.mean(map(statistics.median_low, means))

    assert usual(lambda event: event.bytes_sent) == pytest.approx(cost.bytes_up, rel=0.05)
    assert usual(lambda event: event.bytes_received) == pytest.approx(cost.bytes_down, rel=0.05)


def steps_ahead(seen: Sequence[tuple[float, Event]]) -> int:
    syncs = [(at - syncing_seconds(event), at) for at, event in seen if isinstance(event, Round)]
    steps = [at for at, event in seen if isinstance(event, Step)]
    return sum(begin < at < end for at in steps for begin, end in syncs)


def syncing_seconds(event: Round) -> float:
    """From a peer's snapshot to its commit."""
    return sum(seconds for phase, seconds in event.seconds.items() if phase != "train")
