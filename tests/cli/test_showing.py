"""Progress of work on many bytes: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys

import pytest

from spes_p2p.cli import showing
from spes_p2p.cli.showing import shown_bytes


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(showing.time, "monotonic", lambda: now[0])
    with shown_bytes() as report:
        for second in range(25):
            now[0] = float(second)
            report("export", second * 10**9, 24 * 10**9)
    assert capsys.readouterr().err == "export: 41% of 24.0 GB\nexport: 83% of 24.0 GB\n"


def test_on_a_terminal_there_is_a_bar_for_each_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_bytes() as report:
        report("fetch", 5 * 10**6, 5 * 10**6)
        report("export", 10**6, 4 * 10**6)
    shown = capsys.readouterr().err
    assert "fetch" in shown
    assert "export" in shown
    assert "1.0/4.0 MB" in shown
