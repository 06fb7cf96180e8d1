"""What a peer tells of itself in the DHT, without a network."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spes_p2p.peer.presence import Presence
from spes_p2p.swarm.vitals import LEAVING, LEFT
from spes_p2p.sync.chain import Chain
from tests.sync.chains import A, MadeRun

RUN = MadeRun()
COMMITS = RUN.chain(3)


def present(chain: Chain, looked: bool) -> tuple[Presence, Any]:
    unused: Any = None
    presence = Presence(RUN.info.run_id, unused, unused, unused, lambda: False, lambda: False)
    facts = SimpleNamespace(state=SimpleNamespace(own=SimpleNamespace(commit=COMMITS[2])))
    driver: Any = SimpleNamespace(core=facts)
    presence.begin(driver, chain)
    if looked:
        assert presence.newest() == (COMMITS[2], 1e9)
    return presence, facts


def test_the_tip_is_announced_although_another_history_is_about_to_take_its_place(tmp_path: Path) -> None:
    """Its file goes first, then its state, and only then the state machine goes over."""
    other = RUN.certified(RUN.child(COMMITS[0].manifest, COMMITS[0].manifest.state_root, COMMITS[0].manifest.wire_root))
    for looked in (True, False):
        chain = Chain(tmp_path / str(looked))
        for commit in COMMITS:
            chain.append(commit)
        os.utime(chain.directory / "00000002.commit", (1e9, 1e9))
        presence, core = present(chain, looked)
        chain.switch([other])
        newest = presence.newest()
        assert newest is not None
        assert newest[0] == COMMITS[2]
        assert (newest[1] == 1e9) is looked
        core.state.own.commit = other
        assert presence.newest() == (other, chain.received_at(1))
        core.state.own.commit = None
        assert presence.newest() is None


def test_who_goes_says_so_and_at_last_that_it_has_left() -> None:
    nothing: Any = None
    leaving: list[bool] = []
    network: Any = SimpleNamespace(
        signer=SimpleNamespace(peer_id=A), client_mode=False, transport=SimpleNamespace(addresses=())
    )
    presence = Presence(RUN.info.run_id, network, nothing, nothing, lambda: False, lambda: bool(leaving))
    assert presence.describe().vitals.phase == "waiting"
    leaving.append(True)
    assert presence.describe().vitals.phase == LEAVING
    presence.has_left = True
    assert presence.describe().vitals.phase == LEFT
