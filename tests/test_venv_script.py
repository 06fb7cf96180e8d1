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
    *) echo "$@" >> called ;;
esac
"""


@pytest.mark.parametrize(
    ("torch", "spes", "said"),
    [
        ("", "", ["installing torch==9.9.9", "installing spes-p2p[dashboard] (a few minutes the first time)"]),
        ("9.9.8", "0.1.0", ["installing torch==9.9.9", "installing spes-p2p[dashboard]"]),
        ("9.9.9+cpu", "0.1.0", ["installing spes-p2p[dashboard]"]),
    ],
)
def test_only_what_is_installed_is_said(tmp_path: Path, torch: str, spes: str, said: list[str]) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "constraints.txt").write_text("torch==9.9.9\n")
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(torch=torch, spes=spes))
    python.chmod(0o755)
    result = subprocess.run(
        [tmp_path / "scripts" / "venv.sh", "dashboard"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line for line in result.stderr.splitlines() if line.startswith("installing")] == said
    called = (tmp_path / "called").read_text()
    assert len(called.splitlines()) == len(said)
    assert "--editable .[dashboard]" in called
