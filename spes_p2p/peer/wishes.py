"""What a peer wants of the run: as many columns as it has memory for, none while it pauses, and in the end to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from spes_p2p.consensus.messages import Intent
from spes_p2p.ids import PeerId

PATIENT_LOOKS = 3
"""Heartbeats in which everybody has heard who pauses."""


@dataclass(eq=False)
class Wishes:
    """`tell` is given each new intent, once `begin` was called. For any thread."""

    _tell_others: Callable[[Intent], None]
    _me: PeerId
    _heirs: Callable[[], Collection[PeerId]]
    """The others that a round could give this peer's columns to."""

    def __post_init__(self) -> None:
        self._intent = Intent(joining=True)
        self._may_shrink = True
        self._has_begun = False
        self.asked_to_pause = False
        self._paused = False
        """Asks for no columns: `asked_to_pause`, unless nobody else could train them."""
        self._looks = 0
        """How often in a row heirs were seen during this pause."""

    @property
    def intent(self) -> Intent:
        """Who does not train asks for no columns: others take them over, if there are any."""
        return replace(self._intent, max_columns=0, claims=()) if self._paused else self._intent

    def want(self, intent: Intent, may_shrink: bool) -> None:
        """What to join with. `may_shrink`: the columns are those that memory was thought to have room for."""
        self._intent, self._may_shrink = intent, may_shrink

    def begin(self) -> None:
        """There is somebody to tell; the intent may be another one than that to join with."""
        self._has_begun = True
        self._tell()

    def limit_columns(self, most: int) -> bool:
        """Asks for no more expert columns than there is memory for, if nobody has set it; whether that is news."""
        if not self._may_shrink or most >= self._intent.max_columns:
            return False
        self._intent = replace(self._intent, max_columns=most)
        self._tell()
        return True

    def pause(self, paused: bool) -> None:
        """Trains no more, or again."""
        self.asked_to_pause = paused
        self._settle()

    def leave(self) -> None:
        """Tells the others that this peer goes; what it has trained so far counts."""
        self._intent = replace(self._intent, leaving=True)
        self._tell()

    async def look_around(self, pause_seconds: float) -> None:
        """Others may come, and go, while this peer pauses."""
        while True:
            self._settle()
            await asyncio.sleep(pause_seconds)

    def _settle(self) -> None:
        heirs = self._heirs() if self.asked_to_pause and self._has_begun else ()
        self._looks = self._looks + 1 if heirs else 0
        paused = self.asked_to_pause and (not self._has_begun or self._may_give_up(heirs))
        if paused != self._paused:
            self._paused = paused
            self._tell()

    def _may_give_up(self, heirs: Collection[PeerId]) -> bool:
        """Of those who pause at the same moment one must keep its columns: the lowest id sees first what others do."""
        return bool(heirs) and (self._paused or min(heirs) < self._me or self._looks > PATIENT_LOOKS)

    def _tell(self) -> None:
        if self._has_begun:
            self._tell_others(self.intent)
