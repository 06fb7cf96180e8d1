"""One swarm over its life: the bootstrap node dies, a peer joins late, one is killed, one leaves.

Each column has two owners, and embedding and head take turns.

The story is told once, by the fixture; each test looks at one part of it.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.observe.events import Peer, Round, Step
from spes_p2p.quickstart.processes import Process
from spes_p2p.sync.chain import Chain
from tests import oracle
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import (
    LOCAL,
    MICRO,
    MOST,
    config_of,
    dump_initial_state,
    dumping,
    local_swarm,
    patience_seconds,
    peer_id_of,
    recomputed_state,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
FIRST = ("p0", "p1", "p2", "p3")
TWO_OWNERS = (
    "swarm.min_peers=4",
    "swarm.experts_per_peer=4",
    "swarm.target_replicas=2",
    "sync.steps_per_round=6",
    "sync.merge_interval=12",
    "sync.vocabulary_rounds=2",
)
LEAVE_SECONDS = 30.0
"""A peer takes up to 8 to leave, and as long again to end where the machine has much else to do."""


@dataclass
class Story:
    """What happened, in rounds of p0, and what was said about it."""

    folder: Path
    config: Config
    ids: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    orphaned_at: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    killed_at: int = 0
    leave_code: int | None = None
    end_codes: dict[str, int] = field(default_factory=dict)

    def manifests(self, name: str = "p0") -> list[Manifest]:
        """The chain in a peer's folder."""
        chain = Chain(self.folder / name / "run" / "chain")
        return [chain.commit(round).manifest for round in range(chain.length)]

    def rounds(self, name: str) -> list[Round]:
        return [event for _, event in self.processes[name].seen if isinstance(event, Round)]

    def changes(self, change: str) -> set[str]:
        """Who was seen to come or go, by anybody (who catches up over rounds does not hear of it)."""
        events = (event for process in self.processes.values() for _, event in process.seen)
        return {event.who for event in events if isinstance(event, Peer) and event.change == change}

    def tokens_trained(self, name: str) -> int:
        return sum(event.tokens for _, event in self.processes[name].seen if isinstance(event, Step))

    def tokens_counted(self, name: str) -> int:
        rosters = (entry for manifest in self.manifests() for entry in manifest.roster)
        return sum(entry.tokens for entry in rosters if entry.peer == self.ids[name])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Story:
    folder = tmp_path_factory.mktemp("life")
    told = Story(folder, config_of(TWO_OWNERS))
    with local_swarm(folder) as swarm:
        told.processes = swarm.processes
        swarm.bootstrap("tiny", tokens, [*MICRO, *TWO_OWNERS])
        for name in FIRST:
            ranks = ["--local-ranks", "2"] if name == "p3" else []
            swarm.peer(name, tokens, [*dumping(folder, name), *ranks, *LOCAL])
        address = address_of_a_peer(swarm)
        swarm.wait_for_round(3, FIRST, 180.0)
        told.ids = {name: peer_id_of(swarm.processes[name]) for name in FIRST}

        swarm.processes["bootstrap"].end()
        told.orphaned_at = last_round(swarm.processes["p0"])
        swarm.peer("p4", tokens, [*dumping(folder, "p4"), *LOCAL], initial_peer=address)
        swarm.wait_until(lambda: len(swarm.processes["p4"].rounds()) >= 3, "three rounds of p4", (*FIRST, "p4"), 180.0)
        told.ids["p4"] = peer_id_of(swarm.processes["p4"])
        told.status = json.loads(swarm.ask("status", "--initial-peers", address, "--json"))

        in_the_middle_of_a_round(swarm, "p1")
        told.killed_at = last_round(swarm.processes["p0"])
        swarm.processes["p1"].end()
        left = ("p0", "p2", "p3", "p4")
        swarm.wait_for_round(told.killed_at + 2, left, patience_seconds(swarm.processes["p0"]))

        in_the_middle_of_a_round(swarm, "p2")
        swarm.processes["p2"].send(signal.SIGTERM)
        told.leave_code = swarm.processes["p2"].wait(LEAVE_SECONDS)
        swarm.wait_for_round(last_round(swarm.processes["p0"]) + 2, ("p0", "p3", "p4"), 180.0)

        for name in ("p0", "p3", "p4"):
            swarm.processes[name].send(signal.SIGTERM)
        told.end_codes = {name: swarm.processes[name].wait(LEAVE_SECONDS) for name in ("p0", "p3", "p4")}
        for process in swarm.processes.values():
            process.read_events()
    return told


