"""Hands optimizer moments from a column's old owners to its new ones: offers ours, and fetches those that we need.

Runs in the training thread. Moments decay within some tens of steps, so waiting for them is only worth as long as fresh
ones take to settle. A new owner that does not get them starts with fresh ones and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Status
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.observe.events import Columns, Event, Warning
from spes_p2p.ownership.assign import Ownership
from spes_p2p.peer.connection import Connection
from spes_p2p.state.moments import NO_MOMENTS, Moments, check_moments
from spes_p2p.sync.surroundings import Applied
from spes_p2p.train.schedule import RAMP_STEPS
from spes_p2p.train.trainer import Trainer

SHORTEST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 10.0
"""Longest wait for moments; a peer that is leaving has exited by then."""
OFFER_SECONDS = 4.0
"""Longest time to write moments to offer; a leaving peer has no more time to send them, either."""
LOOK_SECONDS = 0.05


def new_owners(before: Ownership, after: Ownership, column: int) -> frozenset[PeerId]:
    """Who owns a column by the later ownership and did not by the earlier."""
    return frozenset(after[column]) - frozenset(before[column])


def former_owners(before: Ownership, after: Manifest, column: int, me: PeerId) -> tuple[PeerId, ...]:
    """Who has moments of a column that we newly own: first those who stay in the run, then those who leave it."""
    members = {member.peer for member in after.members}
    others = [peer for peer in before[column] if peer != me]
    return tuple(sorted(others, key=lambda peer: (peer not in members, peer not in after.ownership[column], peer)))


def _may_ask(status: Status, newest: Manifest) -> bool:
    """Whether a peer may still ask for moments: it is not leaving, and has no later round than `newest`."""
    return not status.intent.leaving and status.round <= newest.round


class HandOver:
    """One peer's side of it, in both directions."""

    def __init__(self, connection: Connection, config: Config, trainer: Trainer, emit: Callable[[Event], None]) -> None:
        self._connection = connection
        self._config = config
        self._trainer = trainer
        self._emit = emit
        self._me = connection.peer_id
        self._orphans: dict[int, tuple[int, Moments]] = {}
        """By column that went from this peer to nobody: its newest version then, and its moments."""
        self.step_seconds = 0.0
        """How long an inner step takes of late."""

    # ---------------------------------------------------------------- giving

    def offer(self, trained_on: Manifest, newest: Manifest) -> None:
        """Keeps the moments of columns that `newest` gives to others, or to nobody, before they are dropped here."""
        self._orphans = {at: kept for at, kept in self._orphans.items() if {*newest.ownership[at]} <= {self._me}}
        if manifest_hash(trained_on) != newest.parent:  # nobody would ask for what was trained so long ago
            return
        wanted = [
            column
            for column in self._trainer.rank.owned
            if new_owners(trained_on.ownership, newest.ownership, column) - {self._me}
        ]
        gone = [column for column in self._trainer.rank.owned if not newest.ownership[column]]
        self._offer(newest.parent, [*wanted, *gone], float("inf"))
        if (shelf := self._connection.disk.moments) is not None:
            self._orphans |= {column: (newest.column_rounds[column], shelf.on_offer(column)) for column in gone}

    def offer_all(self, trained_on: Manifest) -> None:
        """Keeps all of them: this peer is about to leave, and does not know yet who comes after it."""
        self._offer(manifest_hash(trained_on), self._trainer.rank.owned, time.monotonic() + OFFER_SECONDS)

    def _offer(self, head: Hash, columns: Collection[int], until: float) -> None:
        shelf = self._connection.disk.moments
        if shelf is None:
            return
        if not columns:
            shelf.clear()
            return

        def moments_of(column: int) -> Moments:
            return self._trainer.moments(column) if time.monotonic() < until else NO_MOMENTS

        shelf.offer(head, ((column, moments_of(column)) for column in columns))

    def renew_offers(self, applied: Iterable[Applied]) -> None:
        """Moves our offers to the newest of `applied`: while leaving, we trained nothing in those rounds."""
        for event in applied:
            if self._connection.disk.moments is not None:
                self._connection.disk.moments.stands(manifest_hash(event.commit.manifest))

    def wait_until_taken(self, newest: Manifest, until: float) -> None:
        """Serves the new owners of columns that nobody else could hand over, as long as they live, or `until`."""
        shelf = self._connection.disk.moments
        parent = self._connection.disk.chain.parent_of(newest)
        if parent is None:  # another history won in this moment
            return
        staying = {member.peer for member in newest.members} - {self._me}
        heirs = {
            column: new_owners(parent.ownership, newest.ownership, column) - {self._me}
            for column in self._trainer.rank.owned
            if not staying & set(parent.ownership[column])
        }
        while shelf is not None and time.monotonic() < until:
            here = {status.peer for status in self._connection.others() if _may_ask(status, newest)}
            if all(peers & here <= shelf.taken(column) for column, peers in heirs.items()):
                return
            self._connection.gate.wait(time.monotonic() + LOOK_SECONDS, heed_stop=False)

    # ---------------------------------------------------------------- taking

    def take(self, manifest: Manifest, columns: Collection[int]) -> None:
        """Fetches moments of newly owned columns from their former owners, and emits an event about the outcome.

        Former owners are asked in turn, so that one that does not answer costs the other columns little.
        """
        if not columns or not manifest.round:
            return
        parent = self._connection.disk.chain.parent_of(manifest)
        waiting = {
            column: list(former_owners(parent.ownership, manifest, column, self._me)) if parent is not None else []
            for column in sorted(columns)  # nobody is asked where another history won in this moment
        }
        taken = {column for column in waiting if not waiting[column] and self._take_own(manifest, column)}
        until = time.monotonic() + min(max(RAMP_STEPS * self.step_seconds, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
        while any(waiting.values()) and time.monotonic() < until:
            for column, holders in waiting.items():
                if holders and self._take_column(manifest.parent, column, holders, until):
                    taken.add(column)
                    holders.clear()
        fresh = tuple(column for column in waiting if column not in taken)
        self._emit(Columns(manifest.round, tuple(waiting), fresh))

    def _take_own(self, manifest: Manifest, column: int) -> bool:
        """Goes on with what this peer had itself, where nobody has trained the column since."""
        version, moments = self._orphans.pop(column, (-1, NO_MOMENTS))
        is_good = moments.steps > 0 and version == manifest.column_rounds[column]
        if is_good:
            self._trainer.take_moments(column, moments)
        return is_good

    def _take_column(self, head: Hash, column: int, holders: list[PeerId], until: float) -> bool:
        """Asks each of `holders` once, and removes from the list those that have no moments or send unusable ones."""
        for holder in tuple(holders):
            moments = self._connection.fetch_moments(holder, head, column, until)
            if moments is None:
                continue
            if moments.steps and self._is_sound(moments, holder, column):
                self._trainer.take_moments(column, moments)
                return True
            holders.remove(holder)
        return False

    def _is_sound(self, moments: Moments, holder: PeerId, column: int) -> bool:
        optimizer = self._config.optimizer
        try:
            check_moments(moments, optimizer.betas, optimizer.grad_clip)
        except RemoteProtocolError as error:
            self._emit(
                Warning(f"column {column} starts with fresh optimizer moments: peer {short(holder)} sent {error}")
            )
            return False
        return True
