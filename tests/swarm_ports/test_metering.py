"""The measured uplink: the best stretch of sending, smoothed, and nothing while too little was sent."""

from __future__ import annotations

import pytest

from spes_p2p.swarm.pacing import SMOOTHING, Meter

MIB = 2**20


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def send(meter: Meter, time: Time, size: int, seconds: float, pieces: int = 100) -> None:
    with meter.sending():
        for _ in range(pieces):
            time.now += seconds / pieces
            meter.sent(size // pieces)


def test_little_says_nothing() -> None:
    time = Time()
    meter = Meter(time)
    send(meter, time, 10 * MIB, 60.0)
    send(meter, time, 5 * MIB, 0.1)
    assert meter.rate() == 0.0
    send(meter, time, 2 * MIB, 1.0)
    assert meter.rate() == pytest.approx(17 * MIB / 61.1, rel=0.1)


def test_idle_time_does_not_count_and_streams_count_together() -> None:
    time = Time()
    meter = Meter(time)
    for _ in range(20):
        send(meter, time, 5 * MIB, 1.0)
        time.now += 100.0
    assert meter.rate() == pytest.approx(5 * MIB, rel=0.05)
    meter = Meter(time)
    with meter.sending(), meter.sending():
        for _ in range(100):
            time.now += 0.1
            meter.sent(MIB)
            meter.sent(MIB)
    assert meter.rate() == pytest.approx(20 * MIB, rel=0.05)


def test_a_slow_receiver_shows_less_than_the_uplink_and_changes_come_in_slowly() -> None:
    time = Time()
    meter = Meter(time)
    send(meter, time, 100 * MIB, 10.0)
    send(meter, time, 100 * MIB, 500.0)
    assert meter.rate() == pytest.approx(10 * MIB, rel=0.05)
    send(meter, time, 200 * MIB, 10.0)
    assert meter.rate() == pytest.approx((10 + SMOOTHING * 10) * MIB, rel=0.05)
    assert meter.rate() == meter.rate()
