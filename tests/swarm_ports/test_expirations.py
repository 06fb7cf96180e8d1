"""When the records of one publisher end: each later than the one before, and none later than others take."""

from __future__ import annotations

import pytest

from spes_p2p.swarm.envelope import CLOCK_SLACK_SECONDS, MAX_TTL_SECONDS, Expirations

TTL = 45.0
MOST = MAX_TTL_SECONDS + CLOCK_SLACK_SECONDS


def test_each_record_ends_after_the_one_before() -> None:
    expirations = Expirations()
    assert expirations.next("key", 600.0, 1000.0) == 1600.0
    assert 1600.0 < expirations.next("key", TTL, 1001.0) < 1600.1
    assert expirations.next("another", TTL, 1001.0) == 1046.0
    expirations.found("key", 2000.0, 1001.0)
    assert 2000.0 < expirations.next("key", TTL, 1002.0) < 2000.1
    expirations.found("key", 1500.0, 1002.0)
    assert expirations.next("key", TTL, 1003.0) > 2000.0


@pytest.mark.parametrize("ahead_seconds", [100.0, MOST - TTL - 2, MOST - TTL, 7200.0, 1e9])
def test_after_a_jump_of_the_clock_records_are_ones_that_others_take(ahead_seconds: float) -> None:
    expirations = Expirations()
    expirations.next("key", TTL, 1000.0)
    jumped = expirations.next("key", TTL, 1000.0 + ahead_seconds)
    could_be_taken = jumped <= 1000.0 + MOST
    last = jumped if could_be_taken else 0.0
    for now in (1001.0, 1002.0, 1005.0):
        end = expirations.next("key", TTL, now)
        assert now + TTL <= end <= now + MOST
        assert end > last
        last = end


def test_a_record_that_nobody_else_believes_is_nothing_to_go_by() -> None:
    expirations = Expirations()
    expirations.found("key", 1000.0 + MOST + 1, 1000.0)
    assert expirations.next("key", TTL, 1000.0) == 1000.0 + TTL
