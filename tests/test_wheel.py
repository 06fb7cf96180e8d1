"""The package as people install it: built, checked, and a wheel in an environment that has never seen a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 200.0


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What it printed; fails with all of it where it ended with an error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what `python -m build` makes of a clone: an sdist, and a wheel out of that."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("spes_p2p", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder], source)
    return folder


@pytest.fixture(scope="module")
def program(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`spes-p2p` out of the wheel, with the libraries of this environment and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("home")
    (wheel,) = built.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    run([sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", wheel], folder)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv/bin/spes-p2p"


def test_an_index_would_take_it(built: Path) -> None:
    packages = sorted(built.iterdir())
    assert [path.name.endswith(ends) for path, ends in zip(packages, (".whl", ".tar.gz"), strict=True)] == [True, True]
    assert run([sys.executable, "-m", "twine", "check", "--strict", *packages], built).count("PASSED") == 2


def test_the_installed_program_is_the_wheels_own(program: Path) -> None:
    python = program.with_name("python")
    said = run([python, "-c", "import spes_p2p; print(spes_p2p.__file__)"], program.parent)
    assert Path(said.strip()).is_relative_to(program.parents[1])


def test_it_knows_its_configs_and_pages_without_a_clone(program: Path) -> None:
    folder = program.parents[2]
    assert "join" in run([program, "--help"], folder)
    planned = run([program, "plan", "--config", "tiny"], folder)
    assert "parameters" in planned
    names = sorted(path.stem for path in (ROOT / "configs").rglob("*.yaml"))
    asked = "import sys; from spes_p2p.config.load import bundled_config as path, load_config as load\n"
    asked += "for name in sys.argv[1:]: load(path(name))"
    run([program.with_name("python"), "-c", asked, *names], folder)
    pages = {path.name for path in (ROOT / "spes_p2p/dashboard/static").iterdir()}
    (site,) = (program.parents[1] / "lib").glob("python*/site-packages")
    assert {path.name for path in (site / "spes_p2p/dashboard/static").iterdir()} == pages
    assert (site / "spes_p2p/py.typed").is_file()
    refused = subprocess.run([program, "plan", "--config", "tiny", "--uplink", "x"], capture_output=True, text=True)
    assert refused.stderr.startswith("Error E")


def test_help_of_every_command_loads_no_torch(program: Path) -> None:
    """Else each command, and each mistyped one, waits for seconds."""
    asked = "import sys; from spes_p2p.cli.main import main; sys.argv = ['spes-p2p', '--help']\ntry: main()\n"
    asked += "except SystemExit: pass\nprint(sorted({'torch', 'hivemind', 'transformers', 'numpy'} & set(sys.modules)))"
    said = run([program.with_name("python"), "-c", asked], program.parents[2])
    assert said.splitlines()[-1] == "[]"
