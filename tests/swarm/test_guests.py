"""Guests in real processes: what is handed out differs from what owners trained by what guests did, and no more."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import oracle
from tests.swarm.micro import LOCAL, MICRO, config_of, dumping, layout_of, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
RANK = 4
NAMES = ("a", "b")
AGREED = (f"model.guest_rank={RANK}", "swarm.min_peers=2", "swarm.experts_per_peer=4", "sync.merge_alpha=0")


def run_until_both_were_guests(folder: Path, tokens: Path) -> None:
    """Whoever a busy machine makes late for a round is no guest in it: rounds go on until one has both."""
    with local_swarm(folder) as swarm:
        swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        peers = [swarm.peer(name, tokens, [*dumping(folder, name), *LOCAL]) for name in NAMES]

        def both_were() -> bool:
            rounds = ((peer.name, one.round) for peer in peers for one in peer.rounds() if one.guests == len(NAMES))
            told = [folder / "dumps" / name / f"round-{round:06d}" / "round.json" for name, round in rounds]
            return {path.parts[-3] for path in told if path.exists()} == {*NAMES}

        swarm.wait_until(both_were, "a round with both as guests", NAMES)
        for peer in peers:
            peer.send(signal.SIGTERM)
        swarm.wait_for_end(NAMES, 60.0)


def test_owners_take_in_low_rank_changes_of_their_columns(tmp_path: Path, tokens: Path) -> None:
    run_until_both_were_guests(tmp_path, tokens)
    layout, changed = layout_of(config_of(AGREED)), 0
    for told in sorted((tmp_path / "dumps").glob("*/round-*/round.json")):
        about = json.loads(told.read_text())
        counted = {
            block.index
            for block in layout.blocks
            if sum(
                piece["tiles"]
                for piece in about["slices"]
                if piece["block"] == block.index and about["peer_id"] in piece["contributors"]
            ) == len(layout.tile_ids_of(block.index))
        }  # fmt: skip
        before, after = (load_file(told.with_name(f"{which}.safetensors")) for which in ("before", "after"))
        for tensor in (name for name in before if ".experts." in name and oracle.block_of(name) in counted):
            difference = after[tensor].astype(np.float64) - before[tensor]
            strengths = np.linalg.svd(difference)[1]
            assert strengths[RANK] < 1e-3 * strengths[0] + 1e-6
            changed += strengths[0] > 1e-5
    assert changed > 20
