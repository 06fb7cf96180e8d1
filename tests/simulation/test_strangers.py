"""Strangers who lie do what their attacks say, and what they do to a run is measured against one without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.loader import open_dataset
from tests.peer.real import SMALL, config_of, make_tokens
from tests.simulation.strangers import ATTACKS, Cast, Scene, Trial, disguised, mean_counted

ROOT = Path(__file__).parents[2]
TINY = (*SMALL, "model.num_layers=1", "model.num_experts=2", "swarm.experts_per_peer=1", "sync.merge_alpha=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


def trial(data: Path, cast: Cast, *overrides: str, plain: bool = False) -> Trial:
    config = config_of((*TINY, f"data.path={data}", *overrides))
    return Trial(config, open_dataset(config), cast, plain)


def test_a_disguised_change_is_as_long_and_as_near_to_the_mean_as_honest_ones() -> None:
    rng = np.random.default_rng(0)
    honest = rng.standard_normal(500) + rng.standard_normal((5, 500))
    harm = rng.standard_normal(500).astype(np.float32)
    scene = Scene(honest[0].astype(np.float32), honest.astype(np.float32), harm, rng)
    made = disguised(scene)
    lengths = np.linalg.norm(scene.honest, axis=1)
    assert np.linalg.norm(made) == pytest.approx(np.median(lengths), rel=1e-4)
    cosines = scene.honest @ scene.mean / lengths / np.linalg.norm(scene.mean)
    own = made @ scene.mean / np.linalg.norm(made) / np.linalg.norm(scene.mean)
    assert own == pytest.approx(np.median(cosines), rel=1e-3)
    across = made - scene.mean * (made @ scene.mean) / (scene.mean @ scene.mean)
    assert across @ harm > 0.9 * np.linalg.norm(across) * np.linalg.norm(harm)
    assert disguised(Scene(scene.own, scene.honest, np.zeros_like(harm), rng)) is scene.own


def test_the_gradient_is_that_along_which_the_loss_rises(data: Path) -> None:
    made = trial(data, Cast(3, 2, 1, "climb"))
    harm = made._harm([])
    made.base.update({block: values + np.float32(1e-3) * harm[block] for block, values in made.base.items()})
    assert made.loss(0, 0) > trial(data, Cast(2, 2)).loss(0, 0)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_with_liars_learns_nearly_as_without(data: Path, attack: str) -> None:
    lying = trial(data, Cast(5, 2, 3, attack))
    clean = trial(data, Cast(2, 2))
    assert lying.loss(2, 3) < clean.loss(2, 3) * 1.02
    counted = mean_counted([lying])
    assert counted is not None
    assert 0 <= counted <= 1
    if attack in ("turned-sign", "nothing", "inner-product"):
        assert counted == 0


def test_with_the_plain_mean_all_count_and_liars_harm(data: Path) -> None:
    lying = trial(data, Cast(5, 2, 3, "turned-sign"), plain=True)
    assert lying.loss(2, 3) > 1.001 * trial(data, Cast(2, 2)).loss(2, 3)
    assert mean_counted([lying]) == 1


@pytest.mark.parametrize("codec", ["int4", "ternary"])
def test_what_a_codec_loses_goes_along_the_next_time(data: Path, codec: str) -> None:
    made = trial(data, Cast(2, 2), f"sync.codec={codec}", f"sync.expert_codec={codec}")
    tiles = made.layout.tiles_of(1)
    before = made.base[1]
    wanted = np.random.default_rng(0).standard_normal(len(before)).astype(np.float32)
    arrived = [made._sent(0, tiles, before + wanted, before) - before for _ in range(16)]
    off = [np.linalg.norm(np.mean(arrived[:rounds], axis=0) - wanted) for rounds in (1, 16)]
    assert off[1] < 0.4 * off[0]


def test_the_script_prints_an_object_for_each_attack(data: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "bench_attacks.py"), "--attacks", "none", "row", "--seeds", "1"]
    size = ["--rounds", "1", "--steps", "1", "--peers", "4", "--trusted", "2", "--liars", "1", "--data", str(data)]
    small = ["--json", "--codec", "int4", "--tile-values", "1024", "--", *TINY]
    said = subprocess.run([*script, *size, *small], capture_output=True, text=True, check=True, timeout=120).stdout
    none, row = map(json.loads, said.splitlines())
    assert list(none) == ["attack", "liars", "loss", "clean_loss", "trusted_alone_loss", "counted"]
    assert (none["liars"], row["liars"]) == (0, 1)
    assert row["loss"] > 0
