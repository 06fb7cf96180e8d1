"""The server over real sockets: page, assets, state, news; and what the command says where something is missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.serve import DashboardOptions, Serving, run_dashboard
from spes_p2p.dashboard.web import STATIC, plotly_file
from spes_p2p.errors import ConfigError
from spes_p2p.peer.options import JoinTarget
from tests.dashboard.conftest import served
from tests.dashboard.made_run import BOOTSTRAP, PEERS
from tests.dashboard.test_history import filled
from tests.dashboard.test_replay import write_run


def get(address: str) -> tuple[str, dict[str, str]]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode(), {name.lower(): value for name, value in answer.headers.items()}


def test_everything_that_the_page_names_is_served_from_here() -> None:
    with served(History()) as address:
        page, headers = get(address)
        named = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(named) >= 6
        assert all(name.startswith("/") and not name.startswith("//") for name in named)
        for name in named:
            get(address + name[1:])
        assert "default-src 'none'" in headers["content-security-policy"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address + "static/../web.py")


def test_no_asset_of_ours_names_another_host() -> None:
    for file in STATIC.iterdir():
        assert set(re.findall(r"https?://[\w./]+", file.read_text())) <= {"http://www.w3.org/2000/svg"}
    assert plotly_file().stat().st_size > 10**6


def test_the_state_is_json_of_the_history() -> None:
    history = History()
    filled(history, 0, 5)
    history.put("odd", float("inf"))
    with served(history) as address:
        text, headers = get(address + "api/state?hours=nonsense")
        state = json.loads(text)
    assert headers["content-type"] == "application/json"
    assert (state["head"]["round"], sorted(state["samples"])) == (5, sorted(PEERS))
    assert (state["head"]["data"]["copies"], state["head"]["data"]["needed"]) == (1, [BOOTSTRAP])
    assert state["peers"][PEERS[1]]["reach"] == "behind NAT"


def test_news_come_with_every_write_and_end_with_the_server() -> None:
    history = History()
    with served(history) as address, urllib.request.urlopen(address + "api/news", timeout=30) as news:
        assert news.readline() == b"data: 0\n"
        assert news.readline() == b"\n"
        filled(history, 0, 0)
        assert news.readline() == b"data: 1\n"


def program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", arguments[0], *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


MAIN = "from spes_p2p.cli.main import main; main()"


@pytest.mark.parametrize(
    ("code", "words", "error"),
    [
        (
            "import sys; sys.modules['uvicorn'] = None\n" + MAIN,
            ("dashboard", "--replay", "x"),
            "the dashboard needs the package uvicorn, which is not installed\nFix: install it with scripts/venv.sh ",
        ),
        (MAIN, ("dashboard", "--replay", "x"), "x does not exist\nFix: give the metrics.jsonl of a peer"),
        (MAIN, ("dashboard",), "no invitation was given, and dashboard.sqlite does not exist"),
        (MAIN, ("dashboard", "--host", "192.0.2.1"), "the page cannot be served at 192.0.2.1 port 8080"),
        (
            MAIN,
            ("dashboard", "--replay", "x", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm"),
            "--replay shows a past run, but an invitation a live one\nFix: give only one of the two",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, code: str, words: tuple[str, ...], error: str) -> None:
    root = Path(__file__).parents[2]
    done = program(f"import sys; sys.path.insert(0, {str(root)!r})\n{code}", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f": {error}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_history_of_another_run_is_not_shown_while_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(self: Serving, is_over: object) -> None:
        pass

    monkeypatch.setattr(Serving, "run", at_once)
    path = tmp_path / "dashboard.sqlite"
    with closing(History(path)) as history:
        filled(history, 0, 1)
        own = history.get("run")["fingerprint"]
    meeting = JoinTarget((f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[0]}",), "club", "ab" * 16)
    with pytest.raises(ConfigError, match=r"holds the history of run made with fingerprint .*, not that of run club"):
        run_dashboard(DashboardOptions(meeting, port=0, database=path), print)
    run_dashboard(DashboardOptions(replace(meeting, fingerprint=own[:32]), port=0, database=path), print)


def test_the_command_serves_a_past_run_until_it_is_told_to_end(tmp_path: Path) -> None:
    write_run(tmp_path / "anna")
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "spes_p2p.cli.main",
        "dashboard",
        "--port",
        "0",
        "--replay",
        str(tmp_path / "anna"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().removeprefix("dashboard: ").strip()
            state = json.loads(get(address + "api/state")[0])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert state["replay"]["peers"] == ["anna"]
    assert list(tmp_path.glob("*.sqlite")) == []
