"""Guests in real processes: what is handed out differs from what owners trained by what guests did, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.swarm.micro import run_to_the_end

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
RANK = 4


def test_owners_take_in_low_rank_changes_of_their_columns(tmp_path: Path, tokens: Path) -> None:
    overrides = (f"model.guest_rank={RANK}", "swarm.experts_per_peer=4", "sync.merge_alpha=0")
    run_to_the_end(tmp_path, tokens, ("a", "b"), 2, overrides)
    changed = 0
    for name in ("a", "b"):
        for round in (1, 2):
            folder = tmp_path / "dumps" / name / f"round-{round:06d}"
            before, after = (load_file(folder / f"{which}.safetensors") for which in ("before", "after"))
            for tensor in (name for name in before if ".experts." in name):
                difference = after[tensor].astype(np.float64) - before[tensor]
                strengths = np.linalg.svd(difference)[1]
                assert strengths[RANK] < 1e-3 * strengths[0] + 1e-6
                changed += strengths[0] > 1e-5
    assert changed > 20
