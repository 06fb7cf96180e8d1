"""What a search must know of the state that it copies: which fields are times."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from spes_p2p.consensus import liveness, state
from spes_p2p.consensus.liveness import Liveness
from spes_p2p.consensus.state import Contact, Others, RoundState, State
from tests.simulation.snapshots import times_of


def test_times_are_what_is_annotated_so() -> None:
    assert times_of(Contact) == {"at", "direct_at"}
    assert times_of(Liveness) == {"quorum_at", "asking_since", "asked_at", "failing_since"}
    assert times_of(Others) == {"asked", "ahead_since", "looked_at", "heard_since"}
    assert times_of(State) == {"next_heartbeat", "last_event"}
    assert {"started_at", "seen", "closed_at"} < times_of(RoundState)
    assert "extended_wait_seconds" not in times_of(RoundState)


def test_every_part_of_the_state_says_which_of_its_numbers_are_times() -> None:
    kinds = {kind for module in (state, liveness) for _, kind in inspect.getmembers(module, dataclasses.is_dataclass)}
    mutable = {kind for kind in kinds if isinstance(kind, type) and not kind.__dataclass_params__.frozen}  # type: ignore[attr-defined]
    assert {State, Others, RoundState, Contact, Liveness} <= mutable
    for kind in mutable:
        times_of(kind)


def test_a_number_that_is_neither_time_nor_duration_is_refused() -> None:
    @dataclasses.dataclass
    class Vague:
        waited: float = 0.0

    with pytest.raises(TypeError, match=r"Vague\.waited is a Moment or Seconds"):
        times_of(Vague)
