"""Tab in a real bash, and what zsh and fish are told: commands, options, choices, and else files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.cli.main import COMMANDS, GROUPS

Shell = Callable[[str], str]
Complete = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def script() -> str:
    """What is installed in bash."""
    command, wanted = [sys.executable, "-m", "spes_p2p.cli.main"], {"_SPES_P2P_COMPLETE": "source_bash"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | wanted).stdout


@pytest.fixture
def bash(tmp_path: Path) -> Shell:
    """Runs a script in a bash that finds the program and has a home and a folder of its own."""
    folders = [tmp_path / name for name in ("bin", "home", "work")]
    for folder in folders:
        folder.mkdir()
    program = folders[0] / "spes-p2p"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m spes_p2p.cli.main "$@"\n')
    program.chmod(0o755)
    root = str(Path(__file__).parents[2])
    own = {"PATH": f"{folders[0]}:{os.environ['PATH']}", "HOME": str(folders[1]), "PYTHONPATH": root}

    def run(script: str) -> str:
        command = ["bash", "--norc", "-c", script]
        result = subprocess.run(command, capture_output=True, text=True, cwd=folders[2], env=os.environ | own)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def tab(bash: Shell, script: str) -> Complete:
    """What bash proposes for the last word of a line, by the script that is installed."""

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        return bash(f"""{script}
            complete -p spes-p2p > /dev/null || exit 1
            COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
            _spes_p2p_completion spes-p2p
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """).split()

    return complete


def test_commands_and_options(tab: Complete) -> None:
    assert set(tab("spes-p2p ")) == {*COMMANDS, *GROUPS}
    assert tab("spes-p2p run in") == ["init", "inspect"]
    assert tab("spes-p2p join --max-da") == ["--max-data-disk"]


def test_values_that_are_known(tab: Complete) -> None:
    assert tab("spes-p2p join spes1abc --log-format ") == ["auto", "text", "json"]
    assert tab("spes-p2p join spes1abc --device c") == ["cpu", "cuda"]
    assert tab("spes-p2p join spes1abc --web-data p") == ["public"]


def test_where_a_path_is_wanted_the_shell_proposes_files(tab: Complete, script: str) -> None:
    """The script says `-o default`: no proposal of ours means those of bash."""
    assert tab("spes-p2p join --output ") == []
    assert tab("spes-p2p export --checkpoint pe") == []
    assert tab("spes-p2p plan --config runs/") == []
    assert "-o default" in script


def test_zsh_and_fish_are_told_the_same(bash: Shell) -> None:
    line = '_TYPER_COMPLETE_ARGS="spes-p2p join --log-format "'
    zsh = bash(f"{line} _SPES_P2P_COMPLETE=complete_zsh spes-p2p")
    fish = bash(f"{line} _TYPER_COMPLETE_FISH_ACTION=get-args _SPES_P2P_COMPLETE=complete_fish spes-p2p")
    assert all(choice in zsh for choice in ("auto", "text", "json"))
    assert fish.split() == ["auto", "text", "json"]
    for shell, words in (("zsh", "#compdef spes-p2p"), ("fish", "complete --command spes-p2p")):
        assert words in bash(f"_SPES_P2P_COMPLETE=source_{shell} spes-p2p")


def test_it_is_installed_for_the_shell_that_asks(bash: Shell, tmp_path: Path) -> None:
    assert "complete -o default -F _spes_p2p_completion spes-p2p" in bash("spes-p2p --show-completion; true")
    bash("spes-p2p --install-completion; true")
    assert "spes-p2p.sh" in (tmp_path / "home/.bashrc").read_text()
    assert bash('source "$HOME/.bashrc"; complete -p spes-p2p').startswith("complete -o default -F")
