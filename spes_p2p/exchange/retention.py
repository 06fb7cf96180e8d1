"""What a donor keeps for those who are fetching a state from it, although the run has gone on.

A peer that asks for the hashes or tiles of a state takes a lease on it and renews it with each request; a lease on a
newer state replaces it. While a lease lives, the state stays on disk, and so does what the rounds after it handed out,
with which the leaseholder catches up. Bounded in the number of states and in time, and void when the disk gets full.
Only decides; the driver drops everything else after each commit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.exchange.requests import HashesRequest, Request, TilesRequest, WiresRequest
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.store import StateStore

IDLE_SECONDS = 2100.0
"""A lease that is not renewed ends: a request for tiles may wait in line, and be answered, for 34 minutes in all."""
LONGEST_SECONDS = 24 * 3600.0
MOST_STATES = 2
"""States that are kept for others, beside the two newest."""
MOST_ROUNDS = 64
"""Most rounds for which the tiles that they handed out are kept."""
MOST_LEASES = 64


@dataclass
class _Lease:
    """`has_state`: its holder needs only what was handed out after `round`. `first`: since when it had what was
    kept for it last."""

    round: int
    since: float
    at: float
    has_state: bool
    first: float


class Retention:
    """The leases of one store. Calls may come from any thread of one loop's pool, one at a time."""

    def __init__(self, store: StateStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._leases: dict[PeerId, _Lease] = {}
        lossy = any(store.layout.codec_of(block.index) != "fp32" for block in store.layout.blocks)
        self._states_are_made = lossy or store.layout.has_momentum  # of what rounds hand out: another thing than they

    def asked(self, caller: PeerId, request: Request) -> None:
        """`caller` was given what it asked for."""
        if isinstance(request, HashesRequest) and request.round in self._store.rounds():
            self._take(caller, request.round, False)
        elif isinstance(request, WiresRequest):
            self._take(caller, min(request.base_round, request.round - 1), True)
        elif isinstance(request, TilesRequest):
            self._asked_tile(caller, request.hashes[0])

    def _asked_tile(self, caller: PeerId, first: Hash) -> None:
        """A tile may be in several states: it is of the one that the caller has begun with, if it is in there.

        Who wants what a round handed out has the state before it: rounds are gone through in their order.
        """
        lease = self._leases.get(caller)
        if lease is not None and not lease.has_state and self._store.holds(lease.round, first):
            lease.at = self._now()
        elif (round := self._store.round_of(first)) is not None:
            self._take(caller, round, False)
        elif (round := self._store.handed_out_in(first)) is not None:
            known = lease.round if lease is not None and lease.has_state else 0
            self._take(caller, max(known, round - 1), True)

    def _take(self, caller: PeerId, round: int, has_state: bool) -> None:
        now, lease = self._now(), self._leases.get(caller)
        if lease is None:
            if len(self._leases) < MOST_LEASES:
                self._leases[caller] = _Lease(round, now, now, has_state, now)
            return
        if round < lease.round:  # going to and fro must not renew a lease on an old state for ever
            lease.since = lease.first
        elif round > lease.round:
            lease.since = now
        lease.round, lease.at, lease.has_state = round, now, has_state

    def clear(self) -> None:
        """The disk is full: nobody is promised anything."""
        self._leases.clear()

    def needed(self, tip: int) -> tuple[frozenset[int], frozenset[int]]:
        """(rounds whose states stay, rounds of which stays what they handed out), of those before `tip` - 1."""
        now = self._now()
        self._leases = {
            peer: lease
            for peer, lease in self._leases.items()
            if now - lease.at <= IDLE_SECONDS and now - lease.since <= LONGEST_SECONDS
        }
        if shutil.disk_usage(self._store.directory).free < self._store.layout.num_values * VALUE_BYTES:
            self.clear()
        for lease in self._leases.values():
            lease.first = lease.since  # what it needed before goes now
        by_age = sorted(self._leases.values(), key=lambda lease: lease.since)
        states = dict.fromkeys(lease.round for lease in by_age if not lease.has_state and lease.round < tip - 1)
        kept = frozenset(list(states)[:MOST_STATES])
        first = min((*kept, *(lease.round for lease in by_age if lease.has_state)), default=tip)
        wires = range(max(first + 1, tip - MOST_ROUNDS), tip) if self._states_are_made else ()
        return kept, frozenset(wires)
