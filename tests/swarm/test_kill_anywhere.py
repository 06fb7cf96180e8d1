"""SIGKILL of real processes, one after the other in one swarm, each at a named step: nobody stalls, all stay equal.

The story is told once, by the fixture; each test looks at one part of it. Every step and every kind of peer, on the
virtual clock: tests/sync/test_kill_in_memory.py.
"""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.config.load import config_from_text
from spes_p2p.config.schema import Config
from spes_p2p.consensus.events import MessageReceived
from spes_p2p.consensus.messages import QUORUM
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.observe.events import Round
from spes_p2p.quickstart.processes import Process
from spes_p2p.sync.chain import Chain, VoteBook
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.recorder import BEFORE, NEWEST, ReplayedEvent, load_recording, replay
from tests.simulation.faults import MUTE, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import (
    LOCAL,
    MICRO,
    config_of,
    layout_of,
    local_swarm,
    patience_seconds,
    peer_id_of,
    recomputed_state,
)

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(900)]
NAMES = ("p0", "p1", "p2", "p3", "p4")
OVERRIDES = ("swarm.min_peers=5", "swarm.experts_per_peer=4")
BEFORE_PLAN = Fault("plan", round=3)
HALF_A_STREAM = Fault(failpoints.STREAM + " values", round=3)
HANDING_OUT = Fault(failpoints.STREAM + " tiles", round=3)
RIGHT_AFTER_PLAN = Fault("fetch", after="plan", round=3)
"""The leader, as soon as somebody has reduced a slice of its plan."""
WITH_CERTIFICATE = Fault(failpoints.APPENDED, round=3)
WHILE_SAVING = Fault(failpoints.CHECKPOINT_WRITTEN, round=3)
LONELY = 8
"""The round that ends with a leader who alone knows of the certificate: whoever verifies its proposal speaks to nobody
but the leader from then on, so nobody else can count the votes."""
KNOWS_ALONE = Fault("certify", after="proposal", round=LONELY)
MUTED = {name: Fault("verify", MUTE, peer=name, round=LONELY, seconds=4.0) for name in NAMES}
KILLS = (KNOWS_ALONE, BEFORE_PLAN, HALF_A_STREAM, HANDING_OUT, WITH_CERTIFICATE, WHILE_SAVING, RIGHT_AFTER_PLAN)
FAULTS = (*KILLS, *MUTED.values())
"""Every column has one owner here, so each victim is also the only owner of some."""


@dataclass
class Death:
    """Who died of what, its exit code, and what each of the others said about it in the next two rounds."""

    victim: str
    code: int | None
    said: dict[str, list[str]]
    traced: list[str]
    """Who of them printed a traceback."""


