"""The names for programs of one's own: cheap to import, and the example of the docs runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spes_p2p
from spes_p2p.errors import ConfigError

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


@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_two_processes_train_a_model_of_their_own(tmp_path: Path) -> None:
    """The script of the docs as organiser and as peer; who has no model, or another one, is refused."""
    script = [sys.executable, "-u", str(ROOT / "docs" / "own_model.py")]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen([*script, "organise", str(tmp_path / "first")], **options) as organiser:
        assert organiser.stdout is not None
        try:
            address = next(line for line in organiser.stdout if "address" in line).split()[-1]
            for model, words in ((None, "a custom model of its organiser"), (other_model(), "another model")):
                refused = spes_p2p.Peer(
                    address, tmp_path / words, ("/ip4/127.0.0.1/tcp/0",), data=tmp_path / "first" / "tokens",
                    device="cpu", model=model,
                )  # fmt: skip
                with pytest.raises(ConfigError, match=words):
                    refused.train()
            second = subprocess.run([*script, "join", str(tmp_path / "second"), address], timeout=300, **options)
            told = organiser.stdout.read()
            assert organiser.wait(60) == 0, told
        finally:
            organiser.kill()
    assert second.returncode == 0, second.stdout[-2000:]
    roots = [set(re.findall(r"^round 2 .*, model (\w+)", text, re.MULTILINE)) for text in (told, second.stdout)]
    assert roots[0] == roots[1]
    assert len(roots[0]) == 1
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", told + second.stdout)]
    assert min(losses) < 4.0 < max(losses)
    assert "trained: 21061 values" in told


def other_model() -> Any:
    from torch import nn

    return spes_p2p.Model(lambda: nn.Linear(2, 2), lambda module, tokens: module.weight.sum())
