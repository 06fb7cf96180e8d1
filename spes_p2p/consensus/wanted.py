"""Whether work that was begun is still of use now that it ends, or is about to be written: much happens meanwhile."""

from __future__ import annotations

from spes_p2p.consensus.actions import Build
from spes_p2p.consensus.messages import plan_hash
from spes_p2p.consensus.state import Key, State
from spes_p2p.ids import Hash


class Wanted:
    """Asks the state, and changes nothing."""

    def __init__(self, state: State) -> None:
        self._state = state

    def reduced(self, plan: Hash, index: int) -> bool:
        """Whether a slice that we were asked to reduce may still be written: later it could spoil a finished state."""
        current = self._state.round
        return current.plan is not None and plan_hash(current.plan.value) == plan and index in current.reducing

    def staged(self, key: Key, hashes: bytes) -> bool:
        """Whether tiles that we were asked to fetch may still be written."""
        return self._state.round.fetching.get(key) == hashes

    def built(self, build: Build) -> bool:
        """Whether the state that we were asked to build is still to be proposed."""
        return build.makes_the_same(self._state.round.building)

    def verified(self, manifest: Hash) -> bool:
        """Whether the state that we were asked to verify is still waited for; `manifest` is a hash."""
        return self._state.round.verifying == manifest
