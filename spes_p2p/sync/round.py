"""The round's state machine of one peer: decides everything, touches nothing.

`Core` takes events (a message came, time passed, a slice is on disk) and returns actions (`actions.py`). It never
holds a tensor or a socket, and reads no clock: `now` is passed in. What it decides is written as a table of rules,
tried in order after each event until none fires, so that a test can see which were exercised. The rules stand in
`reducing.py` and `voting.py`, what it knows in `round_state.py`, what it takes in and says in `hearing.py` and
`speaking.py`.

State is sent, not events: every peer repeats its signed status and whatever the receiver lacks, so loss, doubling and
reordering need no handling of their own. See docs/protocol.md for the round in prose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.sync.actions import (
    Action,
    Adopt,
    Build,
    CatchUp,
)
from spes_p2p.sync.hearing import Hearing
from spes_p2p.sync.messages import (
    Acceptance,
    Commit,
    Envelope,
    Intent,
    Manifest,
    Merge,
    Report,
    Sealer,
    Work,
    plan_hash,
)
from spes_p2p.sync.reducing import Reducing
from spes_p2p.sync.round_state import Contact, Key
from spes_p2p.sync.rules import (
    CheckSignature,
    Outcome,
    RunRules,
)
from spes_p2p.sync.speaking import Speaking
from spes_p2p.sync.timing import Pace
from spes_p2p.sync.votes import VoteRecord
from spes_p2p.sync.voting import Voting

RULE_NAMES = (
    "adopt",
    "follow",
    "degraded_certify",
    "certify",
    "promise",
    "next_ballot",
    "accept",
    "degraded_vote",
    "verify",
    "propose",
    "build",
    "reduce",
    "fetch",
    "refetch",
    "plan",
    "stop_training",
    "close",
    "probe",
)
"""The order in which rules are tried after each event."""


class Core(Hearing, Reducing, Voting, Speaking):
    """The protocol as one peer runs it, over all rounds. Every public method is an event and returns the actions."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        rules: RunRules,
        sealer: Sealer,
        check_signature: CheckSignature,
        pace: Pace,
        tip: Manifest,
        now: float,
        record: VoteRecord | None = None,
        intent: Intent | None = None,
        tip_commit: Commit | None = None,
        first_sequence: int = 0,
    ) -> None:
        """`record` is what a restarted elector finds on disk; `first_sequence` must be above all that it ever sent."""
        super().__init__(me, incarnation, rules, sealer, check_signature, pace, tip, now, intent, tip_commit)
        self._sequence = first_sequence
        self._rules: tuple[tuple[str, Callable[[float], bool]], ...] = tuple(
            (name, getattr(self, f"_rule_{name}")) for name in RULE_NAMES
        )
        if record is not None and record.parent == self.head:
            self._resume(record)

    def receive(self, envelope: Envelope, now: float) -> list[Action]:
        """A message came. Its signatures were checked; nothing else was."""
        for signed in envelope.statuses:
            self._hear(signed, now)
        if envelope.plan is not None:
            self._hear_plan(envelope.plan, now)
        for report in envelope.reports:
            self._hear_report(report, now)
        for proposal in envelope.proposals:
            self._hear_proposal(proposal, now)
        for vote in envelope.votes:
            self._hear_vote(vote, now)
        for degraded in envelope.degraded_votes:
            self._hear_degraded_vote(degraded)
        if envelope.commit is not None:
            self._hear_commit(envelope.commit, envelope.sender, now)
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed. A late tick (the machine slept) makes the silence of others ours."""
        asleep = now - self._last_tick
        if asleep > 5 * self.pace.heartbeat_seconds:
            self._forgive(asleep)
        self._last_tick = now
        return self._advance(now)

    def trained(self, work: Work, now: float) -> list[Action]:
        """The trainer's progress in this round; `ready` when it stopped."""
        current = self.round
        if work.ready and current.ready_at is None:
            current.ready_at = now
            current.progress_at = now
        current.work = work
        return self._advance(now)

    def reduced(self, report: Report, now: float) -> list[Action]:
        """A slice was reduced here and its tiles are staged."""
        current = self.round
        if current.plan is not None and report.plan == plan_hash(current.plan.value):
            current.reducing.discard(report.index)
            signed = self._sealer.seal(report)
            current.reports[report.index] = signed
            if report.contributors:
                current.staged[current.plan.value.slices[report.index].key] = b"".join(report.wire_hashes)
            self._progress(now)
        return self._advance(now)

    def reduce_failed(self, index: int, now: float) -> list[Action]:
        """No contributor's values could be had; tried again while we are the one to do it."""
        self.round.reducing.discard(index)
        return self._advance(now)

    def staged(self, key: Key, hashes: bytes, now: float) -> list[Action]:
        """The tiles of a slice are on disk."""
        self.round.fetching.pop(key, None)
        self.round.staged[key] = hashes
        self._progress(now)
        return self._advance(now)

    def fetch_failed(self, key: Key, now: float) -> list[Action]:
        """No holder could give the tiles: a report of a lost reducer is void, its slice is done again."""
        current = self.round
        current.fetching.pop(key, None)
        current.failed.add(key)
        for index, report in list(current.reports.items()):
            assert current.plan is not None
            if current.plan.value.slices[index].key == key and not self.alive(report.value.reducer, now):
                del current.reports[index]
        return self._advance(now)

    def built(self, build: Build, wire_root: Hash, state_root: Hash, merge: Merge | None, now: float) -> list[Action]:
        """The new state was computed here from `build`'s slices."""
        if self.round.building == build:
            self.round.outcome = (build, Outcome(build.roster, build.slices, wire_root, state_root, merge))
            self._progress(now)
        return self._advance(now)

    def verified(self, manifest: Hash, now: float) -> list[Action]:
        """The state that `manifest` names is on disk here, with equal roots."""
        self.round.verified.add(manifest)
        self.round.verifying = NO_HASH
        self._progress(now)
        return self._advance(now)

    def verify_failed(self, now: float) -> list[Action]:
        """The state could not be brought to the proposed root yet; it is tried again."""
        self.round.verifying = NO_HASH
        return self._advance(now)

    def gone(self, peer: PeerId, now: float) -> list[Action]:
        """The host of `peer` refused a fresh dial: its process is gone."""
        if peer in self.contacts:
            self.contacts[peer].gone = True
        return self._advance(now)

    def moved(self, now: float) -> list[Action]:
        """Bytes of this round moved; the leader is not to be blamed."""
        self._progress(now)
        return []

    def applied(self, commit: Commit, now: float) -> list[Action]:
        """`commit` is the committed state here, whether voted or caught up with."""
        if commit.manifest.round > self.tip.round:
            if commit.manifest.parent == self.head and self.round.closed_at is not None:
                self.pace.observe_round(self.round.closed_at - self.round.started_at)
            self._commit = commit
            self._enter(commit.manifest, now)
        return self._advance(now)

    def catch_up_failed(self, now: float) -> list[Action]:
        """The holder could not serve what it said it has; another is asked."""
        self.round.adopting = False
        return self._advance(now)

    def disk_full(self, durable: VoteRecord, now: float) -> list[Action]:
        """No room: back to the voting record that is on disk, nothing is staged any more, and we cannot vote."""
        self.record = durable
        self.intent = replace(self.intent, can_vote=False)
        self._forget_staged()
        return self._advance(now)

    def disk_has_room(self, now: float) -> list[Action]:
        """There may be room again: stage anew and vote."""
        self.intent = replace(self.intent, can_vote=True)
        self._forget_staged()
        return self._advance(now)

    def wish(self, intent: Intent, now: float) -> list[Action]:
        """What this peer wants has changed (join, leave, claims)."""
        self.intent = replace(intent, can_vote=self.intent.can_vote)
        return self._advance(now)

    def reply_to(self, peer: PeerId, now: float) -> Envelope:
        """What to answer a peer that has just sent us something."""
        return self._envelope(peer, resend=False)

    def _advance(self, now: float) -> list[Action]:
        self.degraded_set = self._degraded_electors(now)
        for _ in range(256):
            for name, rule in self._rules:
                if rule(now):
                    self.fired[name] += 1
                    break
            else:
                break
        self._flush(now)
        actions, self._out = self._out, []
        return actions

    def _rule_adopt(self, now: float) -> bool:
        """A certified child whose state is here becomes the committed state."""
        current = self.round
        commit = current.decided
        if commit is None or current.adopting or commit.certificate.manifest not in current.verified:
            return False
        current.adopting = True
        self._out.append(Adopt(commit))
        return True

    def _rule_follow(self, now: float) -> bool:
        """Somebody stands on a later manifest, or our child is certified and cannot be staged: fetch it by hash."""
        current = self.round
        if current.adopting:
            return False
        if current.decided is not None and self._can_stage(current.decided):
            return False
        ahead = [
            contact
            for peer, contact in self.contacts.items()
            if contact.status.round > current.tip.round
            and self.alive(peer, now)
            and now - self._asked.get(peer, -1e9) > self.pace.deadline_seconds(0)
        ]
        if not ahead or (current.decided is None and not self._is_left_behind(ahead)):
            return False
        best = max(ahead, key=lambda contact: (contact.status.round, contact.status.peer))
        self._asked[best.status.peer] = now
        current.adopting = True
        self._out.append(CatchUp(best.status.peer, best.status.round, best.status.head))
        return True

    def _is_left_behind(self, ahead: list[Contact]) -> bool:
        """The certificate of our child normally comes with the next message; only further heads need the chain."""
        return any(c.status.round > self.tip.round + 1 for c in ahead) or not self.is_member()

    def _can_stage(self, commit: Commit) -> bool:
        proposal = self._proposal_of(commit.certificate.manifest)
        return proposal is not None and not any(piece.key in self.round.failed for piece in commit.manifest.slices)

    def _forgive(self, asleep: float) -> None:
        for contact in self.contacts.values():
            contact.at += asleep
            contact.voting_at += asleep
        self._elector_since += asleep
        self.round.progress_at += asleep

    def _forget_staged(self) -> None:
        current = self.round
        current.staged.clear()
        current.fetching.clear()
        current.reducing.clear()
        current.verified.clear()
        current.verifying = NO_HASH
        current.building = None
        current.outcome = None
        for index in [index for index, report in current.reports.items() if report.author == self.me]:
            del current.reports[index]

    def _resume(self, record: VoteRecord) -> None:
        """Back from a restart with our record: we hold to every vote in it."""
        self.record = record
        self.round.view = record.promised
        for signed in (record.accepted, record.degraded):
            if signed is not None:
                self.round.proposals[(signed.value.heard, signed.value.ballot)] = signed
        if record.accepted is not None:
            name = record.accepted_hash
            self.round.own_vote = self._sealer.seal(
                Acceptance(self.rules.fingerprint, self.round.head, record.accepted_ballot, name)
            )
            self.round.votes[(record.accepted_ballot, name)] = {self.me: self.round.own_vote}
