"""What a peer tells its trainer and its log of a round: when its phases began, and what the commit counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from spes_p2p.consensus.columns import stale_columns
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import LOST, Commit
from spes_p2p.consensus.place import tokens_lost
from spes_p2p.ids import PeerId
from spes_p2p.swarm.vitals import PHASES
from spes_p2p.sync.catch_up import ForkPoint
from spes_p2p.sync.surroundings import Applied, PeerContext

_END = ""


class RoundLog:
    """The running round, as one peer sees it."""

    def __init__(self, context: PeerContext) -> None:
        self._core = context.core
        self._layout = context.layout
        self._inputs = context.disk.inputs
        self._transport, self._clock = context.node.transport, context.node.clock
        self.begin()

    def begin(self) -> None:
        """Another round begins."""
        self._began = {"train": self._clock.now()}
        """When phases of the round began (see PHASES)."""
        self._sent_before, self._received_before = self._transport.traffic.sent, self._urgent_bytes_received()

    def closed(self) -> None:
        self._began["close"] = self._clock.now()

    def look(self) -> None:
        """Called with each heartbeat."""
        if self._core.state.round.plan is not None:
            self._began.setdefault("reduce", self._clock.now())

    def proposed(self) -> None:
        self._began.setdefault("vote", self._clock.now())

    def decided(self) -> None:
        self._began["apply"] = self._clock.now()

    def _seconds(self) -> dict[str, float]:
        """Duration of each phase that was seen."""
        began = self._began | {_END: self._clock.now()}
        phases = [(name, after) for name, after in pairwise((*PHASES, _END)) if name in began and after in began]
        return {name: round(began[after] - began[name], 4) for name, after in phases if began[after] >= began[name]}

    def received(self) -> tuple[float, int]:
        """(seconds of our clock, bytes that came until then)"""
        return self._clock.now(), self._transport.traffic.received

    def _urgent_bytes_received(self) -> int:
        """Without the run's data, which comes beside the rounds."""
        return self._transport.traffic.received - self._transport.traffic.patient_received

    def uplink(self) -> int:
        """Bytes a second, as measured."""
        return int(self._transport.traffic.meter.rate())

    def applied(self, commit: Commit, first: Manifest | None, fork: ForkPoint | None) -> Applied:
        """What became of the round: `first` is the child of the tip that we had, `fork` what we left for `commit`."""
        roster = first.roster if first is not None else ()
        event = Applied(
            commit,
            self._core.tip,
            next((entry for entry in roster if entry.peer == self._core.me), None),
            first is not None and self._inputs.snapshot.parent == first.parent,
            self._uncounted(first) if first is not None else frozenset(),
            first is not None and commit.manifest.round > first.round,
            self._seconds(),
            self._transport.traffic.sent - self._sent_before,
            self._urgent_bytes_received() - self._received_before,
            self._core.state.pace.deadline_seconds(0),
            self._leavers(),
            stale_columns=stale_columns(self._core.state.rules.expert_rounds, commit.manifest),
            refused=self._refused(),
        )
        if fork is None:
            return event
        rosters = [entry for left in fork.ours for entry in left.manifest.roster]
        own = sum(entry.tokens for entry in rosters if entry.peer == self._core.me)
        lost = tokens_lost(fork.common, fork.ours)
        return replace(event, caught_up=True, lost_tokens=lost, own_tokens=own, switched=True)

    def _refused(self) -> tuple[PeerId, ...]:
        """Whose values were unfit, unless another reducer of the same slice took them."""
        round = self._core.state.round
        words = ((signed.value.left_out, round.reports.get(index)) for index, signed in round.all_reports())
        named = {
            peer
            for left_out, report in words
            for peer, reason in left_out
            if reason != LOST and (report is None or peer not in report.value.contributors)
        }
        return tuple(sorted(named))

    def _leavers(self) -> frozenset[PeerId]:
        state = self._core.state
        others = {peer for peer, contact in state.others.contacts.items() if contact.status.intent.leaving}
        return frozenset(others | {self._core.me} if state.own.intent.leaving else others)

    def _uncounted(self, first: Manifest) -> frozenset[int]:
        """Tiles for which our trained values did not go into the round, although they were sound."""
        snapshot, me = self._inputs.snapshot, self._core.me
        if snapshot.parent != first.parent:
            return frozenset()
        done = set(first.tile_ids_of(me))
        plan = self._core.state.round.plan
        for index, report in self._core.state.round.all_reports() if plan else ():
            if plan is not None and dict(report.value.left_out).get(me, LOST) != LOST:
                done.update(plan.value.slices[index].tile_ids)
        return self._layout.tile_ids_in(snapshot.blocks) - done
