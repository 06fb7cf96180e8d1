"""Real processes that come back: a run of which nobody was left over night, and a peer with what had no turn yet."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from spes_p2p.consensus.messages import QUORUM, RENEWAL, Commit
from spes_p2p.interop.hf import vocabulary_tiles
from spes_p2p.observe.events import Step
from spes_p2p.quickstart.processes import BOOTSTRAP, Host
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from tests.peer.real import quiet_port
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, config_of, dumping, layout_of, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
TWO_PEERS = ("swarm.min_peers=2", "swarm.experts_per_peer=4")
TURNS = 64
"""More rounds than its return takes, also where a busy machine needs minutes to start it."""


def chain_of(swarm: FaultySwarm, name: str) -> list[Commit]:
    chain = Chain(swarm.folder / name / "run" / "chain")
    return [chain.commit(round) for round in range(chain.length)]


def dumps_of(folder: Path, name: str) -> list[Path]:
    """Those that are whole, the oldest first."""
    return sorted(file.parent for file in (folder / "dumps" / name).glob("round-*/round.json"))


def round_of(dump: Path) -> int:
    return int(dump.name.removeprefix("round-"))


def shared_values(layout: Layout, file: Path) -> NDArray[np.float32]:
    tensors = load_file(file)
    return np.concatenate([tensors[placed.tensor.name].ravel() for placed in layout.blocks[0].tensors])


def test_new_peers_go_on_after_a_night_in_which_all_disks_were_lost(tmp_path: Path, tokens: Path) -> None:
    """What is left is a copy of the archive, made as docs/bootstrap-node.md says, the data and the organiser's key."""
    archive, node, store = tmp_path / "archive", tmp_path / "bootstrap", tmp_path / "store"
    leave_out = shutil.ignore_patterns("staging-*", "lock", "votes")
    command = [*MICRO, *TWO_PEERS, "--archive", str(archive)]
    with local_swarm(tmp_path, {BOOTSTRAP: Host(port=quiet_port())}) as swarm:
        swarm.bootstrap("tiny", tokens, command)
        for name in ("p0", "p1"):
            swarm.peer(name, tokens, LOCAL)
        swarm.wait_for_round(3, ("p0", "p1"), 180.0)
        for name in ("p0", "p1"):
            swarm.processes[name].send(signal.SIGTERM)
        assert [swarm.processes[name].wait(60.0) for name in ("p0", "p1")] == [
            0,
            0,
        ]  # the last one waits for the archive
        swarm.processes["bootstrap"].end()
        evening = max((chain_of(swarm, name) for name in ("p0", "p1")), key=len)  # one may have ended a round later
        for folder in (archive, node / "run"):
            shutil.copytree(folder, store / folder.name, ignore=leave_out)
            shutil.rmtree(folder)
            (store / folder.name).rename(folder)
        for path in node.iterdir():
            if path.name not in ("run", "identity.key"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        swarm.bootstrap("tiny", tokens, command)
        kept = len(chain_of(swarm, "bootstrap"))
        assert 1 < kept <= len(evening) + 1
        for name in ("p2", "p3"):
            swarm.peer(name, tokens, LOCAL)
        swarm.wait_for_round(kept + 2, ("p2", "p3"), 180.0)
        for name in ("p2", "p3"):
            swarm.processes[name].end()
        morning = chain_of(swarm, "p2")
        shared = min(kept, len(evening))
        assert morning[:shared] == evening[:shared]
        first = next(commit for commit in morning if commit.certificate.kind == RENEWAL)
        assert first.manifest.round == kept
        assert first.manifest.state_root == morning[kept - 1].manifest.state_root
        assert morning[-1].certificate.kind == QUORUM


@pytest.mark.thorough
def test_what_the_last_to_leave_trained_is_in_the_archive(tmp_path: Path, tokens: Path) -> None:
    """It waits for that before it goes; the next one begins there."""
    alone = ("swarm.min_peers=1", "swarm.experts_per_peer=8")
    with local_swarm(tmp_path) as swarm:
        swarm.bootstrap("tiny", tokens, [*MICRO, *alone, "--archive", str(tmp_path / "archive")])
        swarm.peer("p0", tokens, LOCAL)
        swarm.wait_for_round(2, ("p0",), 180.0)
        swarm.processes["p0"].send(signal.SIGTERM)
        assert swarm.processes["p0"].wait(30.0) == 0
        swarm.processes["p0"].read_events()
        last = chain_of(swarm, "p0")[-1].manifest
        store = StateStore(tmp_path / "archive" / "state", layout_of(config_of(alone)), read_only=True)
        assert store.version(last.round).root == last.state_root
        trained = sum(event.tokens for _, event in swarm.processes["p0"].seen if isinstance(event, Step))
        assert last.tokens == trained
        swarm.peer("p1", tokens, LOCAL)
        swarm.wait_for_round(last.round + 2, ("p1",), 180.0)
        assert chain_of(swarm, "p1")[last.round].manifest == last


def test_what_had_no_turn_yet_is_not_lost_by_who_leaves_and_comes_back(tmp_path: Path, tokens: Path) -> None:
    """Embedding and head take turns: of most of it a peer is rounds ahead when it goes, and as far when it is back."""
    seldom = (
        "swarm.min_peers=2", "swarm.experts_per_peer=4", f"sync.vocabulary_rounds={TURNS}", "sync.tile_values=256",
        "optimizer.lr=0.001",
    )  # fmt: skip
    with local_swarm(tmp_path) as swarm:
        swarm.bootstrap("tiny", tokens, [*MICRO, *seldom])
        for name in ("p0", "p1"):
            swarm.peer(name, tokens, [*dumping(tmp_path, name), *LOCAL])
        swarm.wait_for_round(6, ("p0", "p1"), 180.0)
        swarm.processes["p1"].send(signal.SIGTERM)
        assert swarm.processes["p1"].wait(30.0) == 0
        left = dumps_of(tmp_path, "p1")
        swarm.peer("p1", tokens, [*dumping(tmp_path, "p1"), *LOCAL])
        swarm.wait_until(lambda: len(dumps_of(tmp_path, "p1")) > len(left), "a round of p1", ("p0", "p1"), 180.0)
    last, back = left[-1], dumps_of(tmp_path, "p1")[len(left)]
    chain = chain_of(swarm, "p0")
    layout = layout_of(config_of(seldom))
    waiting = set(range(vocabulary_tiles(layout)))
    for commit in chain[round_of(last) : round_of(back)]:
        waiting.difference_update(tile for piece in commit.manifest.slices for tile in piece.tile_ids)
    assert waiting, "its return took longer than all turns"
    went, returned, committed = (
        np.concatenate(
            [shared_values(layout, file)[layout.tiles[tile].start : layout.tiles[tile].stop] for tile in waiting]
        )
        for file in (last / "before.safetensors", back / "before.safetensors", last / "after.safetensors")
    )
    lead, now = went - committed, returned - committed
    assert lead @ now > 0.7 * (lead @ lead) > 0, "it went on from there, and not from what is committed"
