"""The beginning of a round: when it closes, who takes part, and the plan by which slices are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.actions import CloseTraining
from spes_p2p.consensus.bounds import told
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import LINK_PUBLIC, trainers
from spes_p2p.consensus.messages import Declaration, Plan, Signed, Status, Work
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.rules import capped_tokens, counts
from spes_p2p.consensus.sizes import plan_fits
from spes_p2p.consensus.slices import Reach, Turn, plan_slices, reducer_order
from spes_p2p.consensus.state import MOST_READY, RoundState, State
from spes_p2p.consensus.statements import contribution, members_after
from spes_p2p.consensus.turns import due_columns
from spes_p2p.ids import Hash
from spes_p2p.ownership.assign import assign


@dataclass(eq=False)
class RoundPlan(Part):
    """Closes the round and plans it."""

    _contacts: Contacts
    _leadership: Leadership
    _members: Members

    def close(self, now: float) -> bool:
        """The leader closes the round (design 4: those ready trained most, or the learnt time is over)."""
        current = self._state.round
        if current.closing >= 0 or not self._should_close(now):
            return False
        current.closing = current.vote.ballot
        current.closed_at = now
        _note_close(current, now)
        return True

    def stop_training(self, now: float) -> bool:
        """The leader said that the round closes. From here on the leader is expected to move on."""
        current = self._state.round
        if current.close_asked or not self._leadership.is_closing():
            return False
        current.close_asked = True
        current.closed_at = current.closed_at or now
        current.progress_at = now
        _note_close(current, now)
        if not current.work.ready:
            self._state.out.append(CloseTraining())
        return True

    def plan(self, now: float) -> bool:
        """Everyone who was training has stopped, or had time to: name the roster, be it empty."""
        current = self._state.round
        if current.closing < 0 or not self._all_stopped(now):
            return False
        plan = self._plan_that_fits(self._roster(now), now)
        if not self.has_quorum(plan, now):
            return False
        self._note_late(now)
        self.take(self._state.identity.sealer.seal(plan), now)
        self._own.has_news = True
        return True

    def _should_close(self, now: float) -> bool:
        if self._leadership.is_closing():  # a leader before us has said so
            return True
        everybody, here = self._members.members_here(now), _pacemakers(self._state, self._members.trainers_here(now))
        ready = [status for status in here if status.work.ready]
        trained = sum(status.work.tokens for status in ready)
        somebody_goes_on = trained > 0 or self._somebody_stays(everybody, now)
        if _somebody_leaves(_pacemakers(self._state, everybody)) and somebody_goes_on:
            return True
        if not here:  # those who serve keep the state as it is until there is somebody to name
            return self._newcomer_waits(now) and now - self._state.round.started_at > 2 * self._pace.heartbeat_seconds
        if trained == 0:  # nobody could train: an empty round gives new leases, but in no hurry
            patience = self._pace.close_after_seconds([0.0])
            return len(ready) == len(here) > 0 and now - self._state.round.started_at > patience
        coming = self._coming(now)
        if len(ready) == len(here) and not coming:
            return True
        total, wait = self._trained_by_now(here, now)
        total += coming
        elapsed = now - self._state.round.started_at
        if trained >= self._pace.CLOSE_SHARE * total:
            return True
        if trained >= self._pace.HALF * total and wait > self._pace.WAIT_SHARE * elapsed:
            return True
        seconds = [status.work.seconds for status in ready if status.work.tokens]
        return elapsed > self._pace.close_after_seconds(seconds, most=2 * len(ready) >= len(here))

    def _coming(self, now: float) -> int:
        """Expected tokens of live members that are about to reach our tip and may be READY then (overlap)."""
        if now - self._state.round.started_at > self._pace.arrival_seconds():
            return 0
        counted = {entry.peer: entry.tokens for entry in self._state.tip.roster}
        full = self._state.tip.steps_per_round * self._rules.batch_sequences * self._rules.sequence_tokens
        training = {member.peer for member in trainers(self._state.tip.members)}
        coming = [s for s in self._contacts.living(now) if s.head == self._state.tip.parent and s.peer in training]
        return sum(counted.get(status.peer, full) for status in _pacemakers(self._state, coming))

    def _newcomer_waits(self, now: float) -> bool:
        """Whether somebody who is no member has the state of our head and would take part."""
        known = {member.peer: member.incarnation for member in self._state.tip.members}
        return any(known.get(status.peer) != status.incarnation for status in self._contacts.joining(now))

    def _trained_by_now(self, here: list[Status], now: float) -> tuple[float, float]:
        """(tokens trained by all so far, seconds until the next peer is ready), from the speeds that peers announce.

        Counts tokens trained by now, not by the end of a wait; otherwise a round would last as long as the slowest peer
        took in the one before, and stay that long.
        """
        counted = {entry.peer: entry.tokens for entry in self._state.tip.roster}
        full = self._state.tip.steps_per_round * self._rules.batch_sequences * self._rules.sequence_tokens
        total, waits = 0.0, []
        for work, peer in ((status.work, status.peer) for status in here):
            most = max(work.tokens, work.expected_tokens or full)
            if work.ready:
                total += work.tokens
            elif work.seconds > 0 and work.tokens > 0:
                speed = work.tokens / work.seconds
                so_far = min(most, speed * max(work.seconds, now - self._state.round.started_at))
                total += so_far
                waits.append((most - so_far) / speed)
            else:  # it has told nothing yet
                total += max(work.tokens, counted.get(peer, most))
                waits.append(0.0)
        return total, min(waits, default=0.0)

    def _somebody_stays(self, here: list[Status], now: float) -> bool:
        """Whether a round without its leavers would have members; the last to leave have nobody to tell."""
        known = {status.peer for status in here}
        stay = any(not status.intent.leaving for status in here)
        return stay or any(status.peer not in known for status in self._contacts.joining(now))

    def _all_stopped(self, now: float) -> bool:
        current = self._state.round
        training = [s for s in self._members.members_here(now) if not s.work.ready]
        trusted = {status.peer for status in _pacemakers(self._state, training)}
        # a stranger that the last round did not count is not waited for: it may have any number of keys
        known = trusted | {entry.peer for entry in self._state.tip.roster}
        training = [status for status in training if status.peer in known]
        if not training:
            return True
        closed_at = now if current.closed_at is None else current.closed_at
        soon = 2 * self._pace.heartbeat_seconds
        most = self._pace.stranger_seconds()
        waited_for = (
            s.work.ready_in_seconds if s.peer in trusted else min(s.work.ready_in_seconds, most)
            for s in training
            if s.peer not in self._others.kept_waiting
        )
        longest = max(waited_for, default=0.0)
        if now - closed_at <= soon:
            return False
        return now - closed_at > soon + 2 * longest or self._is_overdue(now)

    def has_quorum(self, plan: Plan, now: float) -> bool:
        """Whether a quorum of the electors is READY by a plan: what they trained is in it, or it is nothing.

        Only where leaders may lie; manifests are held to the same (see `statements`).
        """
        if self._rules.faults is not Faults.BYZANTINE:
            return True
        ready = [status for status in self._members.members_here(now) if status.work.ready]
        named = {entry.peer for entry in plan.roster} | {status.peer for status in ready if not status.work.tokens}
        return len(named & self._state.electors.keys()) >= self._state.electorate.quorum

    def _is_overdue(self, now: float) -> bool:
        """Whether the leaders of the round, all together, have waited for running steps for long enough."""
        current, first = self._state.round, self._state.round.first_closed_at
        if first is None:
            return False
        most = self._pace.last_step_seconds(first - current.started_at)
        return now - first > 2 * self._pace.heartbeat_seconds + most

    def _note_late(self, now: float) -> None:
        """Notes peers that were waited for in vain, who are not waited for again (see `Others`)."""
        here = (status for status in self._members.members_here(now) if status.peer != self._me)
        late = {status.peer for status in here if not status.work.ready and status.work.ready_in_seconds > 0}
        for peer in sorted(late - self._others.kept_waiting):
            self._state.notify("late", "the closed round waited for its running step, which did not end in time", peer)
        self._others.kept_waiting |= late

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        works = ((status.peer, status.work) for status in self._members.trainers_here(now) if status.work.ready)
        said = (Contribution(peer, work.tokens, work.steps, work.sequences) for peer, work in works)
        entries = (capped_tokens(self._rules, self._state.tip, entry) for entry in said)
        round, silences = self._state.tip.round + 1, self._others.silences  # see `Lifecycle`
        here = (entry for entry in entries if silences.get(entry.peer, (0, 0))[1] <= round)
        return tuple(sorted(entry for entry in here if entry in self._state.round.ready))

    def _plan_that_fits(self, roster: tuple[Contribution, ...], now: float) -> Plan:
        """Counts fewer where nobody could be told of all: electors stay, then those that the last round counted."""
        tip = self._state.tip
        before = {entry.peer for entry in tip.roster}
        order = sorted(
            roster, key=lambda entry: (entry.peer not in self._state.electors, entry.peer not in before, entry)
        )
        while True:
            plan = self._make_plan(tuple(sorted(order)), now)
            if len(order) <= 1 or plan_fits(self._rules, tip, order, plan.slices):
                return plan
            del order[max(1, len(order) * 3 // 4) :]

    def _make_plan(self, roster: tuple[Contribution, ...], now: float) -> Plan:
        intents = {peer: contact.status.intent for peer, contact in self._others.contacts.items()}
        intents[self._me] = self._members.announced_intent()
        peers = [entry.peer for entry in roster]
        private = {peer for peer, intent in intents.items() if intent.link_class != LINK_PUBLIC}
        electors, admission = self._state.electors.keys(), self._state.admission()
        able = {s.peer for s in self._members.members_here(now) if s.intent.can_vote} & electors
        helpers = [peer for peer in sorted(able) if peer not in private]
        training = {member.peer for member in trainers(self._state.tip.members)}
        servers = [peer for peer in helpers if peer not in training]
        known = {peer: intents[peer].uplink_bytes_per_second for peer in (*peers, *helpers) if peer in intents}
        uplinks = {peer: uplink for peer, uplink in known.items() if uplink > 0}
        tiles = self._rules.block_tiles if self._rules.exchange else (0,) * len(self._rules.block_tiles)
        turn = Turn(self._due_columns(now), self._rules.due_shared(self._state.tip.round + 1))
        reach = Reach(electors, private, helpers, servers, admission.strangers_of(peers))
        slices = plan_slices(peers, self._state.tip.ownership, uplinks, tiles, self._rules.slice_tiles, turn, reach)
        return Plan(
            self._rules.fingerprint, self._state.round.tip_hash, self._state.round.vote.ballot, self._me, roster, slices
        )

    def _due_columns(self, now: float) -> frozenset[int]:
        """Those whose turn it is or was, and those that an owner is about to lose, whose master may be rounds ahead."""
        ownership, every, round = self._state.tip.ownership, self._rules.expert_rounds, self._state.tip.round + 1
        due = due_columns(ownership, round, every)
        if every == 1:
            return due
        due |= {column for column, last in enumerate(self._state.tip.column_rounds) if round - last >= every}
        said = (signed.value for signed in self._members.declarations(now))
        admission = self._state.admission()
        _, wishes = members_after(self._state.tip, said, (), admission)
        then = assign(ownership, wishes, self._rules.target_replicas, strangers=admission.strangers_of(wishes))
        return due | {column for column, owners in enumerate(ownership) if not set(owners) <= set(then[column])}

    def take(self, signed: Signed[Plan], now: float) -> None:
        """Staged tiles stay: they are known by their hashes, whatever plan they came from."""
        current = self._state.round
        if self._is_overdue(now):
            self._note_late(now)
        current.plan = signed
        current.plan_at = now
        current.mine = tuple(
            i for i, piece in enumerate(signed.value.slices) if self._me in reducer_order(piece, self._state.electors)
        )
        current.index_of = {piece.key: i for i, piece in enumerate(signed.value.slices)}
        current.reports.clear()
        current.empty_reports.clear()
        current.seen.clear()
        current.reducing.clear()
        current.failed.clear()
        current.building = None
        current.outcome = None
        current.progress_at = now

    def trained(self, work: Work, now: float) -> None:
        """The trainer's progress in this round; `ready` when it stopped."""
        current = self._state.round
        if work.ready and current.ready_at is None:
            current.ready_at = now
            current.progress_at = now
        current.work = told(work)
        if work.ready:
            self.hear_ready(self._members.own_declaration())

    def hear_ready(self, signed: Signed[Declaration]) -> None:
        """Keeps what a member says that it trained on top of our tip, by the roster entry that follows from it."""
        current = self._state.round
        entry = contribution(self._rules, current.tip, signed.value)
        if entry is None or signed.author != entry.peer or entry in current.ready:
            return
        if sum(known.peer == entry.peer for known in current.ready) < MOST_READY:
            current.ready[entry] = signed

    def is_counted(self, parent: Hash, entry: Contribution) -> bool:
        """Whether a plan for the child of `parent` that has `entry` for us counts the work that is here."""
        here = parent == self._state.round.tip_hash and entry.peer == self._me
        return here and counts(self._rules, self._state.tip, entry, self._state.round.work)


def _note_close(current: RoundState, now: float) -> None:
    current.first_closed_at = now if current.first_closed_at is None else current.first_closed_at


def _pacemakers(state: State, here: list[Status]) -> list[Status]:
    """Those by whom a round is timed: strangers give what they have by then, since anybody may claim anything."""
    admission = state.admission()
    return [status for status in here if admission.is_trusted(status.peer)]


def _somebody_leaves(here: list[Status]) -> bool:
    """Whether one of these leaves and is READY: a round ends for it."""
    return any(status.work.ready and status.intent.leaving for status in here)
