"""The comparison of methods: what its arms are, what it refuses, what it runs again, and the page that it writes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.comparison import outcomes
from scripts.comparison.arms import ARMS, BENCHMARKS, Setting, steps_of
from scripts.comparison.outcomes import Job, Outcome, Results
from scripts.comparison.page import SHORT, bytes_table, loss_at, table
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from tests.peer.real import SMALL, make_tokens
from tests.simulation.training_swarm import Point

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = Path("tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


def setting(*given: str, steps: int = 800) -> Setting:
    named = BENCHMARKS["small-cpu"]
    return Setting(TINY, steps, named.peers, named.steps_per_round, named.overrides, given)


def schedule(config: Config) -> tuple[int, int, int]:
    return config.scheduler.total_steps, config.scheduler.warmup_steps, config.scheduler.decay_steps


def test_the_learning_rate_falls_until_the_training_ends(tmp_path: Path) -> None:
    """The benchmark's results were made with these numbers."""
    assert schedule(setting().config_of("spes", 0, tmp_path)) == (800, 80, 160)
    short = setting(steps=100)
    assert schedule(short.config_of("wsd", 0, tmp_path)) == (100, 25, 20)
    assert short.config_of("wsd", 0, tmp_path).scheduler.name == "wsd"
    assert schedule(setting("scheduler.warmup_steps=60", steps=100).base) == (100, 60, 20)
    assert schedule(setting("scheduler.total_steps=1000", steps=100).base) == (1000, 80, 200)
    assert schedule(Setting(TINY, 4, 2, 4).base) == (4, 1, 1)


