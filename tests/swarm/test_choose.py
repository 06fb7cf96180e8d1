"""A run that has gone on twice for good, for real: all say so, the organiser chooses, all train on together.

No network is parted for it: one goes on alone while the other two are dead, and is dead while these go on from where
they stood. The same with a parted network, and every way out of it, in memory: tests/sync/test_choosing_history.py. The
organiser's command alone: tests/cli/test_run.py.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.peer.kept_invite import kept_invite
from spes_p2p.quickstart.processes import BOOTSTRAP
from spes_p2p.sync.chain import Chain
from tests.simulation.faults import SLOW, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
ALONE, TWO = "alone", ("one", "two")
ALL = (ALONE, *TWO)
AGREED = ("swarm.min_peers=3", "swarm.final_rounds=2", "swarm.heartbeat_seconds=0.2")
SLOW_STEPS = Fault(failpoints.INNER_STEP, SLOW, times=0, factor=20.0)
"""Whoever comes back later counts fewer tokens than the one that went on alone."""
SLOWER_STEPS = Fault(failpoints.INNER_STEP, SLOW, times=0, factor=5.0)
"""Who waits for others trains meanwhile: it need not be as fast as it can."""
MORE_ROUNDS = 12


def newest(swarm: FaultySwarm, name: str) -> int:
    return max((event.round for event in swarm.processes[name].rounds()), default=0)


def part(swarm: FaultySwarm, tokens: Path) -> None:
    """`alone` commits rounds without the two others; then they commit some without it, and all are there again."""
    for name in ALL:
        swarm.peer(name, tokens, LOCAL)
    swarm.wait_for_round(1, ALL)
    for name in TWO:
        swarm.processes[name].end()
    swarm.wait_for_round(newest(swarm, ALONE) + MORE_ROUNDS, [ALONE])
    swarm.processes[ALONE].end()
    stood = max(newest(swarm, name) for name in TWO)
    for name in TWO:
        swarm.peer(name, tokens, LOCAL, faults=[SLOW_STEPS])
    swarm.wait_for_round(stood + 2, TWO)
    swarm.peer(ALONE, tokens, LOCAL, faults=[SLOWER_STEPS])


def test_the_organiser_settles_a_run_that_has_gone_on_twice(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        node = swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        part(swarm, tokens)

        def all_say_so() -> bool:
            return all("the run has split since round" in process.output() for process in swarm.processes.values())

        swarm.wait_until(all_say_so, "all say that there are two histories", ALL)
        invite = kept_invite(node.folder)
        [fork] = json.loads(swarm.ask("status", invite, "--json"))["forks"]
        sides = {side["kind"]: side for side in fork["sides"].values()}
        assert (len(sides["degraded"]["peers"]), len(sides["quorum"]["peers"])) in {(1, 2), (2, 2)}
        assert sides["degraded"]["tokens"] > sides["quorum"]["tokens"]
        child, seen = sides["degraded"]["child"], {name: newest(swarm, name) for name in ALL}
        shown = swarm.ask("status", invite)
        assert f"the run has 2 histories since round {fork['round']}" in shown
        assert f"spes-p2p run choose {child[:10]}" in shown

        said = swarm.ask("run", "choose", child[:10], "--yes", "--folder", str(node.folder))
        assert f"the run goes on with {child[:10]}" in said
        swarm.wait_for_round(max(seen.values()) + 1, ALL)
        swarm.wait_until(
            lambda: all(swarm.processes[name].rounds()[-1].roster_size == 3 for name in ALL), "a round of all", ALL
        )
        assert json.loads(swarm.ask("status", invite, "--json"))["forks"] == []
        for name in ALL:
            swarm.processes[name].send(signal.SIGTERM)
        assert [swarm.processes[name].wait(30.0) for name in ALL] == [0, 0, 0]
    for name in (*ALL, BOOTSTRAP):
        first = Chain(tmp_path / name / "run" / "chain").commit(fork["round"] + 1)
        assert first.certificate.manifest.hex() == child
    assert [("tokens are lost" in swarm.processes[name].output()) for name in ALL] == [False, True, True]
