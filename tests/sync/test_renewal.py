"""When the organiser may name new members: told by what it heard, at times that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import (
    Ballots,
    Intent,
    Status,
    Work,
)
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.consensus.timing import Pace
from spes_p2p.ids import PeerId, sha256
from spes_p2p.sync.organising.renewal import LONGER, MOST_HEARD, LivenessMonitor
from tests.sync.chains import A, B, MadeRun

RUN = MadeRun()
C, D = PeerId("c"), PeerId("d")
TIP = genesis_manifest(RUN.rules, sha256(b"state"), [Member(A, 1, True, 0), Member(B, 1, True, 0)], {})
LONG = Pace(1.0).degraded_wait_seconds()


def status(peer: PeerId, intent: Intent | None = None, incarnation: int = 1, tip: Manifest = TIP) -> Status:
    chosen = intent or Intent(joining=True)
    return Status(RUN.info.fingerprint, peer, incarnation, 1, tip.round, manifest_hash(tip), Work(), chosen, Ballots())


class Story:
    """A monitor over two electors, with a tick each second in which some peers speak."""

    def __init__(self) -> None:
        self.monitor = LivenessMonitor(Pace(1.0), TIP, 0.0)
        self.now = 0.0

    def passes(self, seconds: float, *speakers: Status) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            for one in speakers:
                self.monitor.hear(one, self.now)
            self.monitor.tick(self.now)

    def is_due(self, min_peers: int = 1, is_lost: bool = False) -> bool:
        return bool(self.monitor.new_members(min_peers, is_lost, self.now))


def test_after_a_long_silence_those_who_wait_are_named() -> None:
    story = Story()
    story.passes(LONG - 1, status(C), status(D))
    assert not story.is_due(2)
    story.passes(2, status(C), status(D))
    assert story.is_due(2)
    assert [one.peer for one in story.monitor.waiting(story.now)] == [C, D]


@pytest.mark.parametrize("is_lost", [False, True])
def test_where_the_newest_state_is_lost_the_wait_is_longer(is_lost: bool) -> None:
    story = Story()
    story.passes(LONG + 1, status(C))
    assert story.is_due(is_lost=is_lost) is not is_lost
    story.passes((LONGER - 1) * LONG, status(C))
    assert story.is_due(is_lost=is_lost)


def test_one_elector_that_can_vote_is_enough() -> None:
    story = Story()
    story.passes(2 * LONG, status(A), status(C), status(D))
    assert story.monitor.has_live_elector(story.now)
    assert not story.is_due(2)


def test_an_elector_that_cannot_vote_or_is_behind_does_not_lead() -> None:
    story = Story()
    full = status(A, Intent(joining=True, can_vote=False))
    behind = replace(status(B), round=-1, head=sha256(b"earlier"))
    story.passes(LONG + 1, full, behind, status(C))
    assert not story.monitor.has_live_elector(story.now)
    assert [one.peer for one in story.monitor.new_members(2, False, story.now)] == [A, C]


def test_who_has_the_newest_state_does_not_wait_for_who_fetches_it() -> None:
    story = Story()
    fetching = replace(status(D), head=sha256(b"earlier"))
    story.passes(LONG + 1, status(C), fetching)
    assert [one.peer for one in story.monitor.new_members(1, False, story.now)] == [C]
    story.passes((LONGER - 1) * LONG, status(C), fetching)
    assert [one.peer for one in story.monitor.new_members(1, True, story.now)] == [C, D]  # nobody can have it


def test_fewer_than_were_wanted_wait_once_more() -> None:
    story = Story()
    story.passes(2 * LONG)
    story.passes(LONG - 1, status(C))
    assert not story.is_due(2)
    story.passes(2, status(C))
    assert story.is_due(2)


def test_nobody_is_named_who_does_not_want_to_take_part() -> None:
    story = Story()
    story.passes(2 * LONG, status(C, Intent()), status(D, Intent(joining=True, leaving=True)))
    assert not story.monitor.waiting(story.now)
    assert not story.is_due()


def test_our_own_sleep_is_our_own_silence() -> None:
    story = Story()
    story.passes(LONG - 5, status(C))
    story.now += 3600.0
    story.monitor.tick(story.now)
    story.passes(10, status(C))
    assert not story.is_due()
    story.passes(LONG, status(C))
    assert story.is_due()


def test_strangers_are_remembered_up_to_a_bound() -> None:
    story = Story()
    for number in range(2 * MOST_HEARD):
        story.monitor.hear(status(PeerId(f"stranger {number}")), 0.5)
    assert len(story.monitor.waiting(0.5)) == MOST_HEARD
    story.monitor.hear(status(A), 0.5)
    assert story.monitor.has_live_elector(0.5)


def test_nothing_is_renewed_while_somebody_has_gone_on_without_the_newest_manifest() -> None:
    story = Story()
    story.passes(2, status(C))
    assert not story.monitor.has_newer_history(story.now)
    other = replace(TIP, state_root=sha256(b"another"))
    story.passes(1, status(D, tip=other))
    assert story.monitor.has_newer_history(story.now)
    story.passes(LONG, status(C))
    assert not story.monitor.has_newer_history(story.now)
    story.passes(1, status(D, tip=replace(TIP, round=TIP.round + 1)))
    assert story.monitor.has_newer_history(story.now)
    assert not story.monitor.has_newer_history(story.now, is_hollow=lambda peer: peer == D)  # it could not show it
