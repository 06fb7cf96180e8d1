"""Scores of lm-evaluation-harness on tasks that lie here; nothing is fetched from anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from spes_p2p.errors import ConfigError, DataError
from spes_p2p.interop.evaluate import SUITES, evaluate, find_tasks
from spes_p2p.interop.tokenizer import Publishable
from tests.cli.conftest import spes_p2p
from tests.interop.states import OLMOE, model_of, random_state, run_config
from tests.interop.tasks import write_samples, write_task
from tests.interop.test_export import exported
from tests.peer.test_export import saved

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("accelerate", reason="the extra eval is not installed")
pytestmark = pytest.mark.timeout(400)

CONFIG = run_config(**OLMOE, vocab_size=257)
SAMPLES = [(f"number {n} is", [" even", " odd", " neither of both"], n % 2) for n in range(12)]
VARIABLE = "SPES_EVAL_DATA"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_task(tmp_path / "tasks", "parity", write_samples(tmp_path / "parity.jsonl", SAMPLES))
    return tmp_path / "tasks"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def expected_accuracy(samples: list[tuple[str, list[str], int]]) -> float:
    """With our own model: the choice with the highest log-probability after its query."""
    model = model_of(CONFIG, random_state(CONFIG)[1])
    right = 0
    for query, choices, gold in samples:
        scores = []
        for choice in choices:
            ids = list((query + choice).encode())
            with torch.no_grad():
                logits = model.logits(torch.tensor([ids]))[0].log_softmax(-1)
            first = len(query.encode())
            scores.append(sum(float(logits[at - 1, ids[at]]) for at in range(first, len(ids))))
        right += scores.index(max(scores)) == gold
    return right / len(samples)


def test_a_folder_scores_as_our_own_model_does(tmp_path: Path, tasks: Path) -> None:
    folder = exported(tmp_path / "hf", CONFIG, random_state(CONFIG)[1], tokenizer=Publishable("byte"))
    found = evaluate(folder, find_tasks("parity:0", tasks))
    scores = found["results"]["parity"]
    assert scores["acc,none"] == pytest.approx(expected_accuracy(SAMPLES))
    assert {"acc_norm,none", "acc_stderr,none"} <= scores.keys()
    assert (found["n-shot"]["parity"], found["n-samples"]["parity"]["effective"]) == (0, 12)
    limited = evaluate(folder, find_tasks("parity:2", tasks), limit=5)
    assert (limited["n-shot"]["parity"], limited["n-samples"]["parity"]["effective"]) == (2, 5)


def test_a_checkpoint_is_scored(tmp_path: Path, tasks: Path) -> None:
    peer = saved(tmp_path / "peer", CONFIG, tokenizer="byte")
    command = ("eval", "--checkpoint", str(peer), "--suite", "parity:0", "--include-path", str(tasks), "--limit", "4")
    shown = spes_p2p(*command, "--device", "cpu")
    assert shown.exit_code == 0
    assert [name in shown.output for name in ("parity", "acc_norm", "Stderr")] == [True, True, True]
    found = json.loads(spes_p2p(*command, "--device", "cpu", "--json").output)
    assert found["n-samples"]["parity"]["effective"] == 4
    assert 0 <= found["results"]["parity"]["acc,none"] <= 1


@pytest.mark.parametrize("wrong", ["", "sciq,", "sciq:many"])
def test_what_is_no_list_of_tasks_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is neither a suite nor a list of tasks"):
        find_tasks(wrong)


def test_the_harness_has_all_tasks_of_the_suites(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="the harness has no task 'parity'"):  # and all the others, then
        find_tasks(",".join((*SUITES.values(), "parity")))
    with pytest.raises(ConfigError, match="is not a folder"):
        find_tasks("parity", tasks / "nowhere")


def test_what_cannot_be_evaluated_is_named(tmp_path: Path, tasks: Path) -> None:
    parity = find_tasks("parity", tasks)
    folder = exported(tmp_path / "hf", CONFIG, random_state(CONFIG)[1])
    with pytest.raises(DataError, match="has no tokenizer"):
        evaluate(folder, parity)
    Publishable("byte").save(folder, 32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"the model in .* cannot be loaded"):
        evaluate(folder, parity)
    exported(tmp_path / "again", CONFIG, random_state(CONFIG)[1], tokenizer=Publishable("byte"))
    with pytest.raises(DataError, match="longer than the model's context of 3 tokens"):
        evaluate(tmp_path / "again", parity, max_length=3)
    (tmp_path / "parity.jsonl").unlink()
    with pytest.raises(DataError, match="the data of task parity cannot be loaded"):
        evaluate(folder, parity)


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder of evaluation data")
def test_real_tasks_over_files_of_ones_own(tmp_path: Path) -> None:
    data = Path(os.environ[VARIABLE])
    names = sorted(path.stem for path in data.glob("*.jsonl"))
    assert names
    for name in names:
        write_task(tmp_path / "tasks", f"local_{name}", data / f"{name}.jsonl")
    folder = exported(tmp_path / "hf", CONFIG, random_state(CONFIG)[1], tokenizer=Publishable("byte"))
    tasks = find_tasks(",".join(f"local_{name}:0" for name in names), tmp_path / "tasks")
    found = evaluate(folder, tasks, limit=10, max_length=2000)["results"]
    assert set(found) == {f"local_{name}" for name in names}
    for name in names:
        lines = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()[:10]]
        samples = [(line["query"], [f" {choice}" for choice in line["choices"]], line["gold"]) for line in lines]
        assert found[f"local_{name}"]["acc,none"] == pytest.approx(expected_accuracy(samples), abs=0.11)