@pytest.mark.parametrize(
    ("override", "arms", "said"),
    [
        ("sync.merge_alpha=0.1", ("diloco", "spes", "merge"), "is set by the arms diloco, spes: "),
        ("sync.steps_per_round=5", ("spes",), "sync.steps_per_round is set by the arm spes: "),
        ("swarm.min_peers=3", ("spes",), "swarm.min_peers is set by the arm spes"),
        ("optimizer.name=adamw", ("spes", "muon"), "optimizer.name is set by the arm muon"),
        ("run.seed=3", ("spes",), "run.seed is set by --seeds"),
        ("data.path=here", ("spes",), "data.path is set by --data"),
    ],
)
def test_an_override_that_an_arm_would_ignore_is_refused(override: str, arms: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        setting(override).check(arms)


@pytest.mark.parametrize(
    ("override", "arm"),
    [
        ("sync.merge_alpha=0.1", "merge"),
        ("optimizer.batch_sequences=4", "centralized"),
        ("optimizer.micro_batch_sequences=2", "centralized"),
        ("swarm.target_replicas=1", "spes"),
        ("sync.expert_rounds=5", "spes-often"),
    ],
)
def test_an_override_that_an_arm_follows_is_not(override: str, arm: str, tmp_path: Path) -> None:
    setting(override).check([arm])
    section, name = override.split("=")[0].split(".")
    config = setting(override).config_of(arm, 0, tmp_path)
    expected = 4 * 4 if (arm, name) == ("centralized", "batch_sequences") else float(override.split("=")[1])
    assert getattr(getattr(config, section), name) == expected


def test_rounds_are_not_cut_short() -> None:
    with pytest.raises(ConfigError, match="--steps 120 is no multiple of --steps-per-round 50") as found:
        setting(steps=120).check(["spes"])
    assert found.value.fix.startswith("use --steps 150")
    assert steps_of(setting().config_of("spes", 0, Path()), 800) == 800
    assert steps_of(setting().config_of("rising", 0, Path()), 800) > 800


@pytest.mark.parametrize(("batch", "others", "own"), [(9, 36, 32), (1, 4, 8)])
def test_all_arms_have_the_same_data(batch: int, others: int, own: int) -> None:
    asked = setting(f"optimizer.batch_sequences={batch}", "optimizer.micro_batch_sequences=1")
    asked.check([arm for arm in ARMS if not arm.startswith("eight-peers")])
    said = f"is {batch}, .* other arms has {others} sequences, but of eight-peers {own}, eight-peers-muon-int4 {own}$"
    with pytest.raises(ConfigError, match=said) as found:
        asked.check(["spes", "eight-peers", "eight-peers-muon-int4"])
    assert found.value.fix.startswith("make it even")
    setting().check(list(ARMS))


def test_an_unknown_arm_is_named() -> None:
    with pytest.raises(ConfigError, match="--arms has 'dilco', an unknown arm") as found:
        setting().check(["dilco"])
    assert found.value.fix == "did you mean diloco?"


def job(data: Path, arm: str = "spes", **changes: Any) -> Job:
    few = Setting(TINY, 4, 2, 4, given=tuple(text for text in SMALL if not text.startswith("sync.")))
    return Job(arm, 0, few.config_of(arm, 0, data), 4, CPU, **changes)


def test_what_other_code_has_made_is_run_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, one = tmp_path / "mine.json", job(data)
    Results(path).add(outcome("spes", key=one.key, code=one.code))
    assert Results(path).reused([one, job(data, "diloco")], print) == [job(data, "diloco")]
    assert capsys.readouterr().out == f"seed 0, spes: 2.0000 (from {path})\n"
    monkeypatch.setattr(outcomes, "code_hash", lambda: "other")
    assert Results(path).reused([one], print) == [one]
    said = capsys.readouterr().out
    assert said == f"{path}: made by other code, and run again: spes\n"


def test_a_file_of_an_older_version_says_that_it_is_run_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    old = [dataclasses.asdict(outcome(arm)) for arm in ("spes", "diloco")]
    for one in old:
        del one["code"]
    path.write_text(json.dumps(old))
    results, asked = Results(path), [job(data, "diloco"), job(data, "spes")]
    assert results.reused(asked, print) == asked
    assert capsys.readouterr().out == f"{path}: made by other code, and run again: spes, diloco\n"
    results.add(outcome("spes", key=asked[1].key, code=asked[1].code))
    assert [one.arm for one in Results(path).found] == ["diloco", "spes"]


def test_the_code_is_all_of_the_package_but_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(outcomes, "PACKAGE", tmp_path)
    monkeypatch.setattr(outcomes, "OWN", tmp_path / "own")
    hashes: list[str] = []
    for file in ("a.py", "own/b.py", "a.py"):
        (tmp_path / file).write_text(f"change = {len(hashes)}")
        hashes.append(outcomes.code_hash.__wrapped__())
    assert hashes[0] == hashes[1] != hashes[2]


def outcome(arm: str, loss: float = 2.0, sent: int = 100, seed: int = 0, key: str = "", code: str = "") -> Outcome:
    """Of two peers, with two rounds that sent as much each."""
    points = [Point(0, 0, 0, 0, 5.0), Point(1, 4, 9, sent, loss + 1), Point(2, 8, 18, 2 * sent, loss)]
    return Outcome(arm, seed, loss, 2 * sent, 10, 20, 2, 18, 2, 1.0, key, tuple(points), code)


def test_rows_follow_the_arms_that_were_asked_for_and_differences_the_reference() -> None:
    found = [outcome("centralized", 1.0), outcome("spes", 2.0), outcome("diloco", 1.5), outcome("spes", 2.1, seed=1)]
    rows = table(found, ["diloco", "spes", "centralized"], "spes")
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| diloco", "| spes", "| centralized"]
    assert " | seeds | against spes | pairs | " in rows[0]
    assert rows[2].split(" | ")[3:6] == ["1", "-0.5000", "1"]
    assert rows[3].split(" | ")[3:6] == ["2", "", ""]


def test_losses_at_equal_bytes_begin_with_the_first_sync() -> None:
    found = [outcome("spes"), outcome("diloco", sent=400), outcome("centralized", sent=10)]
    head, _, diloco, spes, centralized = bytes_table(found, ["diloco", "spes", "centralized"], "spes")
    assert head == "| arm | 50 B | 100 B | 200 B | 400 B |"
    assert diloco == "| diloco | - | - | 3.0000 | 2.0000 |"
    assert spes == "| spes | 3.0000 | 2.0000 | (2.0000) | (2.0000) |"
    assert centralized == "| centralized | (2.0000) | (2.0000) | (2.0000) | (2.0000) |"
    assert loss_at(found[0], 75) == (2.5, False)
    assert math.isnan(loss_at(found[0], 49)[0])
    assert bytes_table(found[:1], ["spes"], "diloco") == []


def compare(*words: object) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "compare.py"))
    small = [text for text in SMALL if not text.startswith("sync.")]
    steps = ["--steps", "4", "--steps-per-round", "4", "--peers", "2", "--device", "cpu"]
    script["main"]([*steps, *small, *map(str, words)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "some",
    [
        ("centralized", "diloco", "spes", "two-periods", "int4", "muon"),
        pytest.param((), marks=pytest.mark.thorough),
    ],
    ids=["some", "all"],
)
def test_the_comparison_writes_a_table_of_its_arms_and_does_not_run_them_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], some: tuple[str, ...]
) -> None:
    page, points = tmp_path / "results.md", tmp_path / "points.json"
    files = ["--data", data, "--output", page, "--json", points, "--jobs", 1]
    chosen = ("--arms", *some) if some else ()
    compare(*files, *chosen, "--seeds", 0)
    arms = list(some or ARMS)
    text = page.read_text()
    for arm in arms:
        assert f"| {arm} | " in text
    found = {one["arm"]: one for one in json.loads(points.read_text())}
    assert list(found) == arms
    assert found["centralized"]["trained_bytes"] > found["spes"]["trained_bytes"]
    assert found["diloco"]["bytes_sent"] > found["spes"]["bytes_sent"] > 0
    capsys.readouterr()
    begin, end = SHORT
    short = f"# Results\n\n{begin}\n\nSPES sends less.\n\n{end}\n\n"
    page.write_text(f"{text.replace('# Results', short.rstrip(), 1)}\n## What it says\n\nDiLoCo sends more.\n")
    compare(*files, "--arms", "spes", "diloco", "--seeds", 0, 1)
    text = page.read_text()
    assert text.startswith(f"{short}<!-- Written by")
    assert text.endswith("\n## What it says\n\nDiLoCo sends more.\n")
    assert text.count("# Results") == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "begins" in line] == [
        "3 of 4: seed 1, spes begins",
        "4 of 4: seed 1, diloco begins",
    ]
    assert said[0] == f"seed 0, spes: {found['spes']['loss']:.4f} (from {points})"
    curve = re.findall(
        r"^seed 1, spes: \d\.\d{4} after (\d) of 4 steps, all peers have sent \d+\.\d MB$", "\n".join(said), re.M
    )
    assert curve == ["0", "4"]
    assert re.fullmatch(r"seed 1, spes: \d\.\d{4} \(\d+ s of processor time\)", said[3 + len(curve)])
    assert "±" in text
    assert "2 seeds. Optimizer adamw, learning rate 0.002 after 1 steps of warm-up, then cosine" in text
    assert re.search(r"on cpu, trained on .* \(dataset [0-9a-f]{16}\), with the code of (commit|no commit)", text, re.I)
    (line,) = re.findall(r"^    (python scripts/compare.py .+)$", text, re.M)
    words = shlex.split(line)
    assert f"--data {data} --steps 4 --peers 2" in line
    assert line.endswith(f"--arms spes diloco --against spes --seeds 0 1 --device cpu --output {page} --json {points}")
    runpy.run_path(str(ROOT / "scripts" / "compare.py"))["main"](words[2:])  # the same again
    assert page.read_text() == text
    assert [one for one in json.loads(points.read_text()) if one["seed"] == 0] == list(found.values())


