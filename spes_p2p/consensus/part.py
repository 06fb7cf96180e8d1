"""What all parts of the state machine have in common: the state, and what they ask of it most (see `parts`)."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.state import State


@dataclass(eq=False)
class Part:
    """One part over the state; the fields that a subclass adds are the parts that it asks."""

    _state: State

    def __post_init__(self) -> None:
        state = self._state
        self._liveness, self._others, self._own = state.liveness, state.others, state.own
        self._pace, self._rules, self._me = state.pace, state.rules, state.me
