"""What the live view asks of a running peer: its place in the run, the phase of the sync, who contributed what.

Read from other threads than the network's: whole values that are replaced, never lists that change. Decides nothing.
"""

from __future__ import annotations

from collections import Counter

from spes_p2p.errors import SpesError
from spes_p2p.ids import PeerId
from spes_p2p.observe.live import WAITING, Facts
from spes_p2p.ownership.assign import columns_of, orphans
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.phases import phase_of, slices_done
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.chain import Chain

ROUNDS_COUNTED = 100
"""The newest rounds by which contributors are ranked."""


class Contributions:
    """Tokens by peer in the newest rounds, as the certificates count them."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._rounds: dict[int, dict[PeerId, int]] = {}

    def follow(self, newest: int) -> None:
        """Reads the rounds that it does not know yet; those of a damaged chain are left out."""
        if any(round > newest for round in self._rounds):  # another history has won
            self._rounds = {}
        for round in range(max(1, newest - ROUNDS_COUNTED + 1), newest + 1):
            if round not in self._rounds:
                try:
                    roster = self._chain.commit(round).manifest.roster
                except SpesError:
                    continue
                self._rounds[round] = {entry.peer: entry.tokens for entry in roster}
        self._rounds = {round: found for round, found in self._rounds.items() if newest - ROUNDS_COUNTED < round}

    def rank(self, me: PeerId) -> tuple[int, int, int]:
        """(rounds that counted this peer, its rank or 0, contributors)."""
        total: Counter[PeerId] = Counter()
        for found in self._rounds.values():
            total.update(found)
        ahead = sum(tokens > total[me] for tokens in total.values())
        return sum(me in found for found in self._rounds.values()), ahead + 1 if total[me] else 0, len(total)


class LiveFacts:
    """Called by whoever draws."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._contributions = Contributions(connection.disk.chain)

    def __call__(self) -> Facts:
        connection = self._connection
        current, me = connection.driver.core.state.round, connection.peer_id
        tip = current.tip
        self._contributions.follow(tip.round)
        counted, rank, contributors = self._contributions.rank(me)
        members = {member.peer for member in tip.members}
        others = [status for status in connection.others() if status.peer in members]
        done, total = slices_done(current)
        return Facts(
            phase=phase_of(current) if me in members else WAITING,
            done=done,
            total=total,
            members=len(members),
            heard=len(others) + (me in members),
            columns=len(tip.ownership),
            covered=len(tip.ownership) - len(orphans(tip.ownership)),
            owned=columns_of(tip.ownership, me),
            counted_rounds=counted,
            rank=rank,
            contributors=contributors,
            shares=tip.credit_of(me),
            round=tip.round,
            step=tip.step,
            swarm_tokens=tip.tokens,
            swarm_tokens_per_second=self._speed(connection.known()),
            leaving=connection.gate.stopping or (connection.last_round or tip.round + 1) <= tip.round,
        )

    def _speed(self, known: dict[PeerId, PeerRecord]) -> float:
        """By what peers say of themselves in the DHT; our own as it is now."""
        me = self._connection.peer_id
        others = sum(record.tokens_per_second for peer, record in known.items() if peer != me)
        return others + self._connection.presence.progress.tokens_per_second
