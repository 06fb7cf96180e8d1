"""How a node without a state follows the run: headers alone, checked, and where histories meet the one that wins.

Which peer is asked comes from what peers say of themselves; one is asked at a time. States are others' business.
"""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.swarm.ports import Clock
from spes_p2p.sync.catch_up import CatchUp, Parted
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.core.forks import tokens_lost
from spes_p2p.sync.core.messages import Status, manifest_hash
from spes_p2p.sync.tasks import Tasks

MOST_REMEMBERED = 256
"""Heads of others of which we remember that their history is not the one to follow."""


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
    ) -> None:
        """Who could not give what it says it has is not asked for `pause_seconds`."""
        self._chain = chain
        self._catch_up = catch_up
        self._tasks = tasks
        self._moved = moved
        self._say = say
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._paused: dict[PeerId, float] = {}
        self._said = ""
        self._outdone: dict[Hash, None] = {}
        self.under_way = False

    def hear(self, status: Status) -> None:
        """Follows who is further than we are, or stands on another history that we have not looked at."""
        if self.under_way or status.head == NO_HASH or status.round < 0 or status.head in self._outdone:
            return
        if self._clock.now() < self._paused.get(status.peer, float("-inf")):
            return
        if status.round >= self._chain.length or not self._is_ours(status):
            self.under_way = True
            self._tasks.spawn(self._follow(status))

    def _is_ours(self, status: Status) -> bool:
        newest = self._chain.newest
        if newest is None or newest.manifest.round != status.round:
            newest = self._chain.find(status.round)
        return newest is not None and manifest_hash(newest.manifest) == status.head

    async def _follow(self, status: Status) -> None:
        try:
            try:
                if status.round < self._chain.length:
                    raise Parted(f"{short(status.peer)} stands on another history of the run")
                await self._catch_up.headers(self._chain.length - 1, status.peer, status.round)
            except Parted:
                await self._meet(status)
            self._moved()
        except (NetworkError, RemoteProtocolError, StorageFull) as error:
            self._pause(status.peer, f"peer {short(status.peer)} could not give its newest certificates: {error}")
        finally:
            self.under_way = False

    def _pause(self, peer: PeerId, text: str) -> None:
        now = self._clock.now()
        self._paused = {other: until for other, until in self._paused.items() if until > now}
        self._paused[peer] = now + self._pause_seconds
        if text != self._said:
            self._said = text
            self._say(text)

    async def _meet(self, status: Status) -> None:
        """Two histories: takes theirs if it wins; else it is not asked for again."""
        meeting = await self._catch_up.meet(self._chain.length - 1, status.peer, status.round)
        if meeting.winner is None:
            if len(self._outdone) >= MOST_REMEMBERED:
                del self._outdone[next(iter(self._outdone))]
            self._outdone[status.head] = None
            return
        await self._tasks.in_thread(lambda: self._chain.switch(meeting.theirs))
        self._say(
            f"the run has another history from round {meeting.common.round + 1} on, which goes on: "
            f"{tokens_lost(meeting.common, meeting.ours):,} tokens of the one that we had are lost"
        )