@dataclass
class Story:
    folder: Path
    config: Config
    ids: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    accepted: Hash = NO_HASH
    """What the leader had accepted that alone knew of the certificate."""
    knew_at: dict[str, float] = field(default_factory=dict)
    """When each of the others came to know how that round ended, and (`died_at`) when the leader died."""
    died_at: float = 0.0
    planned: list[tuple[int, tuple[PeerId, ...]]] = field(default_factory=list)
    """(round, roster) of the plans that the others had from the leader that died right after one."""
    alone: str = ""
    end_code: int | None = None
    saver: str = ""
    cut_short: set[str] = field(default_factory=set)
    """Checkpoints that `saver` was writing when it died."""
    lines_said: dict[str, int] = field(default_factory=dict)
    """Lines of output by peer that were looked at already."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Story:
    folder = tmp_path_factory.mktemp("kills")
    told = Story(folder, config_of(OVERRIDES))
    with local_swarm(folder) as swarm:
        told.processes = swarm.processes
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES])
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL, faults=FAULTS)
        swarm.wait_for_round(2, NAMES, 180.0)
        told.ids = {name: peer_id_of(swarm.processes[name]) for name in NAMES}
        kill_who_knows_alone(swarm, told)
        for fault in (BEFORE_PLAN, HALF_A_STREAM):
            kill_one(swarm, fault, told)
        come_back(swarm, told, tokens)
        for fault in (HANDING_OUT, WITH_CERTIFICATE, WHILE_SAVING):
            kill_one(swarm, fault, told)
        told.saver = told.deaths[-1].victim
        told.cut_short = partial_checkpoints(told.folder / told.saver)
        come_back(swarm, told, tokens)
        kill_two_at_once(swarm, told)
        kill_the_planner(swarm, told)
        kill_all_but_one(swarm, told)
        told.end_code = end(swarm.processes[told.alone])
        for process in swarm.processes.values():
            process.read_events()
    return told


def partial_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("partial-*")}


def up(swarm: FaultySwarm) -> list[str]:
    return [name for name in NAMES if swarm.processes[name].exit_code is None]


def kill_one(swarm: FaultySwarm, fault: Fault, told: Story) -> None:
    """The next to reach the step dies of it; the others have two more rounds in time."""
    before = up(swarm)
    go_on(swarm, told, before, [strike(swarm, fault)])


def strike(swarm: FaultySwarm, fault: Fault) -> str:
    """Who died of it."""
    swarm.armed_faults.arm(fault)
    watched = up(swarm)
    swarm.wait_until(
        lambda: swarm.armed_faults.victim(fault) is not None, f"{fault}", watched, fine=(None, -signal.SIGKILL)
    )
    victim = swarm.armed_faults.victim(fault)
    assert victim is not None
    return victim


def go_on(swarm: FaultySwarm, told: Story, before: list[str], victims: list[str]) -> None:
    """The others have two more rounds in time, and what they say meanwhile is noted."""
    codes = {victim: swarm.processes[victim].wait(30.0) for victim in victims}
    left = [name for name in before if name not in victims]
    told_before = {name: told.lines_said.get(name, 0) for name in left}
    swarm.wait_for_round(newest(swarm, left) + 2, left, patience_seconds(swarm.processes[left[0]]))
    news = {name: swarm.processes[name].output().splitlines()[told_before[name] :] for name in left}
    told.lines_said |= {name: told_before[name] + len(news[name]) for name in left}
    traced = [name for name in left if any("Traceback" in line for line in news[name])]
    for victim in victims:
        who = short(told.ids[victim])
        said = {name: [line for line in news[name] if who in line] for name in left}
        told.deaths.append(Death(victim, codes[victim], said, traced))


def kill_who_knows_alone(swarm: FaultySwarm, told: Story) -> None:
    """Armed long before its round, in which then nobody but the leader hears of a vote."""
    for fault in MUTED.values():
        swarm.armed_faults.arm(fault)
    assert newest(swarm, up(swarm)) < LONELY - 1
    before = up(swarm)
    victim = strike(swarm, KNOWS_ALONE)
    told.died_at = time.monotonic() - (time.time() - swarm.armed_faults.struck_at(KNOWS_ALONE))
    swarm.armed_faults.disarm()
    others = [name for name in before if name != victim]
    swarm.wait_for_round(LONELY, others, patience_seconds(swarm.processes[others[0]]))
    kept = told.folder / "recordings"
    for name in others:  # at once: a recording keeps a few rounds, and the swarm goes on
        shutil.copytree(told.folder / name / "flight", kept / name / "flight")
    told.accepted = VoteBook(told.folder / victim / "run" / "votes").record.locked_value
    for name in others:
        steps = [step for step in replayed(kept / name) if step.round == LONELY - 1]
        told.knew_at[name] = next(step.frame.now for step in steps if tells_the_end(step))
    go_on(swarm, told, before, [victim])


def kill_two_at_once(swarm: FaultySwarm, told: Story) -> None:
    before = up(swarm)
    victims = [before[-1], before[1]]
    for name in victims:
        swarm.processes[name].send(signal.SIGKILL)
    go_on(swarm, told, before, victims)


def kill_the_planner(swarm: FaultySwarm, told: Story) -> None:
    """And what the others had of its plan by then."""
    before = up(swarm)
    victim = strike(swarm, RIGHT_AFTER_PLAN)
    others = [name for name in before if name != victim]
    round = newest(swarm, others) + 1
    swarm.wait_for_round(round, others, patience_seconds(swarm.processes[others[0]]))
    for step in (step for name in others for step in replayed(told.folder / name)):
        plan = step.frame.event.envelope.plan if isinstance(step.frame.event, MessageReceived) else None
        if plan is not None and plan.author == told.ids[victim]:
            told.planned.append((step.round + 1, tuple(entry.peer for entry in plan.value.roster)))
    go_on(swarm, told, before, [victim])


def replayed(folder: Path) -> list[ReplayedEvent]:
    """All that the flight recorder of a peer still has, decided again by the state machine."""
    played: list[ReplayedEvent] = []
    for path in (folder / "flight" / BEFORE, folder / "flight" / NEWEST):
        if path.exists():
            recording = load_recording(path)
            config = config_from_text(recording.info.config)
            played += replay(recording, rules_of(config, recording.info, layout_of(config)))
    return played


def tells_the_end(step: ReplayedEvent) -> bool:
    """Whether a peer came to know how its round ends: it counted the votes itself, was told, or asked who is ahead."""
    event = step.frame.event
    commit = event.envelope.commit if isinstance(event, MessageReceived) else None
    return bool({"certify", "follow"} & set(step.rules)) or (commit is not None and commit.manifest.round > step.round)


def newest(swarm: FaultySwarm, names: list[str]) -> int:
    return max(event.round for name in names for event in swarm.processes[name].rounds())


def come_back(swarm: FaultySwarm, told: Story, tokens: Path) -> None:
    """All that were killed, again; returns when a round has counted them all."""
    chain_folder = told.folder / up(swarm)[0] / "run" / "chain"
    back = {told.ids[name] for name in NAMES if name not in up(swarm)}
    for name in NAMES:
        if told.ids[name] in back:
            swarm.peer(name, tokens, LOCAL, faults=FAULTS)

    def counted() -> bool:
        chain = Chain(chain_folder)
        return back <= {entry.peer for entry in chain.commit(chain.length - 1).manifest.roster}

    swarm.wait_until(counted, "all are counted again", NAMES, 180.0)


def kill_all_but_one(swarm: FaultySwarm, told: Story) -> None:
    """And the bootstrap node with them."""
    before = up(swarm)
    told.alone = before[0]
    for name in ("bootstrap", *before[1:]):
        swarm.processes[name].send(signal.SIGKILL)
    go_on(swarm, told, before, before[1:])
    swarm.wait_for_round(newest(swarm, [told.alone]) + 1, [told.alone], patience_seconds(swarm.processes[told.alone]))


def end(process: Process) -> int:
    process.send(signal.SIGTERM)
    return process.wait(30.0)


def test_each_died_at_its_step(story: Story) -> None:
    assert len(story.deaths) > len(KILLS) + 2
    assert {death.code for death in story.deaths} == {-signal.SIGKILL}


def test_what_the_leader_alone_knew_to_be_certified_is_what_the_others_commit(story: Story) -> None:
    """Nobody else knew: each of them counted the votes, or was told, when the leader was dead."""
    assert len(story.knew_at) == len(NAMES) - 1
    assert min(story.knew_at.values()) > story.died_at
    chain = Chain(story.folder / story.alone / "run" / "chain")
    assert chain.commit(LONELY).certificate.manifest == story.accepted != NO_HASH
    assert chain.commit(LONELY).certificate.kind == QUORUM


def test_a_plan_outlives_its_leader(story: Story) -> None:
    """The round that the others commit without it is of its plan, save for what died with it."""
    round, planned = max(story.planned)
    roster = {entry.peer for entry in Chain(story.folder / story.alone / "run" / "chain").commit(round).manifest.roster}
    assert roster
    assert roster <= set(planned)


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
    assert any(round.commit == "renewal" for round in story.processes[story.alone].rounds())
    assert story.end_code == 0


def test_one_line_says_what_happened_and_no_exception(story: Story) -> None:
    """Somebody tells of each loss, each of the survivors at most once, however many slices the lost was part of."""
    for process in story.processes.values():
        assert "Traceback" not in process.output(), process.name
    for death in story.deaths:
        assert not death.traced
        assert any(death.said.values()), f"nobody said a word about the end of {death.victim}"
        for lines in death.said.values():
            assert sum(" lost (round " in line for line in lines) <= 1, lines
            assert sum("were left out" in line for line in lines) <= 1, lines


def test_what_each_recorded_is_decided_again(story: Story) -> None:
    """The flight recordings of real processes, those that were killed and those that came back."""
    for name in NAMES:
        played = replayed(story.folder / name)
        assert len(played) > 100
        assert [step.frame.event for step in played if not step.same] == [], name


def test_a_checkpoint_cut_short_costs_nothing(story: Story) -> None:
    """Who died while it saved has resumed from the checkpoint before."""
    saver = story.processes[story.saver]
    assert "damaged" not in saver.output()
    assert story.cut_short
    assert not story.cut_short & partial_checkpoints(story.folder / saver.name)  # its second death may have cut another
