"""The service of a user: a unit in a temporary home, read back as systemd reads it, and what systemd is told."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.cli.main import LASTING
from spes_p2p.peer.service import MARK, Service, quoted, unit_path, unit_text
from tests.cli.conftest import spes_p2p

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user for whom `systemctl` writes down what it is told; it fails once `broken` is there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    systemctl = programs / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/told\nif [ -e {tmp_path}/broken ]; then echo no bus >&2; exit 1; fi\n'
    )
    systemctl.chmod(0o755)
    loginctl = programs / "loginctl"
    loginctl.write_text(f"#!/bin/sh\nif [ -e {tmp_path}/lingers ]; then echo Linger=yes; else echo Linger=no; fi\n")
    loginctl.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def told(home: Path) -> list[str]:
    return (home / "told").read_text().splitlines() if (home / "told").exists() else []


def command_of(unit: Path) -> list[str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(parser["Service"]["ExecStart"])]


def test_a_peer_is_installed_started_and_removed(home: Path) -> None:
    output = home / "my peer 100%"
    answer = spes_p2p(
        "service",
        "install",
        "--initial-peers",
        ADDRESS,
        "-o",
        str(output),
        "--",
        "--nice",
        "10",
        "output.tensorboard=true",
    )
    assert answer.exit_code == 0, answer
    unit = home / "home/.config/systemd/user/spes-p2p-peer.service"
    words = command_of(unit)
    assert words[:4] == [sys.executable, "-m", "spes_p2p.cli.main", "join"]
    assert words[4:7] == ["--nice", "10", "output.tensorboard=true"]
    assert words[7:] == ["--initial-peers", ADDRESS, "--output", str(output), "--resume", "--log-format", "text"]
    assert told(home) == ["--user daemon-reload", "--user enable --now spes-p2p-peer.service"]
    assert spes_p2p("service", "install", "--initial-peers", ADDRESS).exit_code == 0  # again, with other words
    assert spes_p2p("service", "uninstall").exit_code == 0
    assert not unit.exists()
    assert told(home)[-2:] == ["--user disable --now spes-p2p-peer.service", "--user daemon-reload"]
    answer = spes_p2p("service", "uninstall")
    assert (answer.exit_code, "there is no service" in answer.errors) == (1, True)


def test_it_says_how_to_start_with_the_machine_where_that_is_not_so_yet(home: Path) -> None:
    install = ("service", "install", "--initial-peers", ADDRESS, "--no-start")
    assert "loginctl enable-linger" in spes_p2p(*install).output
    (home / "lingers").touch()
    assert "linger" not in spes_p2p(*install).output
    (home / "bin" / "loginctl").write_text("#!/bin/sh\nexit 1\n")
    assert "loginctl enable-linger" in spes_p2p(*install).output


def test_it_never_gives_up_but_on_what_no_restart_mends(tmp_path: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(unit_text(Service("peer", ("spes1abc",), tmp_path / "peer")))
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    assert parser["Service"]["RestartPreventExitStatus"].split() == ["2", str(LASTING)]
    assert not parser.has_option("Unit", "After")  # users' own managers know no network-online.target


def test_the_xdg_folder_is_respected_where_it_is_absolute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    assert spes_p2p("service", "install", "--initial-peers", ADDRESS, "--no-start", "--name", "b").exit_code == 0
    assert (home / "xdg/systemd/user/spes-p2p-b.service").exists()
    assert told(home) == []
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert unit_path("b") == home / "home/.config/systemd/user/spes-p2p-b.service"


def test_without_systemd_it_says_what_is_left_to_do(home: Path) -> None:
    (home / "broken").write_text("")
    answer = spes_p2p("service", "install", "--initial-peers", ADDRESS)
    assert answer.exit_code == 0
    assert "systemd could not be told: no bus" in answer.errors
    assert "systemctl --user enable --now spes-p2p-peer.service" in answer.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 1, "no invitation is given"),
        (("spes1nonsense",), 1, "invitation"),
        (("--initial-peers", ADDRESS, "--", "--no-such-flag"), 2, "--no-such-flag"),
        (("--initial-peers", ADDRESS, "--name", "../x"), 1, "cannot be the name of a service"),
        (("--initial-peers", ADDRESS, "-o", "a\nb"), 1, "holds a character that no service can"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    home: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    answer = spes_p2p("service", "install", *words)
    assert answer.exit_code == code, answer
    assert said in answer.errors
    assert not list(home.rglob("*.service"))


def test_a_unit_of_somebody_else_stays(home: Path) -> None:
    unit = home / "home/.config/systemd/user/spes-p2p-peer.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    assert "is there, and not of spes-p2p" in spes_p2p("service", "install", "--initial-peers", ADDRESS).errors
    assert "there is no service" in spes_p2p("service", "uninstall").errors
    assert MARK not in unit.read_text()


@pytest.mark.parametrize("word", ["plain", "with space", 'a"b', "back\\slash", "100%", "$HOME", "it's", ""])
def test_words_come_back_as_they_were(word: str) -> None:
    assert [one.replace("%%", "%").replace("$$", "$") for one in shlex.split(quoted(word))] == [word]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "spes-p2p-peer.service"
    unit.write_text(unit_text(Service("peer", ("spes1abc",), tmp_path / "peer")))
    done = subprocess.run(["systemd-analyze", "verify", "--user", str(unit)], capture_output=True, text=True)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254; an older one leaves them out
    said = [line for line in done.stderr.splitlines() if str(unit) in line and not any(key in line for key in newer)]
    assert not said
