"""scripts/venv.sh says what it installs, and nothing of what is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$*" in
    *importlib*torch) echo {torch} ;;
    *importlib*spes-p2p) echo {spes} ;;
    *) echo "$@" >> called; {install} ;;
esac
"""


def venv_script(folder: Path, torch: str, spes: str, install: str = "true") -> subprocess.CompletedProcess[str]:
    """What it does in `folder`, where these versions are installed and pip does `install`."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "venv.sh", folder / "scripts")
    (folder / "scripts" / "constraints.txt").write_text("torch==9.9.9\n")
    (folder / "pyproject.toml").touch()
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(torch=torch, spes=spes, install=install))
    python.chmod(0o755)
    return subprocess.run(
        [folder / "scripts" / "venv.sh", "dashboard"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("torch", "spes", "said"),
    [
        ("", "", ["installing torch==9.9.9", "installing spes-p2p[dashboard] (a few minutes the first time)"]),
        ("9.9.8", "0.1.0", ["installing torch==9.9.9", "installing spes-p2p[dashboard]"]),
        ("9.9.9+cpu", "0.1.0", ["installing spes-p2p[dashboard]"]),
    ],
)
def test_only_what_is_installed_is_said(tmp_path: Path, torch: str, spes: str, said: list[str]) -> None:
    result = venv_script(tmp_path, torch, spes)
    assert result.returncode == 0
    assert [line for line in result.stderr.splitlines() if line.startswith("installing")] == said
    called = (tmp_path / "called").read_text()
    assert len(called.splitlines()) == len(said)
    assert "--editable .[dashboard]" in called


def test_what_fails_is_named_and_tried_again_the_next_time(tmp_path: Path) -> None:
    result = venv_script(tmp_path, "9.9.9", "0.1.0", install="exit 1")
    assert result.returncode == 1
    assert f"fix: the end of {tmp_path}/.venv/pip.log says why" in result.stderr
    assert "--log .venv/pip.log" in (tmp_path / "called").read_text()
    assert not (tmp_path / ".venv" / ".installed").exists()
