"""The names for programs of one's own: cheap to import, and the example of the docs runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import spes_p2p

ROOT = Path(__file__).parents[1]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import spes_p2p, sys; print(sorted({'torch', 'hivemind', 'transformers', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_all_names_are_there_and_no_others() -> None:
    for name in spes_p2p.__all__:
        assert getattr(spes_p2p, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = spes_p2p.Nothing


def test_a_run_knows_its_config() -> None:
    run = spes_p2p.Run("tiny", "swarm.min_peers=1")
    assert run.config.swarm.min_peers == 1
    assert run.fingerprint != spes_p2p.Run("tiny").fingerprint


@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "api_example.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=380)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "run tiny: round 2, step 40" in result.stdout
    assert "'def " in result.stdout
