"""Real processes that are slow, frozen, or whose wall clock jumps: nobody waits for them, nothing of theirs is lost.

The story is told once, by the fixture; each test looks at one part. In memory: tests/sync/test_slow_and_frozen.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.observe.events import Round, Step
from spes_p2p.quickstart.processes import Process
from spes_p2p.sync.chain import Chain
from tests.simulation.faults import FREEZE, JUMP, SLOW, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, config_of, local_swarm, patience_seconds, peer_id_of, recomputed_state

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
QUICK, SLOWER, FROZEN, JUMPER = NAMES = ("quick", "slower", "frozen", "jumper")
H = 20
OVERRIDES = ("swarm.min_peers=4", "swarm.experts_per_peer=4", f"sync.steps_per_round={H}", "sync.merge_interval=40")
FOUR_TIMES_SLOWER = Fault(failpoints.INNER_STEP, SLOW, times=0, factor=4.0)
STOPPED = Fault("prevote", FREEZE)
CLOCK_JUMPS = Fault(failpoints.APPLIED, JUMP, seconds=300.0)
FAULTS = {SLOWER: (FOUR_TIMES_SLOWER,), FROZEN: (STOPPED,), JUMPER: (CLOCK_JUMPS,)}


@dataclass
class Story:
    folder: Path
    config: Config
    ids: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    frozen_from: int = 0
    frozen_to: int = 0
    jumped_at: int = 0
    codes: dict[str, int] = field(default_factory=dict)

    def manifests(self) -> list[Manifest]:
        chain = Chain(self.folder / QUICK / "run" / "chain")
        return [chain.commit(round).manifest for round in range(chain.length)]

    def steps_of(self, name: str, manifests: list[Manifest]) -> list[int]:
        """Inner steps that each of these rounds counted of a peer, where it is in the roster."""
        return [entry.steps for m in manifests for entry in m.roster if entry.peer == self.ids[name]]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Story:
    folder = tmp_path_factory.mktemp("slow")
    told = Story(folder, config_of(OVERRIDES))
    with local_swarm(folder) as swarm:
        told.processes = swarm.processes
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES])
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL, faults=FAULTS.get(name, ()))
        swarm.wait_for_round(4, NAMES, 180.0)
        told.ids = {name: peer_id_of(swarm.processes[name]) for name in NAMES}

        swarm.armed_faults.arm(CLOCK_JUMPS)
        swarm.wait_until(lambda: swarm.armed_faults.victim(CLOCK_JUMPS) is not None, "the clock jumps", NAMES)
        told.jumped_at = newest(swarm, QUICK)

        freeze_for_two_rounds(swarm, told)
        wait_until_counted(swarm, told, FROZEN)
        for name in NAMES:
            swarm.processes[name].send(signal.SIGTERM)
        told.codes = {name: swarm.processes[name].wait(30.0) for name in NAMES}
        for process in swarm.processes.values():
            process.read_events()
    return told


def newest(swarm: FaultySwarm, name: str) -> int:
    return max(event.round for event in swarm.processes[name].rounds())


def freeze_for_two_rounds(swarm: FaultySwarm, told: Story) -> None:
    """It stops itself before its vote leaves; the others go on without it."""
    patience = patience_seconds(swarm.processes[QUICK])
    swarm.armed_faults.arm(STOPPED)
    swarm.wait_until(lambda: swarm.armed_faults.victim(STOPPED) is not None, "it is frozen", NAMES)
    told.frozen_from = newest(swarm, QUICK)
    others = [name for name in NAMES if name != FROZEN]
    swarm.wait_for_round(told.frozen_from + 3, others, 3 * patience)
    told.frozen_to = newest(swarm, QUICK)
    swarm.processes[FROZEN].thaw()


def wait_until_counted(swarm: FaultySwarm, told: Story, name: str) -> None:
    def counted() -> bool:
        last = told.manifests()[-1]
        return last.round > told.frozen_to and told.ids[name] in {entry.peer for entry in last.roster}

    swarm.wait_until(counted, f"{name} is counted again", NAMES, 180.0)


def test_nobody_waits_for_a_slow_peer_and_its_tokens_count(story: Story) -> None:
    rounds = [manifest for manifest in story.manifests()[3:] if manifest.roster]
    slow, quick = (sorted(story.steps_of(name, rounds)) for name in (SLOWER, QUICK))
    assert slow[len(slow) // 2] < quick[len(quick) // 2] <= H
    for manifest in rounds:
        assert (
            len({entry.tokens // entry.steps for entry in manifest.roster}) == 1
        )  # in proportion to what each trained
    counted = sum(e.tokens for m in story.manifests() for e in m.roster if e.peer == story.ids[SLOWER])
    assert counted <= sum(e.tokens for _, e in story.processes[SLOWER].seen if isinstance(e, Step))


def test_a_frozen_peer_holds_nobody_up_and_catches_up_by_itself(story: Story) -> None:
    frozen = story.processes[FROZEN]
    assert story.frozen_to - story.frozen_from >= 3
    applied = [event.round for _, event in frozen.seen if isinstance(event, Round)]
    assert not set(range(story.frozen_from + 2, story.frozen_to)) & set(applied)
    assert max(applied) > story.frozen_to


def test_a_clock_that_jumps_after_the_start_changes_nothing(story: Story) -> None:
    later = [m for m in story.manifests() if m.round > story.jumped_at + 1]
    counted = [m for m in later if story.ids[JUMPER] in {entry.peer for entry in m.roster}]
    assert len(counted) > len(later) // 2


def test_all_end_equal_and_without_an_exception(story: Story) -> None:
    roots = {manifest.round: manifest.state_root.hex() for manifest in story.manifests()}
    for name in NAMES:
        round, root = recomputed_state(story.folder / name, story.config)
        assert root == roots.get(round, root if round > max(roots) else None), name
        assert "Traceback" not in story.processes[name].output(), name
    assert set(story.codes.values()) == {0}
