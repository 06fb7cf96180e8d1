"""What a peer's connection tells of itself, without a network."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spes_p2p.peer.connection import Connection
from spes_p2p.peer.options import PeerOptions
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.trainer_bridge import TrainerBridge
from tests.sync.chains import MadeRun

RUN = MadeRun()
COMMITS = RUN.chain(3)


def connected(chain: Chain, looked: bool) -> tuple[Connection, Any]:
    thread: Any = None
    options: Any = PeerOptions
    connection = Connection(thread, options, TrainerBridge(), lambda text: None)
    facts = SimpleNamespace(state=SimpleNamespace(own=SimpleNamespace(commit=COMMITS[2])))
    driver: Any = SimpleNamespace(core=facts)
    disk: Any = SimpleNamespace(chain=chain)
    connection._driver, connection._disk = driver, disk
    if looked:
        assert connection._newest() == (COMMITS[2], 1e9)
    return connection, facts


def test_the_tip_is_announced_although_another_history_is_about_to_take_its_place(tmp_path: Path) -> None:
    """Its file goes first, then its state, and only then the state machine goes over."""
    other = RUN.certified(RUN.child(COMMITS[0].manifest, COMMITS[0].manifest.state_root, COMMITS[0].manifest.wire_root))
    for looked in (True, False):
        chain = Chain(tmp_path / str(looked))
        for commit in COMMITS:
            chain.append(commit)
        os.utime(chain.directory / "00000002.commit", (1e9, 1e9))
        connection, core = connected(chain, looked)
        chain.switch([other])
        newest = connection._newest()
        assert newest is not None
        assert newest[0] == COMMITS[2]
        assert (newest[1] == 1e9) is looked
        core.state.own.commit = other
        assert connection._newest() == (other, chain.received_at(1))
        core.state.own.commit = None
        assert connection._newest() is None
