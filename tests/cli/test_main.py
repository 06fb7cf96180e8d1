"""The program around the commands: light help, one line for known errors, exit codes."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from spes_p2p import __version__
from spes_p2p.cli.main import COMMANDS, GROUPS, INTERRUPTED, PANELS, build, error_lines, main
from spes_p2p.errors import ConfigError
from spes_p2p.observe.text import to_type
from tests.cli.conftest import Organiser

SAMPLE = build(
    {name: f"tests.cli.sample_commands:{name}" for name in ("greet", "known", "lasting", "bug", "interrupted")}
)
HEAVY_TO_IMPORT = ("torch", "transformers", "hivemind", "numpy")
HEAVY = ("torch", "transformers", "hivemind", "numpy", "pydantic", "yaml", "tokenizers", "pyarrow")


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spes_p2p.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_commands_run_with_their_own_arguments() -> None:
    result = CliRunner().invoke(SAMPLE, ["greet", "anna", "--times", "2"])
    assert (result.exit_code, result.stdout) == (0, "hello anna\nhello anna\n")


def test_known_error_is_two_lines_and_exit_code_1() -> None:
    result = CliRunner().invoke(SAMPLE, ["known"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: x is 3\nFix: make it 2\n")


def test_what_no_restart_mends_has_a_code_of_its_own() -> None:
    result = CliRunner().invoke(SAMPLE, ["lasting"])
    assert (result.exit_code, result.stderr) == (3, "Error: run x is over\nFix: join another\n")


def test_commands_are_printed_as_this_machine_can_type_them(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("no invitation", fix="type spes-p2p join spes1...")
    assert error_lines(error).endswith("\nFix: type spes-p2p join spes1...")
    monkeypatch.setenv("SPES_CALLED_AS", "clone/scripts/spes-p2p.sh")
    assert error_lines(error).endswith("\nFix: type clone/scripts/spes-p2p.sh join spes1...")


def test_a_command_is_named_as_this_one_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPES_CALLED_AS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [".venv/bin/spes-p2p", "join"])
    assert to_type("type spes-p2p join; not one of spes-p2p, nor /home/spes-p2p there") == (
        "type .venv/bin/spes-p2p join; not one of spes-p2p, nor /home/spes-p2p there"
    )
    (tmp_path / "spes-p2p").touch(mode=0o755)
    assert to_type("spes-p2p join") == "spes-p2p join"


def test_join_ends_at_once_with_all_that_it_said(tmp_path: Path) -> None:
    result = program("join", "--output", str(tmp_path))
    assert (result.returncode, result.stderr.count("\n")) == (3, 2)
    assert "no invitation was given" in result.stderr


def test_interrupt_exits_130_without_a_traceback() -> None:
    result = CliRunner().invoke(SAMPLE, ["interrupted"])
    assert (result.exit_code, result.stderr) == (INTERRUPTED, "")


def test_an_interrupt_while_the_commands_are_loaded_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(commands: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("spes_p2p.cli.main.build", interrupted)
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == INTERRUPTED


def test_an_interrupt_is_not_lost_to_who_swallows_it_while_torch_is_loaded() -> None:
    code = """
import os, signal
from spes_p2p.cli.showing import loading_torch
try:
    with loading_torch():
        pass
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("afterwards as ever", flush=True)
with loading_torch():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
print("lost")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "afterwards as ever\n")


def test_a_bug_keeps_its_traceback() -> None:
    result = CliRunner().invoke(SAMPLE, ["bug"])
    assert isinstance(result.exception, RuntimeError)


def test_wrong_arguments_exit_2() -> None:
    assert CliRunner().invoke(SAMPLE, ["greet"]).exit_code == 2
    assert program("no-such-command").returncode == 2


def test_version() -> None:
    result = program("--version")
    assert (result.returncode, result.stdout) == (0, f"spes-p2p {__version__}\n")


def test_help_lists_every_command() -> None:
    result = program("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str) -> None:
    result = CliRunner().invoke(build(COMMANDS), [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    module, _, function = COMMANDS[name].partition(":")
    assert getattr(importlib.import_module(module), function).__doc__


def test_a_kept_invitation_is_shown_without_loading_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "invite.txt").write_text("spes1abc\n")
    code = (
        "import sys; from spes_p2p.cli.main import COMMANDS, build; "
        f"build(COMMANDS)(['invite', '--folder', {str(tmp_path)!r}], standalone_mode=False); "
        f"print('loaded:', sorted(set({HEAVY_TO_IMPORT}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "spes1abc\nloaded: []\n", result.stdout + result.stderr


def test_help_has_an_example_everywhere() -> None:
    pages = [[], *([name] for name in (*COMMANDS, *GROUPS))]
    pages += [[group, name] for group, (_, inner) in GROUPS.items() for name in inner]
    for page in pages:
        text = " ".join(CliRunner().invoke(build(COMMANDS), [*page, "--help"]).stdout.split())
        assert " ".join(("Example: spes-p2p", *page)) in text, page


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from spes_p2p.cli.main import COMMANDS, build; "
        "build(COMMANDS)(['--help'], standalone_mode=False); "
        f"print('loaded:', sorted(set({HEAVY}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("loaded: []\n"), result.stdout + result.stderr


def test_a_bootstrap_node_answers_prometheus(organiser: Organiser) -> None:
    (told,) = (line for line in organiser.said if line.startswith("metrics: "))
    with urllib.request.urlopen(told.removeprefix("metrics: ")) as answer:
        text = answer.read().decode()
    assert re.search(r'^spes_p2p_bootstrap_data_pieces\{peer="Qm\w+",run_id="tiny"\} [1-9]', text, re.MULTILINE)
    assert "spes_p2p_bootstrap_round{" not in text  # it has not begun


NAMES = [
    (),
    *((name,) for name in (*COMMANDS, *GROUPS)),
    *((group, name) for group, (_, inner) in GROUPS.items() for name in inner),
]


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_the_help_fits_80_columns(names: tuple[str, ...]) -> None:
    result = CliRunner().invoke(build(COMMANDS), [*names, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "…" not in result.stdout


def test_every_command_has_a_panel() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted((*COMMANDS, *GROUPS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no invitation was given"),
        (("--initial-peers", "/dns4/a/tcp/1", "output.tensorbord=true"), "unknown key output.tensorbord"),
        (("--initial-peers", "/dns4/a/tcp/1", "output.tensorboard=maybe"), "output.tensorboard is 'maybe', not an"),
        (("--initial-peers", "/dns4/a/tcp/1", "--max-upload", "fast"), "--max-upload 'fast' is not a link speed"),
        (("--initial-peers", "/dns4/a/tcp/1", "--config", "tinny"), "no bundled config named tinny"),
    ],
)
def test_what_is_wrong_with_the_words_of_join_is_said_before_torch_is_loaded(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code = (
        "import sys; from spes_p2p.cli.main import COMMANDS, build; "
        f"answer = build({{'join': COMMANDS['join'], 'status': COMMANDS['status']}})({['join', *words]}, "
        "standalone_mode=False); print('loaded:', answer, sorted({'torch', 'hivemind'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert said in result.stderr
    assert result.stdout.endswith("loaded: 3 []\n"), result.stdout + result.stderr
