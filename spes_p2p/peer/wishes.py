"""What a peer wants of the run: as many columns as it has memory for, none while it pauses, and in the end to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.consensus.messages import Intent
from spes_p2p.errors import ConfigError
from spes_p2p.files import write_whole
from spes_p2p.ids import PeerId
from spes_p2p.observe.sinks import METRICS_FILE
from spes_p2p.peer.folder import RUN

PATIENT_LOOKS = 3
"""Heartbeats in which everybody has heard who pauses."""


@dataclass(eq=False)
class Wishes:
    """`tell` is given each new intent, once `begin` was called. For any thread."""

    _tell_others: Callable[[Intent], None]
    _me: PeerId
    _heirs: Callable[[], Collection[PeerId]]
    """The others that a round could give this peer's columns to."""
    _vouches: Callable[[], tuple[PeerId, ...]] = tuple
    """Whom its owner would have vote, as of now."""

    def __post_init__(self) -> None:
        self._intent = Intent(joining=True)
        self._may_shrink = True
        self._has_begun = False
        self.asked_to_pause = False
        self._said = self._vouches()
        self._paused = False
        """Asks for no columns: `asked_to_pause`, unless nobody else could train them."""
        self._looks = 0
        """How often in a row heirs were seen during this pause."""

    @property
    def intent(self) -> Intent:
        """Who does not train asks for no columns: others take them over, if there are any."""
        said = replace(self._intent, vouches=self._said)
        return replace(said, max_columns=0, claims=()) if self._paused else said

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
        """Others may come, and go, while this peer pauses; and its owner may vouch for somebody."""
        while True:
            self._settle()
            await asyncio.sleep(pause_seconds)

    def _settle(self) -> None:
        heirs = self._heirs() if self.asked_to_pause and self._has_begun else ()
        self._looks = self._looks + 1 if heirs else 0
        paused = self.asked_to_pause and (not self._has_begun or self._may_give_up(heirs))
        vouches = self._vouches()
        if (paused, vouches) != (self._paused, self._said):
            self._paused, self._said = paused, vouches
            self._tell()

    def _may_give_up(self, heirs: Collection[PeerId]) -> bool:
        """Of those who pause at the same moment one must keep its columns: the lowest id sees first what others do."""
        return bool(heirs) and (self._paused or min(heirs) < self._me or self._looks > PATIENT_LOOKS)

    def _tell(self) -> None:
        if self._has_begun:
            self._tell_others(self.intent)


VOUCHES = "vouches"
"""File of a peer's folder with those for whom it vouches as an elector; it says so as long as it runs."""


def vouches_in(folder: Path) -> tuple[PeerId, ...]:
    """Those in the folder of a peer, sorted."""
    try:
        named = (folder / RUN / VOUCHES).read_text().split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(sorted(map(PeerId, {*named})))[:MAX_VOUCHED]


def change_vouches(folder: Path, peers: Collection[PeerId], undo: bool) -> tuple[PeerId, ...]:
    """All for whom the peer of this folder vouches from now on. Raises ConfigError, StorageFull."""
    known = {*vouches_in(folder)}
    said = tuple(sorted(known - {*peers} if undo else known | {*peers}))
    if not (folder / RUN).is_dir() or not (folder / METRICS_FILE).exists():  # a mirror has none, and vouches for nobody
        raise ConfigError(f"{folder} holds no run of a peer", fix="give the folder of a peer that votes with --folder")
    if len(said) > MAX_VOUCHED:
        raise ConfigError(f"{len(said)} peers to vouch for", fix=f"at most {MAX_VOUCHED} fit: forget some with --undo")
    write_whole(folder / RUN / VOUCHES, "\n".join(said).encode())
    return said
