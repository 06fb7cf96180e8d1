"""SIGKILL of real processes, one after the other in one swarm, each at a named step: nobody stalls, all stay equal.

The story is told once, by the fixture; each test looks at one part of it. Every step and every kind of peer, on the
virtual clock: tests/sync/test_kill_in_memory.py.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spes_p2p import steps
from spes_p2p.config.schema import Config
from spes_p2p.ids import short
from spes_p2p.observe.events import Peer, Round, Warning
from spes_p2p.sync.chain import Chain
from spes_p2p.testing.faults import Fault
from spes_p2p.testing.processes import LocalSwarm, Process
from tests.swarm.micro import LOCAL, MICRO, config_of, local_swarm, patience_seconds, peer_id_of, recomputed_state

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
NAMES = ("p0", "p1", "p2", "p3", "p4")
OVERRIDES = ("swarm.min_peers=5", "swarm.experts_per_peer=4", "sync.steps_per_round=10")
BEFORE_PLAN = Fault("plan", round=3)
HALF_A_STREAM = Fault(steps.STREAM + " values", round=3)
HANDING_OUT = Fault(steps.STREAM + " tiles", round=3)
KNOWS_ALONE = Fault(steps.APPENDED, round=3)
WHILE_SAVING = Fault(steps.CHECKPOINT_WRITTEN, round=3)
FAULTS = (BEFORE_PLAN, HALF_A_STREAM, HANDING_OUT, KNOWS_ALONE, WHILE_SAVING)
"""Every column has one owner here, so each victim is also the only owner of some."""


@dataclass
class Story:
    folder: Path
    config: Config
    ids: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    victims: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    alone: str = ""
    end_code: int | None = None
    cut_short: set[str] = field(default_factory=set)
    """Checkpoints that the last victim was writing when it died."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Story:
    folder = tmp_path_factory.mktemp("kills")
    told = Story(folder, config_of(OVERRIDES))
    with local_swarm(folder) as swarm:
        told.processes = swarm.processes
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES])
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL, faults=FAULTS)
        swarm.wait_for_round(2, NAMES, 120.0)
        told.ids = {name: peer_id_of(swarm.processes[name]) for name in NAMES}
        for fault in (BEFORE_PLAN, HALF_A_STREAM, HANDING_OUT):
            kill_one(swarm, fault, told)
        come_back(swarm, told, tokens)
        for fault in (KNOWS_ALONE, WHILE_SAVING):
            kill_one(swarm, fault, told)
        told.cut_short = partial_checkpoints(told.folder / told.victims[-1])
        come_back(swarm, told, tokens)
        kill_all_but_one(swarm, told)
        told.end_code = end(swarm.processes[told.alone])
        for process in swarm.processes.values():
            process.read_events()
    return told


def partial_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("partial-*")}


def up(swarm: LocalSwarm) -> list[str]:
    return [name for name in NAMES if swarm.processes[name].exit_code is None]


def kill_one(swarm: LocalSwarm, fault: Fault, told: Story) -> None:
    """The next to reach the step dies of it; the others have two more rounds in time."""
    before = up(swarm)
    swarm.armoury.arm(fault)
    swarm.wait_until(lambda: swarm.armoury.victim(fault) is not None, f"{fault}", before, fine=(None, -signal.SIGKILL))
    victim = swarm.armoury.victim(fault)
    assert victim is not None
    told.victims.append(victim)
    told.codes.append(swarm.processes[victim].wait(10.0))
    left = [name for name in before if name != victim]
    swarm.wait_for_round(newest(swarm, left) + 2, left, patience_seconds(swarm.processes[left[0]]))


def newest(swarm: LocalSwarm, names: list[str]) -> int:
    return max(event.round for name in names for event in swarm.processes[name].rounds())


def come_back(swarm: LocalSwarm, told: Story, tokens: Path) -> None:
    """All that were killed, with `--resume`; returns when a round has counted them all."""
    chain_folder = told.folder / up(swarm)[0] / "run" / "chain"
    back = {told.ids[name] for name in NAMES if name not in up(swarm)}
    for name in NAMES:
        if told.ids[name] in back:
            swarm.peer(name, tokens, ["--resume", *LOCAL], faults=FAULTS)

    def counted() -> bool:
        chain = Chain(chain_folder)
        return back <= {entry.peer for entry in chain.commit(chain.length - 1).manifest.roster}

    swarm.wait_until(counted, "all are counted again", NAMES, 120.0)


def kill_all_but_one(swarm: LocalSwarm, told: Story) -> None:
    """And the bootstrap node with them."""
    told.alone = NAMES[0]
    before = newest(swarm, [told.alone])
    patience = patience_seconds(swarm.processes[told.alone])
    for name in ("bootstrap", *NAMES[1:]):
        swarm.processes[name].send(signal.SIGKILL)
    swarm.wait_for_round(before + 3, [told.alone], patience)


def end(process: Process) -> int:
    process.send(signal.SIGTERM)
    return process.wait(10.0)


def test_each_died_at_its_step(story: Story) -> None:
    assert len(story.victims) == len(FAULTS)
    assert set(story.codes) == {-signal.SIGKILL}


def test_everybody_agrees_on_every_round(story: Story) -> None:
    chain = Chain(story.folder / story.alone / "run" / "chain")
    roots = {round: chain.commit(round).manifest.state_root.hex() for round in range(chain.length)}
    for process in story.processes.values():
        seen = {(event.round, event.model_hash) for _, event in process.seen if isinstance(event, Round)}
        assert seen <= set(roots.items()), process.name
    for name in NAMES:
        round, root = recomputed_state(story.folder / name, story.config)
        assert root == roots[round], name


def test_the_last_one_goes_on_alone_and_leaves(story: Story) -> None:
    assert any(round.commit == "degraded" for round in story.processes[story.alone].rounds())
    assert story.end_code == 0


def test_one_line_says_what_happened_and_no_exception(story: Story) -> None:
    """The loss of a peer is told once by each survivor, however many slices it was part of."""
    for process in story.processes.values():
        assert "Traceback" not in process.output(), process.name
        events = [event for _, event in process.seen]
        gone = Counter(event.who for event in events if isinstance(event, Peer) and event.change == "lost")
        for name, who in story.ids.items():
            deaths = story.victims.count(name) + (name != story.alone)
            words = [event.message for event in events if isinstance(event, Warning) and short(who) in event.message]
            assert gone[who] <= deaths
            assert sum("lost" in message for message in words) <= deaths, words


def test_a_checkpoint_cut_short_costs_nothing(story: Story) -> None:
    """Who died while it saved has resumed from the checkpoint before."""
    saver = story.processes[story.victims[-1]]
    assert "damaged" not in saver.output()
    assert story.cut_short
    assert not story.cut_short & partial_checkpoints(story.folder / saver.name)  # its second death may have cut another
