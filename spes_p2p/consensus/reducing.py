"""The rules of the first half of a round: close it, plan it, reduce, fetch and build the new state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.consensus.actions import Build, CloseTraining, Fetch, Reduce
from spes_p2p.consensus.fragments import due_columns, due_tiles
from spes_p2p.consensus.membership import LINK_PUBLIC, trainers
from spes_p2p.consensus.messages import Contribution, Manifest, Plan, Report, Slice, Status
from spes_p2p.consensus.round_state import CoreState
from spes_p2p.consensus.rules import capped_tokens, merge_alpha_for, next_step
from spes_p2p.consensus.slices import plan_slices, reducer_order
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.ownership.assign import assign

SURE = 2
"""So many reducers must have found nobody's values fit; where fewer can be asked, all of them."""
LOST = "lost"
"""Reason of a contributor that a reducer could not reach: another reducer may."""


class Reducing(CoreState):
    """From training to a new state on the leader's disk."""

    def handed_out(self, child: Manifest) -> tuple[tuple[Slice, ...], tuple[bytes, ...]]:
        """Slices of a committed child of our tip with the hashes of their tiles, as far as we know: ours at least."""
        for signed in self.round.proposals.values():  # anybody may sign other hashes to a manifest
            hashes = signed.value.wire_hashes
            fits = len(hashes) == len(child.slices) and sha256(*hashes) == child.wire_root
            if fits and signed.value.manifest == child and _is_whole(child.slices, hashes):
                return child.slices, hashes
        plan, pairs = self.round.plan, []
        for index, report in self.round.reports.items():
            if plan is None or report.author != self.me or not set(child.roster) <= set(plan.value.roster):
                continue
            piece = replace(plan.value.slices[index], reducer=self.me, contributors=report.value.contributors)
            if piece in child.slices:
                pairs.append((piece, b"".join(report.value.wire_hashes)))
        return tuple(piece for piece, _ in pairs), tuple(hashes for _, hashes in pairs)

    def _rule_close(self, now: float) -> bool:
        """The leader closes the round (design 4: those ready trained most, or the learnt time is over)."""
        current = self.round
        if current.closing >= 0 or not self._should_close(now):
            return False
        current.closing = current.view
        current.closed_at = now
        return True

    def _rule_stop_training(self, now: float) -> bool:
        """The leader said that the round closes. From here on the leader is expected to move on."""
        current = self.round
        if current.close_asked or not self._is_closing():
            return False
        current.close_asked = True
        current.closed_at = current.closed_at or now
        current.progress_at = now
        if not current.work.ready:
            self._out.append(CloseTraining())
        return True

    def _rule_plan(self, now: float) -> bool:
        """Everyone who was training has stopped, or had time to: name the roster, be it empty."""
        current = self.round
        if current.closing < 0 or not self._all_stopped(now):
            return False
        self._note_late(now)
        self._take_plan(self._sealer.seal(self._make_plan(self._roster(now), now)), now)
        self._news = True
        return True

    def _rule_reduce(self, now: float) -> bool:
        """The first peer in a slice's order that is able to reduces it."""
        current = self.round
        if current.plan is None or self._stands_by_a_state():
            return False
        plan = current.plan
        started = False
        for index in current.mine:
            if index in current.reports or index in current.reducing:
                continue
            if self._acting_reducer(index, plan.value.slices[index], now) == self.me:
                current.reducing.add(index)
                self._out.append(Reduce(plan, index))
                started = True
        return started

    def _rule_fetch(self, now: float) -> bool:
        """Get every slice that is wanted and not here."""
        current, started = self.round, False
        for key, wanted in self._missing().items():
            if current.fetching.get(key) == wanted.hashes or key in current.failed:
                continue
            current.fetching[key] = wanted.hashes
            self._out.append(Fetch(wanted.piece, wanted.hashes, self._holders(wanted.piece, wanted.first, now)))
            started = True
        return started

    def _rule_refetch(self, now: float) -> bool:
        """What could not be fetched is tried again with the next heartbeat."""
        current = self.round
        if not current.failed or now < self._next_heartbeat:
            return False
        self._note_vain_try(self._target())
        current.failed.clear()
        return True

    def _rule_build(self, now: float) -> bool:
        """All slices that can come about are staged: the leader computes the new state."""
        current = self.round
        if current.building or self._target() is not None or self._bound()[0] or self._verified_before() is not None:
            return False
        chosen = self._resolved_slices(now)
        if chosen is None:
            return False
        roster = self._counted(tuple(piece for piece, _ in chosen))
        alpha = merge_alpha_for(self.rules, current.tip.step, next_step(current.tip.step, roster))
        current.reducing.clear()
        current.building = Build(roster, tuple(p for p, _ in chosen), tuple(h for _, h in chosen), alpha)
        self._out.append(current.building)
        return True

    def _should_close(self, now: float) -> bool:
        if self._is_closing():  # a leader before us has said so
            return True
        everybody, here = self._members_here(now), self._trainers_here(now)
        ready = [status for status in here if status.work.ready]
        trained = sum(status.work.tokens for status in ready)
        leaving = [status for status in everybody if status.work.ready and status.intent.leaving]
        if leaving and (trained > 0 or self._somebody_stays(everybody, now)):
            return True
        if not here:  # those who serve keep the state as it is until there is somebody to name
            return self._newcomer_waits(now) and now - self.round.started_at > 2 * self.pace.heartbeat_seconds
        if trained == 0:  # nobody could train: an empty round gives new leases, but in no hurry
            patience = self.pace.close_after_seconds([0.0])
            return len(ready) == len(here) > 0 and now - self.round.started_at > patience
        coming = self._coming(now)
        if len(ready) == len(here) and not coming:
            return True
        total, wait = self._trained_by_now(here, now)
        total += coming
        elapsed = now - self.round.started_at
        if trained >= self.pace.CLOSE_SHARE * total:
            return True
        if trained >= self.pace.HALF * total and wait > self.pace.WAIT_SHARE * elapsed:
            return True
        seconds = [status.work.seconds for status in ready if status.work.tokens]
        return elapsed > self.pace.close_after_seconds(seconds, most=2 * len(ready) >= len(here))

    def _coming(self, now: float) -> int:
        """Tokens to be expected of living members that are about to have our tip: they may be READY then (overlap)."""
        if now - self.round.started_at > self.pace.arrival_seconds():
            return 0
        counted = {entry.peer: entry.tokens for entry in self.tip.roster}
        full = self.tip.steps_per_round * self.rules.batch_sequences * self.rules.sequence_tokens
        contacts = ((member.peer, self.contacts.get(member.peer)) for member in trainers(self.tip.members))
        return sum(
            counted.get(peer, full)
            for peer, contact in contacts
            if contact is not None and contact.status.head == self.tip.parent and self.alive(peer, now)
        )

    def _newcomer_waits(self, now: float) -> bool:
        """Whether somebody who is no member has the state of our head and would take part."""
        known = {member.peer: member.incarnation for member in self.tip.members}
        others = (contact.status for peer, contact in self.contacts.items() if self.alive(peer, now))
        return any(
            s.head == self.round.head
            and s.intent.joining
            and not s.intent.leaving
            and known.get(s.peer) != s.incarnation
            for s in others
        )

    def _trained_by_now(self, here: list[Status], now: float) -> tuple[float, float]:
        """(tokens of all, seconds until the next one is ready), from the speed that those who still train told of.

        Not the tokens that they would have if they were waited for: then a round would be given the time that the
        slowest took in the one before, and stay that long.
        """
        counted = {entry.peer: entry.tokens for entry in self.tip.roster}
        full = self.tip.steps_per_round * self.rules.batch_sequences * self.rules.sequence_tokens
        total, waits = 0.0, []
        for work, peer in ((status.work, status.peer) for status in here):
            most = max(work.tokens, work.expected_tokens or full)
            if work.ready:
                total += work.tokens
            elif work.seconds > 0 and work.tokens > 0:
                speed = work.tokens / work.seconds
                so_far = min(most, speed * max(work.seconds, now - self.round.started_at))
                total += so_far
                waits.append((most - so_far) / speed)
            else:  # it has told nothing yet
                total += max(work.tokens, counted.get(peer, most))
                waits.append(0.0)
        return total, min(waits, default=0.0)

    def _somebody_stays(self, here: list[Status], now: float) -> bool:
        """Whether a round without its leavers would have members; the last to leave have nobody to tell."""
        known = {status.peer for status in here}
        others = (c.status for peer, c in self.contacts.items() if peer not in known and self.alive(peer, now))
        stay = any(not status.intent.leaving for status in here)
        return stay or any(s.head == self.round.head and s.intent.joining and not s.intent.leaving for s in others)

    def _all_stopped(self, now: float) -> bool:
        current = self.round
        training = [s for s in self._members_here(now) if not s.work.ready]
        if not training:
            return True
        closed_at = current.closed_at if current.closed_at is not None else now
        longest = max((s.work.ready_in_seconds for s in training if s.peer not in self._kept_waiting), default=0.0)
        most = self.pace.last_step_seconds(closed_at - current.started_at)
        return now - closed_at > 2 * self.pace.heartbeat_seconds + min(2 * longest, most)

    def _note_late(self, now: float) -> None:
        """Who was waited for in vain is believed again when it has been READY: else it could delay every round."""
        here = (status for status in self._members_here(now) if status.peer != self.me)
        late = {status.peer for status in here if not status.work.ready and status.work.ready_in_seconds > 0}
        for peer in sorted(late - self._kept_waiting):
            self._note("late", "the round closed and waited for its running step, which did not end", peer)
        self._kept_waiting |= late

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        entries = []
        for status in self._trainers_here(now):
            work = status.work
            if work.ready and work.tokens > 0 and work.steps > 0:
                entry = Contribution(status.peer, work.tokens, work.steps, work.sequences)
                entries.append(capped_tokens(self.rules, self.tip, entry))
        return tuple(sorted((e for e in entries if min(e.tokens, e.steps) > 0), key=lambda entry: entry.peer))

    def _make_plan(self, roster: tuple[Contribution, ...], now: float) -> Plan:
        intents = {peer: contact.status.intent for peer, contact in self.contacts.items()}
        intents[self.me] = self._told_intent()
        peers = [entry.peer for entry in roster]
        private = {peer for peer, intent in intents.items() if intent.link_class != LINK_PUBLIC}
        able = [s.peer for s in self._members_here(now) if s.intent.can_vote]
        helpers = [peer for peer in sorted(able) if peer not in private]
        training = {member.peer for member in trainers(self.tip.members)}
        servers = [peer for peer in helpers if peer not in training]
        known = {peer: intents[peer].uplink_bytes_per_second for peer in (*peers, *helpers) if peer in intents}
        uplinks = {peer: uplink for peer, uplink in known.items() if uplink > 0}
        tiles = self.rules.block_tiles if self.rules.exchange else (0,) * len(self.rules.block_tiles)
        shared = due_tiles(tiles[0], self.tip.round + 1, self.rules.fragments)
        slices = plan_slices(
            peers, self.tip.ownership, uplinks, tiles, self.rules.slice_tiles, self._due_columns(now), private, helpers,
            servers=servers, shared=shared,
        )  # fmt: skip
        return Plan(self.rules.fingerprint, self.round.head, self.round.view, self.me, roster, slices)

    def _due_columns(self, now: float) -> frozenset[int]:
        """Those whose turn it is or was, and those that an owner is about to lose, whose master may be rounds ahead."""
        ownership, every, round = self.tip.ownership, self.rules.expert_rounds, self.tip.round + 1
        due = due_columns(ownership, round, every)
        if every == 1:
            return due
        due |= {column for column, last in enumerate(self.tip.column_rounds) if round - last >= every}
        _, wishes = self._next_members(now)
        then = assign(ownership, wishes, self.rules.target_replicas)
        return due | {column for column, owners in enumerate(ownership) if not set(owners) <= set(then[column])}

    def _acting_reducer(self, index: int, piece: Slice, now: float) -> PeerId | None:
        """Whose turn it is: the first in order that may do it and whose time is not over; None when all had theirs."""
        current, turn_ends, tries = self.round, self.round.plan_at, 0
        voids = current.voids.get(index)
        if voids and sum(_saw_all(void.value, piece) for void in voids.values()) >= SURE:
            return None
        for peer in reducer_order(piece):
            if (voids and peer in voids) or not self._may_reduce(peer, now):
                continue
            if peer == self.me:
                return peer
            turn_ends = max(turn_ends, current.seen.setdefault(peer, current.plan_at)) + self.pace.slice_seconds(tries)
            if now <= turn_ends:
                return peer
            tries += 1
        return None

    def _may_reduce(self, peer: PeerId, now: float) -> bool:
        """Alive, standing on the plan's parent, with room on its disk."""
        if peer == self.me:
            return self.intent.can_vote
        contact = self.contacts.get(peer)
        if contact is None or not self.alive(peer, now):
            return False
        return contact.status.head == self.round.head and contact.status.intent.can_vote

    def _holders(self, piece: Slice, first: PeerId, now: float) -> tuple[PeerId, ...]:
        """Who may have a slice: its reducer, those who say so, then anybody of this round; a silent reducer after them.

        If we cannot be dialled, those who cannot either come last, since no stream between us can be opened.
        """
        index = self.round.index_of.get(piece.key)
        said: list[PeerId] = []
        others: list[PeerId] = []
        for peer, contact in self.contacts.items():
            staged = contact.status.staged
            if peer != first and self.alive(peer, now):
                has = index is not None and index < len(staged) and staged[index]
                (said if has else others).append(peer)
        likely = sorted(said) + sorted(others)
        reducer = [first] if first != self.me else []
        found = reducer + likely if self.alive(first, now) else likely + reducer
        return tuple(sorted(found, key=lambda peer: not self._can_ask(peer)))

    def sure_holders(self, piece: Slice, now: float) -> tuple[PeerId, ...]:
        """Who has a slice of this round for certain: its reducer, and who says so; of those that we can ask."""
        index = self.round.index_of.get(piece.key)
        report = None if index is None else self.round.reports.get(index)
        reducer = piece.reducer if report is None else report.author
        found = [
            peer for peer, c in self.contacts.items() if index is not None and any(c.status.staged[index : index + 1])
        ]
        known = dict.fromkeys((reducer, *sorted(found)))
        return tuple(p for p in known if p != self.me and self.alive(p, now) and self._can_ask(p))

    def _can_ask(self, peer: PeerId) -> bool:
        """Whether one of us two can be dialled."""
        contact = self.contacts.get(peer)
        here = self.intent.link_class == LINK_PUBLIC
        return here or contact is None or contact.status.intent.link_class == LINK_PUBLIC

    def _resolved_slices(self, now: float) -> list[tuple[Slice, bytes]] | None:
        """Staged slices with their hashes once every slice is staged or beyond hope; a block is whole or not at all."""
        current = self.round
        assert current.plan is not None
        if self._missing():
            return None
        lost_blocks: set[int] = set()
        slices = current.plan.value.slices
        for index, piece in enumerate(slices):
            if index not in current.reports:
                if self._acting_reducer(index, piece, now) is not None:
                    return None
                lost_blocks.add(piece.block)
        return [
            (
                replace(slices[index], reducer=report.reducer, contributors=report.contributors),
                b"".join(report.wire_hashes),
            )
            for index, report in sorted((index, signed.value) for index, signed in current.reports.items())
            if slices[index].block not in lost_blocks
        ]

    def _counted(self, slices: tuple[Slice, ...]) -> tuple[Contribution, ...]:
        """The plan's roster without those whose values went into no slice."""
        assert self.round.plan is not None
        if not self.rules.exchange:
            return self.round.plan.value.roster
        used = {peer for piece in slices for peer in piece.contributors}
        return tuple(entry for entry in self.round.plan.value.roster if entry.peer in used)


def _is_whole(slices: Sequence[Slice], hashes: Sequence[bytes]) -> bool:
    return all(len(joined) == len(NO_HASH) * piece.tiles for piece, joined in zip(slices, hashes, strict=True))


def _saw_all(void: Report, piece: Slice) -> bool:
    """Whether the reducer had everybody's values and none was fit."""
    reasons = dict(void.left_out)
    return all(reasons.get(peer, LOST) != LOST for peer in piece.contributors)