def test_overrides_may_stand_anywhere_and_what_cannot_be_written_is_said_at_once(data: Path, tmp_path: Path) -> None:
    files = ["--data", data, "--jobs", 1, "--arms", "spes"]
    with pytest.raises(ConfigError, match=r"sync\.merge_alpha is set by the arm spes"):
        compare(*files, "--seeds", 0, "sync.merge_alpha=0.1")
    with pytest.raises(ConfigError, match=r"unknown key model\.width"):
        compare("model.width=3", *files)
    with pytest.raises(ConfigError, match=r"unknown key model\.width"):
        compare(*files, "model.width=3", "--output", "")
    for option in ("--json", "--output"):
        with pytest.raises(ConfigError, match=f"{option} .*: the folder .* does not exist"):
            compare(*files, option, tmp_path / "none" / "file")
    with pytest.raises(ConfigError, match="--against merge is none of --arms"):
        compare(*files, "--against", "merge")
    (tmp_path / "old.json").write_text("a story")
    with pytest.raises(ConfigError, match="is no file of results"):
        compare(*files, "--json", tmp_path / "old.json")


@pytest.mark.parametrize("option", ["--peers", "--steps", "--steps-per-round", "--jobs"])
@pytest.mark.parametrize("number", ["0", "-5", "1e3"])
def test_numbers_that_make_no_comparison_are_refused(
    option: str, number: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare("--data", data, "--arms", "spes", "--output", "", option, number)
    assert f"argument {option}: '{number}' is not a whole number, 1 or more" in capsys.readouterr().err


def test_arms_that_do_not_go_with_an_override_are_left_out_with_a_word(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = runpy.run_path(str(ROOT / "scripts" / "compare.py"))["fits"]
    turns = Setting(Path("tiny"), 4, 2, 4, given=("sync.vocabulary_rounds=2",))
    assert [fits(turns, arm, data) for arm in ("spes", "diloco", "nesterov")] == [True, True, False]
    assert "nesterov is left out: sync.outer is nesterov, whose steps" in capsys.readouterr().out


def test_the_page_is_written_here_unless_told_otherwise() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "compare.py"))
    assert script["parse"]([]).output == "compare.md"
    assert script["parse"](["--arms", "diloco", "merge"]).against == "diloco"
    assert script["parse"](["--arms", "diloco", "spes"]).against == "spes"


