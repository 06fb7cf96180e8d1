"""A peer as a systemd service of the user who runs it: the unit file, where it lies, and telling systemd of it.

No root is needed. A peer that ends because the run is over stays ended; one that failed is started again after a while,
however often: a home may be without network for a night, a bootstrap node for days.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.errors import ConfigError, StorageFull, first_line
from spes_p2p.files import write_whole

MARK = "# Written by `spes-p2p service install`; `spes-p2p service uninstall` removes it."
SYSTEMCTL = "systemctl"
LOGINCTL = "loginctl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_SECONDS = 30.0


@dataclass(frozen=True)
class Service:
    """`words`: what follows `spes-p2p join`. `folder`: the peer's output folder."""

    name: str
    words: tuple[str, ...]
    folder: Path

    def __post_init__(self) -> None:
        check_name(self.name)


def check_name(name: str) -> None:
    """Raises ConfigError for what cannot be a part of a file's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r} cannot be the name of a service", fix="use letters, digits and dashes")


def unit_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where units of this user lie; XDG_CONFIG_HOME counts where it is an absolute path, as its rules say."""
    check_name(name)
    given = Path(environment.get("XDG_CONFIG_HOME", ""))
    config = given if given.is_absolute() else Path.home() / ".config"
    return config / "systemd" / "user" / f"spes-p2p-{name}.service"


def unit_text(service: Service, python: str = sys.executable) -> str:
    """The whole file."""
    command = (python, "-m", "spes_p2p.cli.main", "join", *service.words)
    return f"""{MARK}
[Unit]
Description=spes-p2p peer ({service.name})
# however often it fails: the network, or the bootstrap node, may be away for long
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join(map(quoted, command))}
WorkingDirectory={str(service.folder.parent).replace("%", "%%")}
Environment=PYTHONUNBUFFERED=1
Restart=on-failure
# after a minute at first, up to ten minutes later; systemd before 254 leaves it at a minute, and warns
RestartSec=60
RestartSteps=5
RestartMaxDelaySec=600
# a command line that makes no sense, and what no restart mends: a run that is over, another run's folder
RestartPreventExitStatus=2 3
LimitNOFILE=65536
# SIGTERM to the peer alone, which leaves within ten seconds and ends its own children
KillMode=mixed
TimeoutStopSec=20
NoNewPrivileges=yes
UMask=0077

[Install]
WantedBy=default.target
"""


def quoted(word: str) -> str:
    """One word of a command line, as systemd reads it back. Raises ConfigError for what no unit can hold."""
    if any(sign < " " or sign == "\x7f" for sign in word):
        raise ConfigError(f"{word!r} holds a character that no service can", fix="leave it out")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%$+=:,./-]+", word, re.ASCII) else f'"{escaped}"'


def install(service: Service, start: bool) -> tuple[Path, str]:
    """(the file that was written, what systemd could not be told; empty where all went well).

    Raises ConfigError where a unit of that name is there that is not ours, or where it cannot be written.
    """
    path = unit_path(service.name)
    if path.exists() and not _is_ours(path):
        raise ConfigError(f"{path} is there, and not of spes-p2p", fix="choose another --name")
    text = unit_text(service)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        service.folder.parent.mkdir(parents=True, exist_ok=True)  # where it is started
        write_whole(path, text.encode())
    except (OSError, StorageFull) as error:
        raise ConfigError(f"{path} cannot be written: {error}", fix="look at the folder's owner and room") from error
    return path, tell_systemd(("daemon-reload",), ("enable", "--now", path.name)) if start else ""


def uninstall(name: str) -> tuple[Path, str]:
    """Ends the service and removes its file; the same pair. Raises ConfigError where there is none of ours."""
    path = unit_path(name)
    if not path.exists() or not _is_ours(path):
        raise ConfigError(
            f"there is no service {path}", fix="name it as at its installation, with --name; nothing was changed"
        )
    trouble = tell_systemd(("disable", "--now", path.name))
    path.unlink()
    return path, trouble or tell_systemd(("daemon-reload",))


def tell_systemd(*commands: Sequence[str]) -> str:
    """Runs `systemctl --user` with each of them; what went wrong first, or nothing."""
    program = shutil.which(SYSTEMCTL)
    if program is None:
        return f"there is no {SYSTEMCTL} here"
    for command in commands:
        try:
            done = subprocess.run(
                [program, "--user", *command], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return first_line(error)
        if done.returncode:
            return (done.stderr or done.stdout or f"exit code {done.returncode}").strip().splitlines()[0]
    return ""


def lingers(user: str = "") -> bool:
    """Whether services of `user` (default: who calls) run while nobody is logged in; False where nobody can say."""
    program = shutil.which(LOGINCTL)
    if program is None:
        return False
    command = [program, "show-user", user or str(os.getuid()), "--property=Linger"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "Linger=yes"


def _is_ours(path: Path) -> bool:
    return path.read_text(errors="replace").startswith(MARK)
