"""How a node without a state follows the run: headers alone, checked, and where histories meet the one that wins.

Which peer is asked comes from what peers say of themselves; one is asked at a time. Anybody can say that it is further:
members of the newest commit that is here go before strangers, and who could not give it is believed less and less.
States are others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spes_p2p.consensus.forks import Line, Way, parted_text, tokens_lost
from spes_p2p.consensus.messages import Status, manifest_hash
from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.swarm.ports import Clock
from spes_p2p.sync.catch_up import CatchUp, Parted
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.tasks import Tasks

MOST_REMEMBERED = 256
"""Heads of others of which we remember that their history is not the one to follow."""
LONGEST_PAUSES = 2**6
"""A pause doubles up to so many times the first."""
TRIES = 3
"""Who could not give what it says it has so often is no reason to wait any more."""


class Following:
    """Brings `chain` forward. `moved` is called when it has grown or changed, `say` gets lines for a person."""

    def __init__(
        self,
        chain: Chain,
        catch_up: CatchUp,
        tasks: Tasks,
        moved: Callable[[], None],
        say: Callable[[str], None],
        clock: Clock,
        pause_seconds: float,
        way_to: Callable[[Line, Line], Way],
    ) -> None:
        """`way_to(ours, theirs)`: whether to go over to another history, or to one that goes on without a quorum.

        Who could not give what it has is not asked for `pause_seconds`; a stranger for twice as long each time."""
        self._chain = chain
        self._catch_up = catch_up
        self._tasks = tasks
        self._moved = moved
        self._say = say
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._paused: dict[PeerId, float] = {}
        self._in_vain: dict[PeerId, int] = {}
        self._asked: asyncio.Task[None] | None = None
        self._asked_peer: PeerId | None = None
        self._next: Status | None = None
        self._said = ""
        self._way_to = way_to
        self._looked_at: dict[Hash, float] = {}
        self._parted: set[Hash] = set()
        """Manifests after which another final history than ours goes on, and of which a person was told."""
        self.under_way = False

    def hear(self, status: Status) -> None:
        """Follows who is further than we are, or stands on another history that we have not looked at."""
        if status.head == NO_HASH or status.round < 0 or self.doubts(status.peer):
            return
        if self._clock.now() < self._looked_at.get(status.head, float("-inf")):
            return
        if status.round < self._chain.length and self._is_ours(status):
            return
        if not self.under_way:
            self.under_way = True
            self._asked_peer = status.peer
            self._tasks.spawn(self._follow(status))
        elif self._asked is not None and self._is_member(status.peer) and not self._is_member(self._asked_peer):
            self._next = status
            self._asked.cancel()

    def reconsider(self) -> None:
        """What may count of histories that meet is not what it was."""
        self._looked_at.clear()

    def doubts(self, peer: PeerId) -> bool:
        """Whether it could not give of late what it says it has."""
        return self._clock.now() < self._paused.get(peer, float("-inf"))

    def is_hollow(self, peer: PeerId) -> bool:
        """Whether a stranger could not time and again. A member may be one that cannot be dialled."""
        return self._in_vain.get(peer, 0) >= TRIES and not self._is_member(peer)

    @property
    def is_hopeful(self) -> bool:
        """Whether somebody is being asked of whom something may come."""
        return self.under_way and self._asked_peer is not None and not self.is_hollow(self._asked_peer)

    def _is_member(self, peer: PeerId | None) -> bool:
        newest = self._chain.newest
        return newest is not None and any(member.peer == peer for member in newest.manifest.members)

    def _is_ours(self, status: Status) -> bool:
        newest = self._chain.newest
        if newest is None or newest.manifest.round != status.round:
            newest = self._chain.find(status.round)
        return newest is not None and manifest_hash(newest.manifest) == status.head

    async def _follow(self, status: Status) -> None:
        self._asked, before = asyncio.current_task(), self._chain.newest
        try:
            try:
                if status.round < self._chain.length:
                    raise Parted(f"{short(status.peer)} stands on another history of the run")
                await self._catch_up.headers(self._chain.length - 1, status.peer, status.round)
            except Parted:
                await self._meet(status)
            self._in_vain.pop(status.peer, None)
        except (NetworkError, RemoteProtocolError, StorageFull) as error:
            self._pause(status.peer, f"peer {short(status.peer)} could not give its newest certificates: {error}")
        finally:
            self.under_way, self._asked = False, None
            if self._chain.newest is not before:
                self._moved()
            following, self._next = self._next, None
            if following is not None:
                self.hear(following)

    def _pause(self, peer: PeerId, text: str) -> None:
        now = self._clock.now()
        self._paused = {other: until for other, until in self._paused.items() if until > now}
        vain = self._in_vain.pop(peer, 0)  # to the end: the oldest is forgotten
        if len(self._in_vain) >= MOST_REMEMBERED:
            del self._in_vain[next(iter(self._in_vain))]
        self._in_vain[peer] = vain + 1
        self._paused[peer] = now + self._pause_seconds * (1 if self._is_member(peer) else min(2**vain, LONGEST_PAUSES))
        if text != self._said:
            self._said = text
            self._say(text)

    async def _meet(self, status: Status) -> None:
        """Two histories: takes theirs if it wins; else it is not asked for again."""
        meeting = await self._catch_up.meet(self._chain.length - 1, status.peer, status.round)
        way, common = self._way_to(meeting.ours, meeting.theirs), manifest_hash(meeting.common)
        if way is Way.PARTED and common not in self._parted:
            self._parted.add(common)
            self._say(parted_text(meeting.common, meeting.ours, meeting.theirs))
        if way is not Way.MOVE:
            if len(self._looked_at) >= MOST_REMEMBERED:
                del self._looked_at[next(iter(self._looked_at))]
            again = self._clock.now() + self._pause_seconds if way is Way.WAIT else float("inf")
            self._looked_at[status.head] = again
            return
        await self._tasks.in_thread(lambda: self._chain.switch(meeting.theirs))
        if not meeting.ours:
            return
        self._say(
            f"the run has another history from round {meeting.common.round + 1} on, which goes on: "
            f"{tokens_lost(meeting.common, meeting.ours):,} tokens of the one that we had are lost"
        )
