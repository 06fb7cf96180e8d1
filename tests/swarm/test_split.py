"""A network that falls apart and comes together again, for real: peers in network namespaces, the cable pulled.

Needs the right to make network namespaces (root, and `ip` of iproute2); everywhere else the same story is told on the
in-memory network by tests/sync/test_splits.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.observe.events import Round
from spes_p2p.sync.chain import Chain
from tests.simulation.faults import SLOW, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, local_swarm
from tests.swarm.namespaces import TwoHalves, may_make_namespaces

NAMES = ("p0", "p1", "p2", "p3")
STAY, CUT_OFF = NAMES[:3], NAMES[3]
OVERRIDES = ("swarm.min_peers=4", "sync.steps_per_round=20", "sync.merge_interval=40")
SLOW_STEPS = Fault(failpoints.INNER_STEP, SLOW, times=0, factor=8.0)
"""A round takes seconds, most of them slept: time enough to notice a cut within one."""
COMPLETE_SECONDS = 180.0


pytestmark = [
    pytest.mark.swarm,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2 to make network namespaces"),
]


@contextmanager
def divided_swarm(folder: Path) -> Iterator[tuple[FaultySwarm, TwoHalves]]:
    with ExitStack() as stack:
        halves = TwoHalves(stack)
        hosts = {name: halves.host(name, "left", f"11.0.0.{11 + at}") for at, name in enumerate(STAY)}
        hosts["bootstrap"] = halves.host("bootstrap", "left", "11.0.0.10")
        hosts[CUT_OFF] = halves.host(CUT_OFF, "right", "11.0.0.20")
        with local_swarm(folder, hosts) as swarm:
            yield swarm, halves


def newest(swarm: FaultySwarm, name: str) -> int:
    return max((event.round for event in swarm.processes[name].rounds()), default=0)


def rounds_since(swarm: FaultySwarm, name: str, seen: int) -> list[Round]:
    return swarm.processes[name].rounds()[seen:]


def test_a_cable_is_pulled_and_plugged_in_again(tmp_path: Path, tokens: Path) -> None:
    """The majority commits on, the one cut off goes on alone; then its history gives way and it trains with all."""
    with divided_swarm(tmp_path) as (swarm, halves):
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES])
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL, faults=[SLOW_STEPS])
        swarm.wait_for_round(2, NAMES, COMPLETE_SECONDS)
        halves.pull()
        cut_at = newest(swarm, "p0")

        def alone() -> bool:
            return any(event.commit == "degraded" for event in swarm.processes[CUT_OFF].rounds())

        swarm.wait_until(alone, "a degraded commit", NAMES, COMPLETE_SECONDS)
        swarm.wait_for_round(newest(swarm, CUT_OFF) + 1, [CUT_OFF], COMPLETE_SECONDS)
        swarm.wait_for_round(cut_at + 3, STAY, COMPLETE_SECONDS)
        lost = {event.model_hash for event in swarm.processes[CUT_OFF].rounds() if event.commit == "degraded"}
        seen = len(swarm.processes[CUT_OFF].rounds())
        halves.plug()

        def all_together() -> bool:
            """After the other history is left all four are counted again."""
            after = rounds_since(swarm, CUT_OFF, seen)
            switched = [at for at, event in enumerate(after) if event.lost_tokens]
            return bool(switched) and any(event.roster_size == 4 for event in after[switched[0] :])

        swarm.wait_until(all_together, "one swarm of four", NAMES, COMPLETE_SECONDS)
        kept = {event.model_hash for name in STAY for event in swarm.processes[name].rounds()}
        assert not kept & lost
        assert all(event.commit == "committed" for name in STAY for event in swarm.processes[name].rounds())
        for name in NAMES:
            swarm.processes[name].send(signal.SIGTERM)
        codes = [swarm.processes[name].wait(30.0) for name in NAMES]
    assert codes == [0, 0, 0, 0]
    chains = [Chain(tmp_path / name / "run" / "chain") for name in NAMES]
    for round in range(min(chain.length for chain in chains)):
        assert len({chain.commit(round).certificate.manifest for chain in chains}) == 1
    assert "another history of the run won" in (tmp_path / CUT_OFF / "output.log").read_text()
