"""Collects the values of a slice: whom to ask, and why somebody is missing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.consensus.membership import LINK_PUBLIC
from spes_p2p.consensus.messages import LOST, Plan
from spes_p2p.errors import NetworkError, PeerClosed, RemoteProtocolError
from spes_p2p.exchange.transfers import WrongSize
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.sync.audit import OtherValues
from spes_p2p.sync.reduce import OTHER_VALUES, WRONG_SIZE
from spes_p2p.sync.round_work import RoundWork, SliceWork

Take = Callable[[Contribution, Callable[[], bool]], Coroutine[Any, Any, None]]
"""Asks a peer for its values; the second argument tells whether they are still wanted."""


class Collector:
    """Asks nobody again who was silent on top of the same manifest."""

    def __init__(self, core: Consensus, work: RoundWork, now: Callable[[], float]) -> None:
        self._core = core
        self._work = work
        self._now = now
        self._slow: tuple[Hash, set[PeerId]] = (NO_HASH, set())

    async def contributions(self, plan: Plan, piece: Slice, values: SliceWork) -> dict[PeerId, str]:
        """Takes what the contributors of a slice have; why some are left out."""
        roster = {entry.peer: entry for entry in plan.roster}
        asked = (self._contribution(roster[peer], plan.parent, values) for peer in piece.contributors)
        reasons = await self._work.together(asked)
        return {peer: reason for peer, reason in zip(piece.contributors, reasons, strict=True) if reason}

    async def _contribution(self, entry: Contribution, parent: Hash, values: SliceWork) -> str:
        """Takes one contribution; returns why it is missing, or "". A peer is not asked again after a silence."""
        if entry.peer == self._core.me:
            return "" if self._core.is_counted(parent, entry) and await values.take_own(entry.peer) else LOST
        return await self._asked(entry, parent, values.take)

    async def _asked(self, entry: Contribution, parent: Hash, take: Take) -> str:
        """Lets `take` ask another peer, unless that is of no use; why it gave nothing, or ""."""
        peer, slow = entry.peer, self._slow_in(parent)
        if peer in slow or not self._core.alive(peer, self._now()):
            return LOST
        try:
            await take(entry, lambda: peer not in slow)
        except WrongSize:
            return WRONG_SIZE
        except OtherValues:
            return OTHER_VALUES
        except (PeerClosed, RemoteProtocolError):
            return LOST
        except NetworkError:
            slow.add(peer)
            return LOST
        return ""

    async def guests(self, plan: Plan, piece: Slice, values: SliceWork) -> dict[PeerId, str]:
        """Takes what those have who trained in a slice's column without owning it; why some are unfit."""
        link = {member.peer: member.link_class for member in self._core.tip.members}
        entries = [
            entry
            for entry in plan.roster
            if entry.peer not in piece.contributors
            and LINK_PUBLIC in (link.get(entry.peer), link.get(self._core.me))  # one of two can dial the other
        ]
        reasons = await self._work.together(self._guest(entry, plan.parent, values) for entry in entries)
        left_out = {entry.peer: reason for entry, reason in zip(entries, reasons, strict=True) if reason}
        return left_out | values.screen_guests()

    async def _guest(self, entry: Contribution, parent: Hash, values: SliceWork) -> str:
        """Takes what one guest has; why it cannot be used, or "", also for one that has nothing."""
        if entry.peer != self._core.me:
            reason = await self._asked(entry, parent, values.take_guest)
            return "" if reason == LOST else reason
        if self._core.is_counted(parent, entry):
            await values.take_guest(entry, lambda: True)
        return ""

    def _slow_in(self, parent: Hash) -> set[PeerId]:
        """Who was silent on top of `parent`."""
        if self._slow[0] != parent:
            self._slow = (parent, set())
        return self._slow[1]
