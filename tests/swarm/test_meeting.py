"""What is said of initial peers that do not answer while others do."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.swarm.hivemind_backend import join
from spes_p2p.swarm.hivemind_backend.join import Failed, Reached, meet


def test_nothing_is_said_of_addresses_that_nobody_gave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(p2p: Any, address: str, *rest: Any) -> Reached | Failed:
        met: Any = SimpleNamespace(ahead_seconds=0.0)
        return Reached(address, address, met) if address == "/there" else Failed(address, "refuses connections")  # type: ignore[arg-type]

    monkeypatch.setattr(join, "_meet", answer)
    p2p: Any = None
    with caplog.at_level(logging.WARNING):
        reached = asyncio.run(meet(p2p, ["/given", "/remembered", "/there"], lambda: 0.0, quiet={"/remembered"}))
    assert [one.address for one in reached] == ["/there"]
    assert [record.getMessage() for record in caplog.records] == [
        "initial peer /given refuses connections; others answer"
    ]
