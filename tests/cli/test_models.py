"""The commands for models: what they print, what they warn of, and one line for what is wrong."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from spes_p2p.peer.export import ExportOptions
from tests.cli.conftest import spes_p2p
from tests.cli.test_errors import NOBODY, refused
from tests.interop.test_importing import qwen3 as moe
from tests.interop.test_upcycle import qwen3


def test_upcycle_then_import(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path / "dense")
    dense, start = ("--dense", str(tmp_path / "dense")), tmp_path / "start"
    made = spes_p2p("upcycle", *dense, "--output", str(start), "--experts", "4", "--dtype", "bf16")
    assert (made.exit_code, made.errors) == (0, "")
    assert f"--init-from {start}" in made.output
    read = spes_p2p("import", str(start), "--output", str(tmp_path / "section.yaml"))
    assert read.output == (start / "model.yaml").read_text() == (tmp_path / "section.yaml").read_text()
    assert yaml.safe_load(read.output)["model"]["num_experts"] == 4
    config = tmp_path / "section.yaml"
    config.write_text("run: mine")
    over = spes_p2p("import", str(start), "--output", str(config))
    assert (over.exit_code, f"{config} already exists" in over.errors, config.read_text()) == (1, True, "run: mine")
    nowhere = spes_p2p("import", str(start), "--output", "/proc/section.yaml")
    assert (nowhere.exit_code, "/proc/section.yaml cannot be written" in nowhere.errors) == (1, True)
    again = spes_p2p("upcycle", *dense, "--output", str(start))
    assert (again.exit_code, "already exists" in again.errors) == (1, True)


def test_an_export_of_nothing_or_of_two_things_has_a_code(tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "model"))
    nothing = spes_p2p("export", *output).errors
    both = spes_p2p("export", "--checkpoint", "peer", "--initial-peers", "/ip4/127.0.0.1/tcp/1", *output).errors
    assert re.match(r"Error E\d{3}: neither --checkpoint nor a live run was given\n", nothing)
    assert re.match(r"Error E\d{3}: both --checkpoint and a live run were given\n", both)


def test_a_router_of_zeros_is_warned_of(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path / "dense")
    command = ("upcycle", "--dense", str(tmp_path / "dense"), "--output", str(tmp_path / "start"))
    assert "makes every top-k a tie" in spes_p2p(*command, "--router-init", "zeros").errors


def test_a_published_model_whose_router_never_learns_is_imported_with_a_warning(tmp_path: Path) -> None:
    for one, warns in ((1, True), (2, False)):
        folder = tmp_path / str(one)
        moe(norm_topk_prob=True, num_experts_per_tok=one).save_pretrained(folder)
        answer = spes_p2p("import", str(folder))
        assert answer.exit_code == 0
        assert ("warning: model.top_k is 1 with model.norm_topk=true" in answer.errors) is warns
        assert yaml.safe_load(answer.output)["model"]["top_k"] == one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither --checkpoint nor a live run was given"),
        (("--checkpoint", "x", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm"), "both --checkpoint and"),
        (("--checkpoint", "nowhere"), "there is no folder nowhere"),
        (("--checkpoint", ".", "--max-shard-size", "big"), "--max-shard-size 'big' is not a number of bytes"),
        (("--checkpoint", ".", "--tokenizer", "nowhere.json"), "cannot be loaded"),
    ],
)
def test_export_says_what_is_wrong(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    answer = spes_p2p("export", "--output", str(tmp_path / "out"), *arguments)
    assert answer.exit_code == 1
    assert message in answer.errors
    assert "\nFix: " in answer.errors
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_an_evaluation_is_told_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*source: object) -> Path:
        raise AssertionError("a model is fetched")

    monkeypatch.setattr("spes_p2p.interop.hub.model_folder", fetch)
    monkeypatch.setattr("spes_p2p.peer.export.run_export", fetch)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    for model in (("somebody/a-model",), ("--checkpoint", str(tmp_path)), ("--initial-peers", NOBODY)):
        refused(spes_p2p("eval", *model), "lm-eval cannot be imported", "scripts/venv.sh eval")


def test_an_evaluation_that_is_ended_leaves_no_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_heeded(number: int, frame: object) -> None:
        raise AssertionError("the process would end at once")

    def export(source: ExportOptions, *told: object) -> None:
        source.output.mkdir()
        (source.output / "model.safetensors").write_bytes(b"large")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("spes_p2p.interop.evaluate.find_tasks", lambda *asked: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("spes_p2p.peer.export.run_export", export)
    before = signal.signal(signal.SIGTERM, not_heeded)
    try:
        ended = spes_p2p("eval", "--initial-peers", NOBODY)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code != 0
    assert list(tmp_path.iterdir()) == []
