"""The beginning of a round: when it closes, who takes part, and the plan by which slices are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.actions import CloseTraining
from spes_p2p.consensus.audits import drawn
from spes_p2p.consensus.bounds import told
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.fairness import LEADERS_LEAST_ROUND, Fairness
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import LINK_PUBLIC, trainers, weightless
from spes_p2p.consensus.messages import Declaration, Plan, Signed, Status, Work
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.rules import capped_tokens, counts
from spes_p2p.consensus.sizes import plan_fits
from spes_p2p.consensus.slices import Reach, Turn, plan_slices, reducer_order
from spes_p2p.consensus.state import MOST_READY
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
    _fairness: Fairness

    def close(self, now: float) -> bool:
        """The leader closes the round (design 4: those ready trained most, or the learnt time is over)."""
        current = self._state.round
        if current.closing >= 0 or not self._should_close(now):
            return False
        current.closing = current.vote.ballot
        current.closed_at = now
        self._note_close(now)
        return True

    def stop_training(self, now: float) -> bool:
        """The leader said that the round closes. From here on the leader is expected to move on."""
        current = self._state.round
        if current.close_asked or not self._leadership.is_closing() or not self._fairness.may_stop(now):
            return False
        current.close_asked = True
        current.closed_at = current.closed_at or now
        current.progress_at = now
        self._note_close(now)
        if not current.work.ready:
            self._state.out.append(CloseTraining())
        return True

    def _note_close(self, now: float) -> None:
        current = self._state.round
        current.first_closed_at = now if current.first_closed_at is None else current.first_closed_at

    def plan(self, now: float) -> bool:
        """Everyone who was training has stopped, or had time to: name the roster, be it empty."""
        current = self._state.round
        if current.closing < 0 or not self._all_stopped(now):
            return False
        self._note_late(now)
        self.take(self._state.identity.sealer.seal(self._plan_that_fits(self._roster(now), now)), now)
        self._own.has_news = True
        return True

    def _should_close(self, now: float) -> bool:
        is_long_enough = self._fairness.is_long_enough(LEADERS_LEAST_ROUND, now)
        if self._leadership.is_closing() and is_long_enough:  # a leader before us has said so
            return True
        everybody, here = self._members.members_here(now), _counting(self._state.tip, self._members.trainers_here(now))
        ready = [status for status in here if status.work.ready]
        trained = sum(status.work.tokens for status in ready)
        somebody_goes_on = trained > 0 or self._somebody_stays(everybody, now)
        if self._fairness.leavers(everybody) and is_long_enough and somebody_goes_on:
            return True
        if not here:  # those who serve keep the state as it is until there is somebody to name
            return self._newcomer_waits(now) and now - self._state.round.started_at > 2 * self._pace.heartbeat_seconds
        if trained == 0:  # nobody could train: an empty round gives new leases, but in no hurry
            patience = self._pace.close_after_seconds([0.0])
            return len(ready) == len(here) > 0 and now - self._state.round.started_at > patience
        coming = self._coming(now)
        if len(ready) == len(here) and not coming:
            return True
        if not is_long_enough:
            return False
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
        training = {member.peer for member in trainers(self._state.tip.members)} - weightless(self._state.tip.members)
        coming = (s.peer for s in self._contacts.living(now) if s.head == self._state.tip.parent)
        return sum(counted.get(peer, full) for peer in coming if peer in training)

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
        counting = {status.peer for status in _counting(self._state.tip, training)}
        # who counts nothing and says that it does nothing is not waited for: strangers may have any number of keys
        training = [s for s in training if s.peer in counting or s.work.steps or s.work.ready_in_seconds]
        if not training:
            return True
        closed_at = now if current.closed_at is None else current.closed_at
        soon = 2 * self._pace.heartbeat_seconds
        longest = max(
            (s.work.ready_in_seconds for s in training if s.peer in counting - self._others.kept_waiting),
            default=0.0,
        )
        if now - closed_at <= soon:
            return False
        return now - closed_at > soon + 2 * longest or self._is_overdue(now)

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
        said = (Contribution(peer, work.tokens, work.steps, work.sequences, work.commitment) for peer, work in works)
        entries = (capped_tokens(self._rules, self._state.tip, entry) for entry in said)
        return tuple(sorted(entry for entry in entries if entry in self._state.round.ready))

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
        able = [s.peer for s in self._members.members_here(now) if s.intent.can_vote]
        helpers = [peer for peer in sorted(able) if peer not in private]
        training = {member.peer for member in trainers(self._state.tip.members)}
        servers = [peer for peer in helpers if peer not in training]
        known = {peer: intents[peer].uplink_bytes_per_second for peer in (*peers, *helpers) if peer in intents}
        uplinks = {peer: uplink for peer, uplink in known.items() if uplink > 0}
        tiles = self._rules.block_tiles if self._rules.exchange else (0,) * len(self._rules.block_tiles)
        turn = Turn(self._due_columns(now), self._rules.due_shared(self._state.tip.round + 1))
        reach = Reach(private, helpers, servers)
        waiting = weightless(self._state.tip.members)
        counting = [peer for peer in peers if peer not in waiting]
        slices = plan_slices(counting, self._state.tip.ownership, uplinks, tiles, self._rules.slice_tiles, turn, reach)
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
        _, wishes = members_after(self._state.tip, said, (), self._state.admission())
        then = assign(ownership, wishes, self._rules.target_replicas)
        return due | {column for column, owners in enumerate(ownership) if not set(owners) <= set(then[column])}

    def take(self, signed: Signed[Plan], now: float) -> None:
        """Staged tiles stay: they are known by their hashes, whatever plan they came from."""
        current = self._state.round
        if self._is_overdue(now):
            self._note_late(now)
        current.plan = signed
        current.plan_at = now
        self._fairness.expect(now, now)
        current.mine = tuple(i for i, piece in enumerate(signed.value.slices) if self._me in reducer_order(piece))
        current.index_of = {piece.key: i for i, piece in enumerate(signed.value.slices)}
        current.reports.clear()
        current.empty_reports.clear()
        current.seen.clear()
        current.reducing.clear()
        current.failed.clear()
        current.building = None
        current.outcome = None
        current.progress_at = now
        current.drawn = drawn(self._state, signed.value)
        current.auditing = None
        for known in (current.doubted, current.audited, current.accusations, current.barred):
            known.clear()

    def trained(self, work: Work, now: float) -> None:
        """The trainer's progress in this round; `ready` when it stopped."""
        current = self._state.round
        if work.ready and current.ready_at is None:
            current.ready_at = now
            current.progress_at = now
        current.work = told(work)
        if work.ready:
            self.hear_ready(self._members.own_declaration(), now)

    def hear_ready(self, signed: Signed[Declaration], now: float) -> None:
        """Keeps what a member says that it trained on top of our tip, by the roster entry that follows from it."""
        current = self._state.round
        entry = contribution(self._rules, current.tip, signed.value)
        if entry is None or signed.author != entry.peer or entry in current.ready:
            return
        if sum(known.peer == entry.peer for known in current.ready) < MOST_READY:
            current.ready[entry] = signed
            self._state.note_time(current.ready_since, entry.peer, now)

    def is_counted(self, parent: Hash, entry: Contribution) -> bool:
        """Whether a plan for the child of `parent` that has `entry` for us counts the work that is here."""
        here = parent == self._state.round.tip_hash and entry.peer == self._me
        return here and counts(self._rules, self._state.tip, entry, self._state.round.work)


def _counting(tip: Manifest, here: list[Status]) -> list[Status]:
    """Without those whose work does not count as yet: anybody may bring many of these, for others to wait for."""
    waiting = weightless(tip.members)
    return [status for status in here if status.peer not in waiting]
