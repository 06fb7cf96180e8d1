"""The oracle itself: worked by hand on small numbers, and sharp enough to see what it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spes_p2p.ids import PeerId
from spes_p2p.sync.dump import RoundDump
from tests import oracle
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.sync.swarm_cases import Blocks, Recorder, commits, in_swarm, small_config


def expert(layer: int, column: int, matrix: str = "gate") -> str:
    return f"model.layers.{layer}.mlp.experts.{column}.{matrix}_proj.weight"


def test_the_weighted_mean_by_hand() -> None:
    one = oracle.Contributor("a", 1, 10, {"x": np.array([1.0, 2.0]), expert(0, 0): np.array([5.0])})
    two = oracle.Contributor("b", 3, 20, {"x": np.array([5.0, 6.0])})
    slices = [oracle.SliceOf(0, 0, 2, ("a", "b")), oracle.SliceOf(1, 2, 1, ("a",))]
    after = oracle.round_result([one, two], slices, {expert(0, 1): np.array([7.0])}, 0.0, 4)
    assert after["x"].tolist() == [4.0, 5.0]
    assert after[expert(0, 0)].tolist() == [5.0]
    assert after[expert(0, 1)].tolist() == [7.0]
    assert oracle.next_step(100, [one, two]) == 118  # 17.5 is rounded up


def test_slices_of_one_block_with_different_contributors() -> None:
    peers = [oracle.Contributor(name, 1, 1, {"x": np.full(5, value)}) for name, value in (("a", 1.0), ("b", 3.0))]
    slices = [oracle.SliceOf(0, 0, 2, ("a", "b")), oracle.SliceOf(0, 2, 1, ("b",))]
    after = oracle.round_result(peers, slices, {}, 0.0, 4, tile_values=2)
    assert after["x"].tolist() == [2.0, 2.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("before", "after", "alpha"), [(0, 499, 0.0), (499, 500, 0.475), (500, 999, 0.0), (0, 10_000, 0.0), (0, 2000, 0.4)]
)
def test_when_and_how_strongly_a_round_merges(before: int, after: int, alpha: float) -> None:
    assert oracle.alpha_of(before, after, 500, 0.5, 10_000) == pytest.approx(alpha)


def test_a_merge_by_hand() -> None:
    """Experts 0 and 1 point alike in layer 0, 0 and 2 in layer 1; all matrices follow the gates."""
    gates = {0: {0: [1.0, 0.0], 1: [2.0, 0.1], 2: [-1.0, 1.0]}, 1: {0: [1.0, 0.0], 1: [-1.0, 0.0], 2: [5.0, 1.0]}}
    state = {expert(layer, e): np.array(gate) for layer, of in gates.items() for e, gate in of.items()}
    state |= {expert(0, e, "up"): np.array([float(e)]) for e in range(3)}
    after = oracle.merged(state, alpha=0.5, top_k=1)
    assert after[expert(0, 0)].tolist() == [1.5, 0.05]
    assert after[expert(1, 0)].tolist() == [3.0, 0.5]
    assert after[expert(0, 0, "up")].tolist() == [0.5]
    assert after[expert(0, 1, "up")].tolist() == [0.5]


def test_the_order_of_the_bytes() -> None:
    names = [expert(10, 0), expert(9, 0, "down"), expert(9, 1), expert(9, 0), "model.layers.10.x", "model.layers.9.x"]
    assert oracle.in_order([*names, "lm_head.weight", "model.norm.weight"]) == [
        "lm_head.weight", "model.layers.9.x", "model.layers.10.x", "model.norm.weight",
        expert(9, 0), expert(9, 0, "down"), expert(10, 0), expert(9, 1),
    ]  # fmt: skip


# ---- folders of dumps ----


@pytest.fixture
def dumps(folder: Path) -> Path:
    """What three peers dump of three rounds, the last two with merges."""
    config = small_config("sync.merge_interval=20", "sync.merge_alpha=0.3", "swarm.target_replicas=2")

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(4)
        chain = commits(swarm)
        for name in "abc":
            life = swarm.peers[PeerId(name)]
            dump = RoundDump(folder / "dumps" / name, swarm.layout, life.name, config.sync.merge_top_k)
            for round in (2, 3, 4):
                write(dump, life, recorder, chain[round - 1].manifest, chain[round].manifest)

    in_swarm(folder, play, config)
    return folder / "dumps"


def write(dump: RoundDump, life: PretendPeer, recorder: Recorder, parent: Any, manifest: Any) -> None:
    values = life.handed_in[parent.round].values
    state = Blocks(dict(enumerate(recorder.blocks[manifest.round])))
    dump.write(manifest, parent, Blocks(values), tuple(values), state)


def test_dumps_of_a_swarm_pass(dumps: Path) -> None:
    assert oracle.check_dumps(dumps, tile_values=128) == [2, 3, 4]


def tensor(path: str, change: Callable[[np.ndarray[Any, Any]], None]) -> Callable[[Path], None]:
    def spoil(dumps: Path) -> None:
        found = load_file(dumps / path)
        change(found["model.norm.weight"])
        save_file(found, dumps / path)

    return spoil


def field(path: str, name: str, value: Any) -> Callable[[Path], None]:
    def spoil(dumps: Path) -> None:
        about = json.loads((dumps / path / "round.json").read_text())
        about[name] = value
        (dumps / path / "round.json").write_text(json.dumps(about))

    return spoil


def for_all(spoil: Callable[[str], Callable[[Path], None]]) -> Callable[[Path], None]:
    def spoil_all(dumps: Path) -> None:
        for name in "abc":
            spoil(name)(dumps)

    return spoil_all


def shift(values: np.ndarray[Any, Any]) -> None:
    values[0] += 1e-4


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (tensor("a/round-000003/after.safetensors", shift), "model.norm.weight differs at"),
        (for_all(lambda name: tensor(f"{name}/round-000003/after.safetensors", shift)), "not to its model_hash"),
        (tensor("b/round-000003/before.safetensors", shift), r"round 3: model.norm.weight is off by"),
        (field("c/round-000004", "model_hash", "00"), "model_hash is 00 at c"),
        (for_all(lambda name: field(f"{name}/round-000004", "step", 41)), "the step is 41, not 40"),
        (for_all(lambda name: field(f"{name}/round-000004", "merge_alpha", 0.5)), "is off by"),
        (for_all(lambda name: field(f"{name}/round-000004", "merge_top_k", 1)), "is off by"),
    ],
)
def test_dumps_that_are_wrong_fail(dumps: Path, spoil: Callable[[Path], None], complaint: str) -> None:
    spoil(dumps)
    with pytest.raises(AssertionError, match=complaint):
        oracle.check_dumps(dumps, tile_values=128)


def test_dumps_that_are_missing_fail(dumps: Path) -> None:
    (dumps / "b" / "round-000003" / "round.json").unlink()
    with pytest.raises(AssertionError, match=r"no dump of the contributors \['b'\]"):
        oracle.check_dumps(dumps)
    with pytest.raises(AssertionError, match="has no dumps"):
        oracle.check_dumps(dumps / "nothing")
