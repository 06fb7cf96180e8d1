"""What peers of whole swarms have on disk at their worst moment, against what `plan` and `join` say they need."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.membership import LINK_PRIVATE
from spes_p2p.consensus.messages import Intent
from spes_p2p.planning.disk import DiskNeed
from spes_p2p.planning.sizes import Sizes
from spes_p2p.state.layout import Values
from spes_p2p.sync import inputs
from spes_p2p.sync.residuals import Residuals
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import in_swarm, small_config

SHAPE = ("model.d_model=32", "model.head_dim=16", "model.expert_ffn=32", "model.vocab_size=257")
"""About 50,000 values, half of them in columns: beside them indices and certificates are small."""
WIDER = ("model.embedding_rows=257", "sync.tile_values=4096", "sync.merge_alpha=0")
TWO = "swarm.target_replicas=2"
CASES = (
    (),
    ("sync.outer=nesterov",),
    ("sync.merge_alpha=0.1", "sync.merge_interval=10"),
    ("sync.codec=int4", "sync.merge_alpha=0.1", "sync.merge_interval=10"),
    ("sync.codec=int4", TWO),
    ("sync.codec=int4", TWO, "sync.expert_rounds=2", "sync.vocabulary_rounds=2"),
    ("sync.codec=int8", "sync.expert_codec=ternary", "sync.overlap=true"),
    ("sync.codec=fp32", "sync.expert_codec=int8", TWO),
    ("sync.codec=ternary", TWO),
    ("sync.codec=int8", "sync.outer=nesterov", TWO),
)


def wide_config(*overrides: str) -> Config:
    return small_config(*SHAPE, *WIDER, *overrides, peers=4)


def bytes_of(folder: Path) -> int:
    """Of all files, once where they are one file under several names. A chain grows with the run: left out."""
    found = dict[int, int]()
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if name != "chain"]
        entries = (os.stat(os.path.join(path, name)) for name in files)
        found |= {entry.st_ino: entry.st_size for entry in entries}
    return sum(found.values())


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Filled with the most bytes that each peer's folder had: with three sets of residuals, and with two snapshots."""
    found, settle, write = dict[str, int](), Residuals.settle, inputs.on_disk

    def look(folder: Path) -> None:
        found[folder.name] = max(found.get(folder.name, 0), bytes_of(folder))

    def settled(self: Residuals, *arguments: Any) -> None:
        look(self._directory.parent)
        settle(self, *arguments)

    def written(path: Path, values: Values) -> Values:
        kept = write(path, values)
        look(path.parents[2])
        return kept

    monkeypatch.setattr(Residuals, "settle", settled)
    monkeypatch.setattr(inputs, "on_disk", written)
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_no_peer_needs_more_than_is_said_and_hardly_less(
    folder: Path, peaks: dict[str, int], overrides: tuple[str, ...]
) -> None:
    config = wide_config(*overrides)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(6)

    in_swarm(folder, play, config)
    need = DiskNeed.of(config, config.swarm.experts_per_peer)
    assert 0.75 * need.least < max(peaks.values()) <= need.least


def test_who_reduces_for_those_who_cannot_be_dialled_keeps_more(folder: Path, peaks: dict[str, int]) -> None:
    """Rounding errors of columns that it does not own."""
    config = wide_config("sync.codec=int4", TWO)
    columns = {"a": 4, "b": 4, "c": 1}

    async def play(swarm: MemorySwarm) -> None:
        swarm.network.hide("a", "b")
        await swarm.start_organiser()
        hidden = Intent(joining=True, max_columns=4, link_class=LINK_PRIVATE)
        others = (swarm.add(name, intent=Intent(joining=True, max_columns=1)) for name in ("c", "d"))
        await asyncio.gather(*(swarm.add(name, intent=hidden) for name in ("a", "b")), *others)
        await swarm.until_round(6)

    in_swarm(folder, play, config)
    assert len({path.name for path in folder.glob("c/residuals/*/handed/*.f32")}) > 1 + columns["c"]
    for name, owned in columns.items():
        need = DiskNeed.of(config, owned)
        checkpoints = 3 * 4 * Sizes.of(config.model).trained(owned) * (config.output.keep_checkpoints + 1)
        assert peaks[name] <= need.most - checkpoints
