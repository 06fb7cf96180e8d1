"""Runs a launch script of bootstrap/ with a program that prints its arguments in the place of spes-p2p."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "bootstrap"


def run_script(name: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPES_")}
    return subprocess.run(
        [str(SCRIPTS / name), *arguments],
        env=clean | {"SPES_PROGRAM": str(program)} | environment,
        capture_output=True,
        text=True,
    )
