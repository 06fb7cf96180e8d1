"""What the tests with a whole swarm share: a model of 75 thousand parameters, and swarms that leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import psutil

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.events import Event
from spes_p2p.quickstart.processes import Host, Process
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile, signer_of
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.dump import RoundDump
from tests.fork_server import ForkedSwarm
from tests.simulation.faulty_swarm import FaultySwarm

E = TypeVar("E", bound=Event)
MICRO = (
    "model.d_model=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.expert_ffn=32",
    "data.sequence_length=32",
    "data.block_sequences=4",
    "data.held_out_fraction=0.1",
    "optimizer.batch_sequences=2",
    "optimizer.lr=0.005",
    "scheduler.warmup_steps=5",
    "sync.steps_per_round=8",
    "sync.merge_interval=16",
    "sync.tile_values=1024",
    "sync.slice_tiles=6",
    "swarm.heartbeat_seconds=0.3",
)
"""On top of `tiny`: few steps, of some milliseconds, 73 tiles in 13 slices and more, a merge in every second round."""
LOCAL = ("eval.sequences=16",)
"""What each peer chooses: an evaluation that makes nobody late for the round."""
GONE_SECONDS = 15.0
MOST = 0.5
"""Of the rounds: a busy machine makes a peer late for some."""
MARK = "SPES_P2P_TEST_SWARM"


@dataclass(frozen=True)
class Finished:
    """A swarm that ran to its end: its folder, and all events of each peer with their times in Unix seconds."""

    folder: Path
    config: Config
    seen: dict[str, list[tuple[float, Event]]]

    def of(self, kind: type[E]) -> dict[str, list[E]]:
        """Each peer's events of one kind."""
        return {name: [event for _, event in seen if isinstance(event, kind)] for name, seen in self.seen.items()}


def config_of(overrides: Sequence[str] = ()) -> Config:
    return load_config(bundled_config("tiny"), [*MICRO, *overrides])


def layout_of(config: Config) -> Layout:
    return state_layout(config)


@contextmanager
def nothing_left() -> Iterator[dict[str, str]]:
    """Gives variables for the environment of processes; afterwards none that inherited them may be there."""
    mark = {MARK: uuid4().hex}
    try:
        yield mark
    finally:
        until = time.monotonic() + GONE_SECONDS
        while (left := marked_processes(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    assert not left, f"still there: {left}"


@contextmanager
def local_swarm(folder: Path, hosts: Mapping[str, Host] | None = None) -> Iterator[FaultySwarm]:
    """A swarm of which no process is left afterwards, daemons and ranks included, whatever happens in between."""
    with nothing_left() as mark, ForkedSwarm(folder, environment=mark, hosts=hosts) as swarm:
        try:
            yield swarm
        finally:
            for process in swarm.processes.values():
                process.end()


def marked_processes(mark: dict[str, str]) -> list[psutil.Process]:
    """Processes that were started with these variables; not those that were forked, whose swarm has ended them."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(MARK) == mark[MARK]
        except psutil.Error:  # ended just now, or not ours
            continue
        if marked and runs(process):
            found.append(process)
    return found


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; it may between two questions, and psutil raises then."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_ends(processes: Sequence[psutil.Process], timeout_seconds: float = GONE_SECONDS) -> list[psutil.Process]:
    """Those that still run after so long; one that ended and that nobody has cleared away does not."""
    until = time.monotonic() + timeout_seconds
    while (left := list(filter(runs, processes))) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def is_daemon(process: psutil.Process) -> bool:
    """Whether it is a libp2p daemon that runs."""
    try:
        return process.name() == "p2pd" and runs(process)
    except psutil.NoSuchProcess:
        return False


def run_to_the_end(
    folder: Path,
    tokens: Path,
    names: Sequence[str],
    rounds: int,
    overrides: Sequence[str] = (),
    local: Sequence[str] = LOCAL,
) -> Finished:
    """A swarm of these peers, until all of them have committed `rounds`; every round is dumped below `dumps`."""
    agreed = [f"swarm.min_peers={len(names)}", *overrides]
    with local_swarm(folder) as swarm:
        swarm.bootstrap("tiny", tokens, [*MICRO, *agreed])
        for name in names:
            swarm.peer(name, tokens, [*dumping(folder, name), "--until-round", str(rounds), *local])
        swarm.wait_for_end(names, 240.0)
        seen = {name: swarm.processes[name].seen for name in names}
    return Finished(folder, config_of(agreed), seen)


def dumping(folder: Path, name: str) -> list[str]:
    return ["--dump-rounds", str(folder / "dumps" / name)]


def dump_initial_state(folder: Path, config: Config, name: str) -> None:
    """What round 1 starts from, as a dump of round 0: a column that nobody trained in it can be checked then."""
    layout = layout_of(config)
    initial = InitialState(layout, config.run.seed, config.model.init_std)
    genesis = Chain(folder / name / "run" / "chain").commit(0).manifest
    dump = RoundDump(folder / "dumps" / "initial", layout, genesis.members[0].peer, config.sync.merge_top_k)
    dump.write(genesis, genesis, initial, (), initial)


def recomputed_state(process_folder: Path, config: Config) -> tuple[int, str]:
    """(round, root) of the newest state in a peer's store, hashed anew from its bytes."""
    layout = layout_of(config)
    version = StateStore(process_folder / "run" / "state", layout, read_only=True).latest()
    assert version is not None
    return version.round, layout.root_of(hash_tiles(version.tile(tile.id) for tile in layout.tiles)).hex()


def identity_of(folder: Path) -> PeerId:
    """Makes the key of a peer that is yet to start; its id."""
    folder.mkdir()
    IdentityFile(folder / "identity.key").release()
    return signer_of(folder / "identity.key").peer_id


def peer_id_of(process: Process) -> str:
    """As it says itself when it is in."""
    line = next(line for line in process.output().splitlines() if line.startswith("this is peer "))
    return line.split()[3].rstrip(",")


def patience_seconds(process: Process) -> float:
    """Ten deadlines and three rounds, both as this run has learnt them: the longest that a lost peer may cost."""
    rounds = process.rounds()[-5:]
    longest = max(sum(event.seconds.values()) for event in rounds)
    return 10 * max(event.deadline_seconds for event in rounds) + 3 * longest
