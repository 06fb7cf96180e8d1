"""`export --push`: broken off here, where it takes no process, and gone on with as users do, with HF_ENDPOINT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import spes_p2p
from tests.interop.hub_server import HubServer, Refusal, hub_for
from tests.interop.states import OLMOE, run_config
from tests.peer.test_export import saved

NAME = "me/my-model"


def export(hub: HubServer, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_me",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "spes_p2p.cli.main", "export", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_export_pushes_and_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = saved(tmp_path / "peer", run_config(**OLMOE, vocab_size=257), tokenizer="byte")
    output, home = tmp_path / "out", tmp_path / "home"
    with hub_for(monkeypatch, home) as hub:
        hub.refuses = lambda asked: Refusal(507, "full") if asked.path.startswith("/lfs/") else None
        broken = spes_p2p("export", "--checkpoint", str(peer), "--output", str(output), "--push", NAME, "--public")
        assert broken.exit_code == 1
        fix = f"spes-p2p export --output {output} --push {NAME} --public"
        error, told = broken.errors.splitlines()[-2:]
        assert error.endswith(f": the hub answered 507 for {NAME}: full")
        assert told == f"Fix: continue with: {fix}"
        hub.refuses = lambda asked: None
        pushed = export(hub, home, *fix.split()[2:])
        assert (pushed.returncode, pushed.stderr) == (0, "")
        assert pushed.stdout == f"{hub.url}/{NAME}/tree/{hub.repositories[NAME].commits[-1][0]}\n"
        assert hub.files(NAME) == {path.name: path.read_bytes() for path in output.iterdir()}
        assert not hub.repositories[NAME].private


def test_a_wrong_name_is_told_before_anything_is_written(tmp_path: Path) -> None:
    answer = spes_p2p("export", "--checkpoint", ".", "--output", str(tmp_path / "out"), "--push", "my-model")
    assert ": 'my-model' names no model on the Hugging Face hub\nFix: write" in answer.errors
    assert list(tmp_path.iterdir()) == []
