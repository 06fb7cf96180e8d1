"""What a peer says of itself and of the others while it runs, without a network."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from spes_p2p.consensus.membership import Roll
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.observe.events import EventBus, Peer
from spes_p2p.peer.presence import Progress
from spes_p2p.peer.run import _note_commit, about_itself
from spes_p2p.sync.surroundings import Applied
from tests.observe.test_events import Recorder
from tests.sync.chains import A, B, MadeRun

MADE = MadeRun()
COMMITS = MADE.chain(2)


def test_a_peer_says_who_it_is_and_whether_it_takes_part_yet() -> None:
    tip = replace(COMMITS[1].manifest, round=20)
    assert about_itself(A, tip) == "this is peer a, with the state of round 20"
    assert (
        about_itself(B, tip)
        == "this is peer b, with the state of round 20; it takes part as soon as a round has admitted it"
    )


def test_what_becomes_of_this_peer_is_told_apart_from_what_becomes_of_others() -> None:
    before, commit = COMMITS[0].manifest, COMMITS[1]
    alone = replace(commit, manifest=replace(commit.manifest, members=()))
    banned = replace(commit, manifest=replace(alone.manifest, roll=Roll(MADE.info.fingerprint, 1, banned=(A,))))
    for parent, newest, change in (
        (before, alone, "lost"), (before, banned, "banned"), (replace(before, members=()), commit, "joined"),
    ):  # fmt: skip
        event = Applied(newest, parent, None, False, frozenset(), False, {}, 0, 0, 1.0, frozenset())
        failures: list[Exception] = []
        for me in (A, B):
            recorder = Recorder()
            connection: Any = SimpleNamespace(
                peer_id=me, info=MADE.info, config=MADE.config, data=SimpleNamespace(traffic=DataTraffic()),
                gate=SimpleNamespace(failed=failures.append),
                disk=SimpleNamespace(proofs=SimpleNamespace(path_of=lambda peer: None)),
                presence=SimpleNamespace(progress=Progress()),
            )  # fmt: skip
            _note_commit(event, connection, EventBus(recorder))
            [told] = [event for event in recorder.events if isinstance(event, Peer)]
            assert told == Peer(change, A, 1, own=me == A)  # type: ignore[arg-type]
        assert len(failures) == (change == "banned")  # it is the end of who was banned alone
