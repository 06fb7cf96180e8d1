"""Four real peers whose changes travel in a byte a value, columns in every second round: one state, and it learns."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spes_p2p.consensus.turns import due_columns
from spes_p2p.observe.events import Eval, Round
from spes_p2p.sync.chain import Chain
from tests.swarm.micro import recomputed_state, run_to_the_end

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
PEERS = ("p0", "p1", "p2", "p3")
ROUNDS = 6
TURNS = 2


def test_lossy_codecs_and_turns_give_one_state_that_learns(tmp_path: Path, tokens: Path) -> None:
    agreed = ("swarm.experts_per_peer=2", "sync.codec=int8", f"sync.expert_rounds={TURNS}")
    finished = run_to_the_end(tmp_path, tokens, PEERS, ROUNDS, agreed, ("eval.sequences=64",))
    hashes = {recomputed_state(tmp_path / name, finished.config) for name in PEERS}
    said = {(events[-1].round, events[-1].model_hash) for events in finished.of(Round).values()}
    assert hashes == said
    assert len(hashes) == 1
    chain = Chain(tmp_path / "p0" / "run" / "chain")
    manifests = [chain.commit(round).manifest for round in range(ROUNDS + 1)]
    done = [{piece.block - 1 for piece in manifest.slices if piece.block} for manifest in manifests]
    columns = finished.config.model.num_experts
    full = [
        manifest for manifest in manifests[1:] if len(manifest.roster) == len(PEERS)
    ]  # a busy machine makes one late
    assert full
    due = {after.round: due_columns(before.ownership, after.round, TURNS) for before, after in pairwise(manifests)}
    assert all(due[manifest.round] <= done[manifest.round] for manifest in full)
    assert any(len(some) < columns for some in done[1:])
    evals = sorted({(event.round, event.loss) for events in finished.of(Eval).values() for event in events})
    assert evals[-1][1] < evals[0][1] - 0.3
