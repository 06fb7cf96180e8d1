"""The benchmarks' trainer, and that their scripts know what they are about, without a GPU."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

from tests.simulation.training_bench import measure, random_batch, random_trainer
from tests.train.small import CPU, small_config

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_a_trainer_of_random_values_trains() -> None:
    config = small_config()
    trainer, batch = random_trainer(config, owned=2, device=CPU), random_batch(config)
    losses: list[float] = []

    def step() -> None:
        losses.append(trainer.train_step(batch).loss)

    measured = measure(step, CPU, repeats=3, warm_up=1)
    assert trainer.learner.owned == (0, 1)
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert measured.seconds > 0
    assert measured.peak_bytes == 0


def test_a_training_step_is_timed_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPTS / "bench_train.py"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = "bench_train.py --only ours --micro-batches 1 --repeats 1 --profile 3"
    monkeypatch.setattr("sys.argv", words.split())
    assert script["main"]() == 0
    said = capsys.readouterr().out
    assert "no GPU here" in said
    assert "ours, 4 of 16 columns" in said
    assert "does not run here" not in said
    assert said.count(" ms ") == 1 + 3
    assert "ms of a step in kernels" in said
