"""A link that drops to a tenth of its rate in the middle of a round, for real: token buckets in network namespaces.

Needs the right to make them and a kernel that has them; everywhere else the same story is told on the in-memory network
by tests/sync/test_slow_and_frozen.py.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.consensus.messages import QUORUM, Commit
from spes_p2p.observe.events import Peer
from spes_p2p.sync.chain import Chain
from tests.simulation.faults import SLOW, Fault
from tests.swarm.micro import LOCAL, MICRO, config_of, local_swarm, peer_id_of, recomputed_state
from tests.swarm.namespaces import TwoHalves, may_limit_links

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not may_limit_links(), reason="needs root, iproute2 and a kernel with token buckets (tbf)"),
]
NAMES = ("p0", "p1", "slowed")
OVERRIDES = ("swarm.min_peers=3", "swarm.heartbeat_seconds=1.0")
KBIT_PER_SECOND = 20_000
HALF_A_STREAM = Fault(failpoints.STREAM + " values", SLOW, peer="slowed", round=3, seconds=1.0)
"""It stands still with its values half handed out, for as long as it takes to make its link worse."""
COMPLETE_SECONDS = 180.0


def commits(folder: Path) -> list[Commit]:
    chain = Chain(folder / "run" / "chain")
    return [chain.commit(round) for round in range(chain.length)]


def test_a_link_drops_to_a_tenth_of_its_rate_half_way(tmp_path: Path, tokens: Path) -> None:
    """Nobody is given up and no round is lost; what comes late over the slow link counts."""
    with ExitStack() as stack:
        halves = TwoHalves(stack)
        hosts = {name: halves.host(name, "left", f"11.0.0.{10 + at}") for at, name in enumerate(("bootstrap", *NAMES))}
        swarm = stack.enter_context(local_swarm(tmp_path, hosts))
        for name in NAMES:
            halves.limit(name, KBIT_PER_SECOND)
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES])
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL, faults=[HALF_A_STREAM])
        swarm.wait_for_round(2, NAMES, COMPLETE_SECONDS)
        me = peer_id_of(swarm.processes["slowed"])

        swarm.armed_faults.arm(HALF_A_STREAM)
        swarm.wait_until(lambda: swarm.armed_faults.victim(HALF_A_STREAM) is not None, "half a stream", NAMES)
        halves.limit("slowed", KBIT_PER_SECOND // 10)
        dropped_in = max(event.round for event in swarm.processes["p0"].rounds()) + 1
        swarm.wait_for_round(dropped_in + 3, NAMES, COMPLETE_SECONDS)
        for name in NAMES:
            swarm.processes[name].send(signal.SIGTERM)
        codes = [swarm.processes[name].wait(30.0) for name in NAMES]
        for process in swarm.processes.values():
            process.read_events()

    assert codes == [0, 0, 0]
    chains = {name: commits(tmp_path / name) for name in NAMES}
    for together in zip(*chains.values(), strict=False):
        assert len({commit.certificate.manifest for commit in together}) == 1
    while_slow = chains["p0"][dropped_in : dropped_in + 4]
    assert {commit.certificate.kind for commit in while_slow} == {QUORUM}
    counted = [commit for commit in while_slow if me in {entry.peer for entry in commit.manifest.roster}]
    assert len(counted) >= len(while_slow) - 1  # the round in which it dropped may have closed on what was there
    for process in swarm.processes.values():
        assert "Traceback" not in process.output(), process.name
        gone = [event for _, event in process.seen if isinstance(event, Peer) and event.change == "lost"]
        assert not [event for event in gone if dropped_in <= event.round < dropped_in + 4], process.name
    roots = {commit.manifest.round: commit.manifest.state_root.hex() for chain in chains.values() for commit in chain}
    for name in NAMES:
        round, root = recomputed_state(tmp_path / name, config_of(OVERRIDES))
        assert root == roots[round], name