def address_of_a_peer(swarm: FaultySwarm) -> str:
    """As `status` shows it, once a peer is known."""
    addresses: list[str] = []

    def found() -> bool:
        said = json.loads(swarm.ask("status", "--initial-peers", swarm.address, "--json"))
        addresses.extend(
            one["addresses"][0] for one in said["peers"] if one["state"] != "bootstrap" and one["addresses"]
        )
        return bool(addresses)

    swarm.wait_until(found, "a peer in the status", FIRST, 180.0)
    return addresses[0]


def last_round(process: Process) -> int:
    return max((event.round for event in process.rounds()), default=0)


def in_the_middle_of_a_round(swarm: FaultySwarm, name: str) -> None:
    """Until this peer has made a step of a new round."""
    process = swarm.processes[name]
    process.read_events()
    seen = len(process.seen)

    def found() -> bool:
        process.read_events()
        new = [event for _, event in process.seen[seen:]]
        began = next((at for at, event in enumerate(new) if isinstance(event, Round)), len(new))
        return any(isinstance(event, Step) for event in new[began:])

    swarm.wait_until(found, f"a step of {name} in a new round", [name])


def test_rounds_with_two_owners_a_column_are_what_the_formulas_give(story: Story) -> None:
    """As long as nobody was killed: who dies takes its dump with it."""
    dump_initial_state(story.folder, story.config, "p0")
    for folder in (story.folder / "dumps").glob("*/round-*"):
        if int(folder.name.removeprefix("round-")) > story.killed_at:
            folder.rename(folder.with_name(f"later-{folder.name}"))
    checked = oracle.check_dumps(story.folder / "dumps", story.config.sync.tile_values, MOST)
    assert checked == list(range(story.killed_at + 1))
    assert len(checked) > 5
    chain = story.manifests()
    full = [m for m in chain[1 : story.killed_at] if len(m.roster) == len(chain[m.round - 1].members)]
    assert full
    both = [all(len(piece.contributors) == 2 for piece in m.slices if piece.block > 0) for m in full]
    assert sum(both) >= MOST * len(both)


def test_everybody_agrees_on_every_round(story: Story) -> None:
    roots = {manifest.round: manifest.state_root.hex() for manifest in story.manifests()}
    for name in story.ids:
        assert {(event.round, event.model_hash) for event in story.rounds(name)} <= set(roots.items())
        round, root = recomputed_state(story.folder / name, story.config)
        assert root == roots.get(round, root if round > max(roots) else None)


def test_two_ranks_are_one_peer(story: Story) -> None:
    """Its values are in the rounds that the oracle has checked."""
    checked = story.manifests()[1 : story.killed_at + 1]
    assert story.ids["p3"] in {entry.peer for manifest in checked for entry in manifest.roster}
    assert story.end_codes["p3"] == 0


def test_without_the_bootstrap_node_a_newcomer_joins_through_a_peer(story: Story) -> None:
    newcomer = story.ids["p4"]
    assert newcomer in story.changes("joined")
    counted = [m for m in story.manifests() if newcomer in {entry.peer for entry in m.roster}]
    assert counted
    assert counted[0].round > story.orphaned_at
    parent = story.manifests()[counted[-1].round - 1]
    columns = [column for column, owners in enumerate(parent.ownership) if newcomer in owners]
    assert columns
    pieces = {piece.block for piece in counted[-1].slices if newcomer in piece.contributors}
    assert pieces == {0, *(1 + column for column in columns)}


def test_status_works_against_a_peer(story: Story) -> None:
    assert story.status["round"] > story.orphaned_at
    assert story.status["certificate"] == "quorum"
    assert story.status["checked"]
    assert {one["peer"] for one in story.status["peers"]} >= set(story.ids.values())
    assert all(column["owners"] for column in story.status["columns"])


def test_a_killed_peer_holds_up_nobody(story: Story) -> None:
    """The wait for the next two rounds was bounded; what it owned has another owner."""
    assert story.processes["p1"].exit_code == -signal.SIGKILL
    assert story.ids["p1"] in story.changes("lost") - story.changes("left")
    last = story.manifests()[-1]
    assert story.ids["p1"] not in {member.peer for member in last.members}
    assert all(story.ids["p1"] not in owners for owners in last.ownership)


def test_a_leaver_ends_in_time_and_all_of_its_work_is_counted(story: Story) -> None:
    assert story.leave_code == 0
    assert story.ids["p2"] in story.changes("left")
    assert story.tokens_counted("p2") == story.tokens_trained("p2")
    assert all(story.tokens_counted(name) <= story.tokens_trained(name) for name in story.ids)


def test_the_last_ones_leave_in_time_too(story: Story) -> None:
    assert story.end_codes == {"p0": 0, "p3": 0, "p4": 0}
