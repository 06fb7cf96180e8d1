"""How a peer comes to a manifest and back to its votes: start, a new tip, sleep, a full disk, a lost record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Roll, electors, leader_order
from spes_p2p.consensus.messages import LOST, DecayOrder, Intent, Signed, Work, declared
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.staging import Staging
from spes_p2p.consensus.state import MAX_SEEDS, Identity, RoundState
from spes_p2p.consensus.statements import is_newer_roll
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.timing import NEVER
from spes_p2p.consensus.vote import Vote
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import PeerId

MOST_DOUBLINGS = 10
"""A stranger that is silent again and again is left out for a thousand rounds at most."""


@dataclass(eq=False)
class Lifecycle(Part):
    """Begins rounds, and puts back what was lost."""

    _contacts: Contacts
    _round_plan: RoundPlan
    _staging: Staging
    _voting: Voting

    def enter(self, tip: Manifest, now: float) -> None:
        before = self._state.round.vote.heard
        is_compared = self._rules.faults is Faults.BYZANTINE and tip.parent == before.parent
        self._others.votes_before = before if is_compared else None
        self._note_silences(tip)
        self._state.round = RoundState(tip, manifest_hash(tip), new_vote(self._state.identity, tip), now, now)
        self._state.round.work = Work(ready=self._own.intent.serving)
        self._state.electors = {member.peer: member.incarnation for member in electors(tip.members)}
        self._liveness.enter()
        self._others.ahead_since = None
        if self._others.asked_last is not None:
            self._others.asked_in_vain.pop(self._others.asked_last, None)
            self._others.asked_last = None
        self._others.asked = {peer: at for peer, at in self._others.asked.items() if self._others.asked_in_vain[peer]}
        self._contacts.note_members()
        named = {member.peer for member in tip.members}
        self._others.voted_twice &= named
        self._others.kept_waiting -= {entry.peer for entry in tip.roster}
        for peer in [p for p in self._others.contacts if p not in named and not self._contacts.alive(p, now)]:
            self._contacts.forget(peer)
        for contact in self._others.contacts.values():
            self._round_plan.hear_ready(declared(contact.signed))

    def _note_silences(self, child: Manifest) -> None:
        """A stranger whose values did not come costs no round in a row: each time it is left out for twice as long.

        What it trained meanwhile waits with it, and is counted then.
        """
        before, silences = self._state.round, self._others.silences
        if self._rules.has_strangers and child.parent == before.tip_hash:
            left_out = (entry for _, signed in before.all_reports() for entry in signed.value.left_out)
            lost = self._rules.admission_of(before.tip).strangers_of(peer for peer, why in left_out if why == LOST)
            for peer in {entry.peer for entry in child.roster} - lost:
                silences.pop(peer, None)
            for peer in lost:
                times = silences.get(peer, (0, 0))[0] + 1
                silences[peer] = times, child.round + 1 + 2 ** min(times, MOST_DOUBLINGS)
        for peer in silences.keys() - {member.peer for member in child.members}:
            del silences[peer]

    def resume(self, record: VoteRecord) -> None:
        """Back with what is on disk: we hold to every vote in it."""
        self._voting.resume(record)

    def notice_sleep(self, now: float) -> None:
        """After a late event (the machine slept), takes the silence for our own: restarts all waits, and asks."""
        asleep = now - self._state.last_event
        self._state.last_event = now
        if asleep <= 5 * self._pace.heartbeat_seconds:
            return
        current = self._state.round
        for contact in self._others.contacts.values():
            contact.at = NEVER
            contact.direct_at += asleep
        self._own.sequence += 1
        self._own.life = self._own.sequence  # what was sent to us before we slept is no answer
        self._others.refused_dial.clear()
        self._liveness.ask(now, has_slept=True)
        current.started_at += asleep
        if current.closed_at is not None and current.closing >= 0:  # another leader has waited for running steps
            current.closed_at += asleep
        if current.first_closed_at is not None:
            current.first_closed_at += asleep
        current.plan_at += asleep
        current.progress_at = current.heavier_at = now
        self._others.short_since = self._others.counted_since = None
        current.seen = dict.fromkeys(current.seen, now)

    def disk_full(self, durable: VoteRecord, now: float) -> None:
        """No room: back to the voting record that is on disk, nothing is staged any more, and we cannot vote.

        Whatever was asked for and not done is asked for again when there is room.
        """
        self._own.intent = replace(self._own.intent, can_vote=False)
        self._liveness.was_full = True
        self._staging.forget()
        is_ours = durable.parent == self._state.tip_hash
        self._voting.not_persisted(durable if is_ours else VoteRecord(self._state.tip_hash), now)

    def disk_has_room(self, for_state: bool) -> None:
        """There may be room again: stage anew and vote. Others count on it where there is room `for_state`, or once
        something was written."""
        if not self._own.intent.can_vote:
            self._staging.forget()  # what was asked for meanwhile was not begun; what is under way since then is
        self._own.intent = replace(self._own.intent, can_vote=True)
        self._liveness.was_full = self._liveness.was_full and not for_state

    def begin_incarnation(self, incarnation: int) -> None:
        """What we voted for is forgotten on disk too: this incarnation is a newcomer (see `Forget`)."""
        self._own.incarnation = incarnation

    def change_intent(self, intent: Intent) -> None:
        """What this peer wants has changed (join, leave, claims)."""
        self._own.intent = replace(intent, can_vote=self._own.intent.can_vote)

    def order_decay(self, order: Signed[DecayOrder]) -> None:
        """The organiser has signed that the learning rate falls; what we propose from now on says so."""
        self._others.decay = order

    def take_roll(self, signed: Signed[Roll]) -> None:
        """Keeps the organiser's newest roll, for the next manifest of which this peer is the leader."""
        known = self._others.roll
        if is_newer_roll(self._state.rules, known.value if known is not None else None, signed):
            self._others.roll = signed

    def peers_found(self, known: Iterable[PeerId]) -> None:
        """Peers of the run that were found somewhere: those who are no members hear our next statuses."""
        named = {member.peer for member in self._state.tip.members} | {self._me}
        strangers = sorted(peer for peer in known if peer not in named)
        self._others.seeds = tuple(sorted(strangers, key=lambda peer: peer in self._others.seeds)[:MAX_SEEDS])

    def uplink_measured(self, bytes_per_second: int) -> None:
        """Notes our measured uplink in the last round; due with READY at the latest, for the next plan."""
        self._own.uplink_bytes_per_second = bytes_per_second


def new_vote(identity: Identity, tip: Manifest) -> Vote:
    """Nothing is said yet of the child of `tip`."""
    head, rules = manifest_hash(tip), identity.rules
    electorate = Electorate(leader_order(head, tip.members), rules.faults)
    return Tendermint.begin(identity.me, electorate, rules.fingerprint, VoteRecord(head), identity.sealer).vote
