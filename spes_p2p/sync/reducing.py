"""The rules of the first half of a round: close it, plan it, reduce, fetch and build the new state."""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.ids import PeerId
from spes_p2p.sync.actions import (
    Build,
    CloseTraining,
    Fetch,
    Reduce,
)
from spes_p2p.sync.messages import (
    Contribution,
    Plan,
    Slice,
)
from spes_p2p.sync.plan import plan_slices, reducer_order
from spes_p2p.sync.round_state import CoreState, Key
from spes_p2p.sync.rules import (
    capped_tokens,
    merge_alpha_for,
    next_step,
)


class Reducing(CoreState):
    """From training to a new state on the leader's disk."""

    def _rule_close(self, now: float) -> bool:
        """The leader closes the round (design 4: those ready trained most, or the learnt time is over)."""
        current = self.round
        if current.closing >= 0 or current.plan is not None or current.decided or not self._leading(now):
            return False
        if not self._should_close(now):
            return False
        current.closing = current.view
        current.closed_at = now
        self._progress(now)
        return True

    def _rule_stop_training(self, now: float) -> bool:
        """The leader said that the round closes."""
        current = self.round
        if current.close_asked or not self._is_closing():
            return False
        current.close_asked = True
        current.closed_at = current.closed_at or now
        if not current.work.ready:
            self._out.append(CloseTraining())
        return True

    def _rule_plan(self, now: float) -> bool:
        """Everyone who was training has stopped, or had time to: name the roster."""
        current = self.round
        if current.closing < 0 or current.plan is not None or current.decided or not self._leading(now):
            return False
        if not self._all_stopped(now):
            return False
        roster = self._roster(now)
        if not roster and not self._membership_changes(now):
            return False
        self._take_plan(self._sealer.seal(self._make_plan(roster)), now)
        return True

    def _rule_reduce(self, now: float) -> bool:
        """The first living peer in a slice's order reduces it."""
        current = self.round
        if current.plan is None or current.decided:
            return False
        plan = current.plan
        started = False
        for index, piece in enumerate(plan.value.slices):
            if index in current.reports or index in current.reducing or self.me not in piece.contributors:
                continue
            if self._acting_reducer(piece, now) == self.me:
                current.reducing.add(index)
                self._out.append(Reduce(plan, index))
                started = True
        return started

    def _rule_fetch(self, now: float) -> bool:
        """Get every slice that is wanted and not here."""
        current, started = self.round, False
        for piece, hashes, first in self._wanted():
            key = piece.key
            if current.staged.get(key) == hashes or current.fetching.get(key) == hashes or key in current.failed:
                continue
            current.fetching[key] = hashes
            self._out.append(Fetch(piece, hashes, self._holders(piece, first, now)))
            started = True
        return started

    def _rule_refetch(self, now: float) -> bool:
        """What could not be fetched is tried again with the next heartbeat."""
        current = self.round
        if not current.failed or now < self._next_heartbeat or current.decided:
            return False
        current.failed.clear()
        return True

    def _rule_build(self, now: float) -> bool:
        """All slices that can come about are staged: the leader computes the new state."""
        current = self.round
        if current.plan is None or current.decided or current.building or not self._leading(now):
            return False
        if self._bound()[0]:
            return False
        chosen = self._resolved_slices(now)
        if chosen is None:
            return False
        roster = self._counted(tuple(piece for piece, _ in chosen))
        alpha = merge_alpha_for(self.rules, current.tip.step, next_step(current.tip.step, roster))
        current.building = Build(roster, tuple(p for p, _ in chosen), tuple(h for _, h in chosen), alpha)
        self._out.append(current.building)
        return True

    def _should_close(self, now: float) -> bool:
        here = self._members_here(now)
        ready = [status for status in here if status.work.ready]
        trained = sum(status.work.tokens for status in ready)
        if any(status.intent.leaving and status.work.ready for status in here):
            return True
        if trained == 0:
            return False
        counted = {entry.peer: entry.tokens for entry in self.tip.roster}
        expected = sum(max(s.work.tokens, counted.get(s.peer, s.work.expected_tokens)) for s in here)
        if len(ready) == len(here) or trained >= self.pace.CLOSE_SHARE * expected:
            return True
        seconds = [status.work.seconds for status in ready if status.work.tokens]
        return now - self.round.started_at > self.pace.close_after_seconds(seconds)

    def _all_stopped(self, now: float) -> bool:
        current = self.round
        training = [s for s in self._members_here(now) if not s.work.ready]
        if not training:
            return True
        waited = now - (current.closed_at if current.closed_at is not None else now)
        longest = max(status.work.ready_in_seconds for status in training)
        return waited > 2 * self.pace.heartbeat_seconds + 2 * longest

    def _roster(self, now: float) -> tuple[Contribution, ...]:
        entries = []
        for status in self._members_here(now):
            work = status.work
            if work.ready and work.tokens > 0 and work.steps > 0:
                entry = Contribution(status.peer, work.tokens, work.steps, work.sequences)
                entries.append(capped_tokens(self.rules, self.tip, entry))
        return tuple(sorted((e for e in entries if e.tokens > 0), key=lambda entry: entry.peer))

    def _make_plan(self, roster: tuple[Contribution, ...]) -> Plan:
        uplinks = {s.peer: s.intent.uplink_bytes_per_second for s in (c.status for c in self.contacts.values())}
        uplinks[self.me] = self.intent.uplink_bytes_per_second
        peers = [entry.peer for entry in roster]
        slices = plan_slices(peers, self.tip.ownership, uplinks, self.rules.block_tiles, self.rules.slice_tiles)
        return Plan(self.rules.fingerprint, self.round.head, self.round.view, self.me, roster, slices)

    def _membership_changes(self, now: float) -> bool:
        return any(status.intent.leaving for status in self._members_here(now))

    def _acting_reducer(self, piece: Slice, now: float) -> PeerId | None:
        """The first in order that still has its inputs: alive, and standing on the plan's parent."""
        for peer in reducer_order(piece):
            if peer == self.me:
                return peer
            contact = self.contacts.get(peer)
            if self.alive(peer, now) and contact is not None and contact.status.head == self.round.head:
                return peer
        return None

    def _wanted(self) -> list[tuple[Slice, bytes, PeerId]]:
        """Slices to be staged here, with their hashes and who has them surely."""
        current = self.round
        proposal = self._target()
        if proposal is not None:
            pairs = zip(proposal.value.manifest.slices, proposal.value.wire_hashes, strict=True)
            return [(piece, hashes, piece.reducer) for piece, hashes in pairs]
        if current.plan is None:
            return []
        slices = current.plan.value.slices
        return [
            (slices[index], b"".join(report.value.wire_hashes), report.value.reducer)
            for index, report in current.reports.items()
            if report.value.contributors
        ]

    def _holders(self, piece: Slice, first: PeerId, now: float) -> tuple[PeerId, ...]:
        """Who may have a slice: its reducer, those who say so, then anybody of this round."""
        index = self._index_of(piece.key)
        said: list[PeerId] = []
        others: list[PeerId] = []
        for peer, contact in self.contacts.items():
            staged = contact.status.staged
            if peer != first and self.alive(peer, now):
                has = index is not None and index < len(staged) and staged[index]
                (said if has else others).append(peer)
        start = [first] if first != self.me else []
        return tuple(start + sorted(said) + sorted(others))

    def _index_of(self, key: Key) -> int | None:
        if self.round.plan is None:
            return None
        return next((i for i, piece in enumerate(self.round.plan.value.slices) if piece.key == key), None)

    def _resolved_slices(self, now: float) -> list[tuple[Slice, bytes]] | None:
        """Staged slices with their hashes once every slice is staged or beyond hope; a block is whole or not at all."""
        current = self.round
        assert current.plan is not None
        found: list[tuple[Slice, bytes]] = []
        lost_blocks: set[int] = set()
        for index, piece in enumerate(current.plan.value.slices):
            report = current.reports.get(index)
            if report is not None and not report.value.contributors:
                lost_blocks.add(piece.block)  # nobody's values were fit
            elif report is not None:
                hashes = b"".join(report.value.wire_hashes)
                if current.staged.get(piece.key) != hashes:
                    return None
                found.append(
                    (replace(piece, reducer=report.value.reducer, contributors=report.value.contributors), hashes)
                )
            elif self._acting_reducer(piece, now) is None:
                lost_blocks.add(piece.block)
            else:
                return None
        return [(piece, hashes) for piece, hashes in found if piece.block not in lost_blocks]

    def _counted(self, slices: tuple[Slice, ...]) -> tuple[Contribution, ...]:
        """The plan's roster without those whose values went into no slice."""
        assert self.round.plan is not None
        used = {peer for piece in slices for peer in piece.contributors}
        return tuple(entry for entry in self.round.plan.value.roster if entry.peer in used)