@pytest.mark.timeout(300)
def test_arms_that_run_side_by_side_give_what_they_give_alone(data: Path, tmp_path: Path) -> None:
    files = [tmp_path / "alone.json", tmp_path / "together.json"]
    for jobs, path in zip((1, 2), files):
        compare("--data", data, "--arms", "spes", "merge", "--output", "", "--json", path, "--jobs", jobs)
    alone, together = ([one["points"] for one in json.loads(path.read_text())] for path in files)
    assert alone == together


@pytest.mark.sampled(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_leaves_no_folder(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """What a SIGKILL leaves is removed by the next one."""
    script, temporary = str(ROOT / "scripts" / "compare.py"), tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    small = [text for text in SMALL if not text.startswith("sync.")]
    arguments = [
        "--data",
        str(data),
        "--peers",
        "2",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "page.md"),
        "--jobs",
        "1",
        "--arms",
        "spes",
        "diloco",
    ]
    with subprocess.Popen(
        [sys.executable, script, *arguments, "--steps", "9000", *small],
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None,
    ) as process:  # a shell in the background has SIGINT ignored
        until = time.monotonic() + 120.0
        while not list(temporary.glob("spes-p2p-compare-*/*/*")) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert ("stopped; 0 of 2 are lost without --json" in said) is (number != signal.SIGKILL)
    left = list(temporary.iterdir())
    assert bool(left) is (number == signal.SIGKILL)
    if left:
        code = "from spes_p2p.locks import Scratch; Scratch('spes-p2p-compare-').remove()"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        assert not list(temporary.iterdir())


def test_a_signal_is_heeded_that_comes_while_an_object_is_cleared_away(tmp_path: Path) -> None:
    """Python drops what a handler raises then."""
    code = """
import os, signal, sys, time
sys.path.insert(0, "scripts")
import compare

class Cleared:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

with compare.working_folder():
    Cleared()
    print("dropped", flush=True)
    time.sleep(60)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "dropped\n"
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
