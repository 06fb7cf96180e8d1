"""The round's state machine of one peer: decides everything, touches nothing.

`Consensus` takes events (a message came, time passed, a slice is on disk) and returns actions (`actions.py`). It never
holds a tensor or a socket, and reads no clock: `now` is passed in. What it decides is written as a table of rules
(`table.py`), tried in order after each event until none fires, so that a test can see which were exercised. The rules
stand in `reducing.py` and `voting.py`, what it knows in `knowledge.py` and `round_state.py`, what it takes in and says
in `hearing.py` and `speaking.py`.

State is sent, not events: every peer repeats its signed status and whatever the receiver lacks, so loss, doubling and
reordering need no handling of their own. See docs/protocol.md for the round in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from spes_p2p.consensus.actions import (
    Action,
    Adopt,
    Build,
    CatchUp,
)
from spes_p2p.consensus.bounds import told
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.forks import Way, has_quorum
from spes_p2p.consensus.gossip import Speaking
from spes_p2p.consensus.inbound import Hearing
from spes_p2p.consensus.messages import (
    DEGRADED,
    Acceptance,
    Commit,
    Contribution,
    Envelope,
    Intent,
    Manifest,
    Merge,
    Report,
    Sealer,
    Signed,
    Work,
    manifest_hash,
    plan_hash,
)
from spes_p2p.consensus.reducing import Reducing
from spes_p2p.consensus.rules import Outcome, RunRules, counts
from spes_p2p.consensus.state import EMPTY_WORDS, MAX_SEEDS, MOST_REMEMBERED, Contact, Heard, Key
from spes_p2p.consensus.table import (
    ALONE,
    LEADING,
    OPEN,
    PLANNED,
    RULE_NAMES,
    RULES,
    TICK,
    TOGETHER,
    UNPLANNED,
    VOTER,
    WRITABLE,
)
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.steps import reached

__all__ = ["RULE_NAMES", "Consensus"]


class Consensus(Hearing, Reducing, Voting, Speaking):
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
        on_chain: Callable[[Hash, int], bool] = lambda head, round: True,
    ) -> None:
        """`record` is what a restarted elector finds on disk; `first_sequence` differs in each life, and rises.

        `on_chain(head, round)`: whether `head` names the manifest of that round, not after our tip, in our history.
        """
        super().__init__(me, incarnation, rules, sealer, check_signature, pace, tip, now, intent, tip_commit, on_chain)
        self._sequence = self.life = first_sequence
        self._rules: tuple[tuple[str, int, Callable[[float], bool]], ...] = tuple(
            (rule.name, rule.needs, getattr(self, f"_rule_{rule.name}")) for rule in RULES
        )
        self._rules_by_situation: dict[int, tuple[tuple[str, Callable[[float], bool]], ...]] = {}
        if record is not None and record.parent == self.head:
            self._resume(record, now)
        self.liveness.ask(now)

    def receive(self, envelope: Envelope, now: float) -> list[Action]:
        """A message came. Its signatures were checked; nothing else was.

        What says nothing new (most heartbeats) is noted and costs no more; time alone is looked at by `tick`.
        """
        self._notice_sleep(now)
        new = False
        for signed in envelope.statuses:
            new |= self._hear(signed, envelope.sender, now)
        if envelope.answers == self.life and self.liveness.asking_since is not None:
            self.liveness.answered.add(envelope.sender)
        if envelope.plan is not None:
            new |= self._hear_plan(envelope.plan, now)
        for report in envelope.reports:
            new |= self._hear_report(report, now)
        for proposal in envelope.proposals:
            new |= self._hear_proposal(proposal, now)
        for vote in envelope.votes:
            new |= self._hear_vote(vote, now)
        for degraded in envelope.degraded_votes:
            new |= self._hear_degraded_vote(degraded)
        if envelope.commit is not None:
            new |= self._hear_commit(envelope.commit, envelope.sender, now)
        if self._listen(now) or new:
            return self._advance(now)
        if self._poked:
            self._flush(now)
        actions, self._out = self._out, []
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time passed; to be called at least once a heartbeat."""
        return self._advance(now, TICK)

    def trained(self, work: Work, now: float) -> list[Action]:
        """The trainer's progress in this round; `ready` when it stopped."""
        current = self.round
        if work.ready and current.ready_at is None:
            current.ready_at = now
            current.progress_at = now
        current.work = told(work)
        return self._advance(now)

    def is_counted(self, parent: Hash, entry: Contribution) -> bool:
        """Whether a plan for the child of `parent` that has `entry` for us counts the work that is here."""
        here = parent == self.round.head and entry.peer == self.me
        return here and counts(self.rules, self.tip, entry, self.round.work)

    def wants_reduced(self, plan: Hash, index: int) -> bool:
        """Whether a slice that we were asked to reduce may still be written: later it could spoil a finished state."""
        current = self.round
        return current.plan is not None and plan_hash(current.plan.value) == plan and index in current.reducing

    def wants_staged(self, key: Key, hashes: bytes) -> bool:
        """Whether tiles that we were asked to fetch may still be written."""
        return self.round.fetching.get(key) == hashes

    def reduced(self, report: Report, now: float) -> list[Action]:
        """A slice was reduced here and its tiles are staged; without contributors: nobody's values were fit."""
        current = self.round
        if current.plan is not None and report.plan == plan_hash(current.plan.value):
            current.reducing.discard(report.index)
            signed = self._sealer.seal(report)
            if report.contributors:
                current.reports[report.index] = signed
                self._stage(current.plan.value.slices[report.index].key, b"".join(report.wire_hashes))
            else:
                current.voids.setdefault(report.index, {})[self.me] = signed
            current.missing = None
            self._news = True
            self._progress(now)
        return self._advance(now)

    def reduce_failed(self, index: int, now: float) -> list[Action]:
        """No contributor's values could be had here: the next in order is to try."""
        current = self.round
        if current.plan is None or index not in current.reducing:
            return self._advance(now)
        return self.reduced(Report(plan_hash(current.plan.value), index, self.me, (), ()), now)

    def staged(self, key: Key, hashes: bytes, now: float) -> list[Action]:
        """The tiles of a slice are on disk."""
        self.round.fetching.pop(key, None)
        wanted = self._missing().get(key)
        if wanted is not None and wanted.hashes == hashes:
            self._hollow.discard(wanted.first)
        self.liveness.failing_since = None
        self._stage(key, hashes)
        self._progress(now)
        return self._advance(now)

    def fetch_failed(self, key: Key, now: float) -> list[Action]:
        """No holder could give the tiles: what was reported of them is forgotten, until somebody says it again.

        Only who has the tiles repeats a report, so one of a lost reducer is gone for good and its slice is done again.
        So it is with one that repeats what it never hands out. A report of other tiles than those that a proposal wants
        stays: heard again, it would pass for progress.
        """
        current = self.round
        tried = current.fetching.pop(key, None)
        self.liveness.failed(now)
        current.failed.add(key)
        index = self.round.index_of.get(key)
        report = None if index is None else current.reports.get(index)
        if index is not None and report is not None and tried == b"".join(report.value.wire_hashes):
            del current.reports[index]
            current.missing = None
            self._note_empty_word(index, report)
        return self._advance(now)

    def _note_empty_word(self, index: int, report: Signed[Report]) -> None:
        """After a few of them the reducer's turn is over, and we remember it."""
        current, reducer = self.round, report.author
        if not self._can_ask(reducer):  # it comes from others, as soon as they have it
            return
        current.empty_words[index, reducer] += 1
        tries = 1 if reducer in self._hollow else EMPTY_WORDS
        if current.empty_words[index, reducer] >= tries and not self._somebody_has(index, reducer):
            current.voids.setdefault(index, {})[reducer] = report
            if reducer not in self._hollow:
                self._note("left out", "it says that it reduced a slice, and nobody can get it", reducer)
            self._hollow.add(reducer)

    def _somebody_has(self, index: int, reducer: PeerId) -> bool:
        """Whether another than its reducer says that it has staged a slice of the plan."""
        statuses = (contact.status for peer, contact in self.contacts.items() if peer != reducer)
        return any(s.head == self.round.head and index < len(s.staged) and s.staged[index] for s in statuses)

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
        self.liveness.failing_since = None
        self.round.missing = None
        self._progress(now)
        return self._advance(now)

    def verify_failed(self, now: float) -> list[Action]:
        """The state could not be brought to the proposed root: tried again later, the second time from fresh tiles."""
        current = self.round
        name, current.verifying = current.verifying, NO_HASH
        self.liveness.failed(now)
        current.verify_after = now + self.pace.heartbeat_seconds
        current.unfit[name] = current.unfit.get(name, 0) + 1
        signed = self._proposal_of(name)
        self._note_vain_try(signed)
        if current.unfit[name] > 1 and signed is not None:
            for piece in signed.value.manifest.slices:
                current.staged.pop(piece.key, None)
            current.missing = None
        return self._advance(now)

    def undone(self, whole: Callable[[Hash], bool]) -> None:
        """States that are not `whole` on disk any more (by their root) are made again before anybody votes for them."""
        for name in list(self.round.verified):
            signed = self._proposal_of(name)
            if signed is None or not whole(signed.value.manifest.state_root):
                self.round.verified.discard(name)
                self.round.missing = None

    def unstaged(self, keys: Iterable[Key], now: float) -> list[Action]:
        """These slices are not on disk any more and nobody gave them: they are fetched, or done, again."""
        current = self.round
        for key in keys:
            current.staged.pop(key, None)
        current.building = current.outcome = current.missing = None
        return self._advance(now)

    def gone(self, peer: PeerId, now: float) -> list[Action]:
        """The host of `peer` refused a fresh dial: its process is gone."""
        if peer != self.me:
            self._gone.add(peer)
        return self._advance(now, TICK)

    def moved(self, now: float) -> list[Action]:
        """Bytes of this round moved here: nobody is to be blamed. Others learn it with our next status."""
        self.round.moved += 1
        self._progress(now)
        return []

    def applied(self, commit: Commit, now: float) -> list[Action]:
        """`commit` is the committed state here, whether voted or caught up with."""
        if commit.manifest.round > self.tip.round:
            if commit.manifest.parent == self.head and self.round.closed_at is not None:
                trained = self.round.closed_at - self.round.started_at
                self.pace.observe_round(max(trained, self.round.work.seconds))  # some of it may have been made ahead
            self._commit = commit
            self._enter(commit.manifest, now)
        return self._advance(now)

    def switched(self, commit: Commit, incarnation: int, now: float) -> list[Action]:
        """Another history won: `commit` is the committed state here, in place of our rounds since they parted.

        `incarnation` is a new one where our earlier votes for the child of `commit` can not be stood by any more.
        """
        self.incarnation = incarnation
        self._commit = commit
        self._strays.clear()
        self._looked_at.clear()
        self._enter(commit.manifest, now)
        return self._advance(now)

    def reborn(self, incarnation: int, now: float) -> list[Action]:
        """What we voted for is forgotten on disk too: this incarnation is a newcomer (see `Forget`)."""
        self.incarnation = incarnation
        return self._advance(now)

    def stays(self, head: Hash, way: Way, now: float) -> list[Action]:
        """We do not go over to the history that ends in `head`; it is looked at again after a while (WAIT) or never."""
        if len(self._looked_at) >= MOST_REMEMBERED:
            del self._looked_at[next(iter(self._looked_at))]
        self._looked_at[head] = now + self.pace.deadline_seconds(0) if way is Way.WAIT else float("inf")
        self._asked_last = None
        self.round.following = False
        return self._advance(now)

    def catch_up_failed(self, now: float) -> list[Action]:
        """The holder could not serve what it said it has; another is asked."""
        if self._asked_last is not None:
            self._asked_in_vain[self._asked_last] += 1
            if any(member.peer == self._asked_last for member in self.tip.members):
                self.liveness.failed(now)
            self._asked_last = None
        self.round.following = False
        return self._advance(now)

    def not_adopted(self, now: float) -> list[Action]:
        """The state of the certified child is not whole on disk any more (see `undone`): it is made again."""
        self.round.adopting = False
        return self._advance(now)

    def disk_full(self, durable: VoteRecord, now: float) -> list[Action]:
        """No room: back to the voting record that is on disk, nothing is staged any more, and we cannot vote.

        Whatever was asked for and not done is asked for again when there is room.
        """
        self.intent = replace(self.intent, can_vote=False)
        self._forget_votes()
        self._forget_staged()
        self.record = VoteRecord(self.head)
        if durable.parent == self.head:
            self._resume(durable, now)
        return self._advance(now)

    def disk_has_room(self, now: float) -> list[Action]:
        """There may be room again: stage anew and vote."""
        self.intent = replace(self.intent, can_vote=True)
        self._forget_staged()
        return self._advance(now)

    def choose(self, children: Iterable[Hash], now: float) -> list[Action]:
        """The organiser has signed that the run goes on with these, whatever else is known."""
        self.chosen = frozenset(children)
        self._looked_at.clear()
        return self._advance(now)

    def greet(self, known: Iterable[PeerId]) -> None:
        """Peers of the run that were found somewhere: those who are no members hear our next statuses."""
        named = {member.peer for member in self.tip.members} | {self.me}
        strangers = sorted(peer for peer in known if peer not in named)
        self.seeds = tuple(sorted(strangers, key=lambda peer: peer in self.seeds)[:MAX_SEEDS])

    def uplink_measured(self, bytes_per_second: int) -> None:
        """Of the round that is over; told with READY at the latest, so that the next plan is made from it."""
        self.uplink_bytes_per_second = bytes_per_second

    def wish(self, intent: Intent, now: float) -> list[Action]:
        """What this peer wants has changed (join, leave, claims)."""
        self.intent = replace(intent, can_vote=self.intent.can_vote)
        return self._advance(now)

    def reply_to(self, peer: PeerId, now: float) -> Envelope:
        """What to answer a peer that has just sent us something; only after all earlier actions were carried out."""
        return self._envelope(peer, None)

    def _advance(self, now: float, tick: int = 0) -> list[Action]:
        """Tries the rules until none fires, then says what others should know. Time alone is looked at in a tick."""
        self._listen(now)
        if tick or self.degraded_set:
            self._set_degraded(self._degraded_electors(now))
        fired = True
        while fired:
            situation, fired = self._situation() | tick, False
            for name, rule in self._rules_in(situation):
                if rule(now):
                    self.fired[name] += 1
                    fired = True
                    reached(name, peer=self.me, round=self.tip.round + 1)
                    break
        self._flush(now)
        actions, self._out = self._out, []
        return actions

    def _rules_in(self, situation: int) -> tuple[tuple[str, Callable[[float], bool]], ...]:
        """The rules to be tried in a situation, in their order."""
        fitting = self._rules_by_situation.get(situation)
        if fitting is None:
            fitting = tuple((name, rule) for name, needs, rule in self._rules if needs & situation == needs)
            self._rules_by_situation[situation] = fitting
        return fitting

    def _situation(self) -> int:
        current = self.round
        situation = UNPLANNED if current.plan is None else PLANNED
        situation |= ALONE if self.degraded_set else TOGETHER
        if current.decided is None:
            situation |= OPEN
        if self.intent.can_vote:
            situation |= WRITABLE
            if self._can_vote():
                situation |= VOTER
                if self._leading():
                    situation |= LEADING
        return situation

    def _set_degraded(self, heard: Heard) -> None:
        if heard != self.degraded_set:
            self.degraded_set = heard
            self.round.missing = None
        if heard and (lost := self.round.decided) is not None:
            self.round.decided = None
            self.round.failed.clear()
            self._note(
                "lost",
                f"round {lost.manifest.round} was committed, and nobody who is heard has its state: those who are left "
                "go on without it, until a former peer brings it back",
            )

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
        """Somebody stands on a later manifest, or on one that is not in our history: fetch it by hash, or compare.

        Also where our child is certified and cannot be staged.
        """
        current = self.round
        ahead, strays = [], []
        head = current.head
        for peer, contact in self.contacts.items():
            status = contact.signed.value
            if status.head != head and self._looked_at.get(status.head, float("-inf")) <= now:
                if status.round > current.tip.round and self.alive(peer, now):
                    ahead.append(contact)
                elif self._is_stray(status) and self.alive(peer, now):
                    strays.append(contact)
        if not ahead:
            self._ahead_since = None
        elif self._ahead_since is None:
            self._ahead_since = now
        if current.adopting or current.following:
            return False
        asked = [*strays, *ahead] if ahead and self._is_left_behind(ahead, now) else strays
        not_asked = [contact for contact in asked if self._may_ask(contact.status.peer, now)]
        if not not_asked:
            return False
        best = max(not_asked, key=self._promise_of)
        self._asked[best.status.peer] = now
        self._asked_last = best.status.peer
        current.following = True
        self._out.append(CatchUp(best.status.peer, best.status.round, best.status.head))
        return True

    def _promise_of(self, contact: Contact) -> tuple[bool, int, int, PeerId]:
        """Sorts whom to catch up with: anybody can claim a round, so members first, and who did not fail us."""
        status = contact.status
        is_member = any(member.peer == status.peer for member in self.tip.members)
        return is_member, -self._asked_in_vain[status.peer], status.round, status.peer

    def _may_ask(self, peer: PeerId, now: float) -> bool:
        """Once a deadline; less often who could not give what it says it has."""
        pause = self.pace.deadline_seconds(0) * 2.0 ** min(self._asked_in_vain[peer], 4)
        return now - self._asked.get(peer, float("-inf")) > pause

    def _is_left_behind(self, ahead: list[Contact], now: float) -> bool:
        """The certificate of our child normally comes with the next message, its tiles from those who stage them."""
        decided = self.round.decided
        if any(c.status.round > self.tip.round + 1 for c in ahead) or not self.is_member():
            return True
        if decided is not None:
            return not self._can_stage(decided)
        return self._ahead_since is not None and now - self._ahead_since > self.pace.suspect_seconds

    def _can_stage(self, commit: Commit) -> bool:
        if commit.certificate.manifest in self.round.verified:
            return True
        proposal = self._proposal_of(commit.certificate.manifest)
        return proposal is not None and not any(piece.key in self.round.failed for piece in commit.manifest.slices)

    def _listen(self, now: float) -> bool:
        """Keeps the guard of degraded commits up to date; whether what may be done has changed."""
        self._notice_sleep(now)
        live, current = self.liveness, self.round
        others = {member.peer for member in self.tip.members} - {self.me} if live.asking_since is not None else ()
        changed = live.note(others, self.pace, now)
        if live.failing_since is not None and not self._is_wanting(now):
            live.failing_since = None
        live.hears_quorum = self._is_majority(len(self._live_electors(now)))
        if live.hears_quorum:
            live.heard_quorum(now)
            degraded = current.decided is not None and not has_quorum(current.decided)
            if degraded and current.decided is not None and not current.adopting:  # it lives after all
                current.offered[current.decided.certificate.manifest] = current.decided
                current.decided = current.missing = None
                changed = True
        return changed

    def _is_wanting(self, now: float) -> bool:
        """Whether others have what is to be staged here, or are further than we are."""
        target = self._target()
        name = manifest_hash(target.value.manifest) if target is not None else NO_HASH
        is_here = target is None or name in self.round.verified
        return self._ahead_since is not None or (not is_here and self._can_be_had(name, now))

    def _notice_sleep(self, now: float) -> None:
        """A late event (the machine slept) makes the silence of others ours: their time starts again, and we ask."""
        asleep = now - self._last_event
        self._last_event = now
        if asleep <= 5 * self.pace.heartbeat_seconds:
            return
        current = self.round
        for contact in self.contacts.values():
            contact.at += asleep
            contact.direct_at += asleep
        self._gone.clear()
        self.liveness.ask(now)
        current.started_at += asleep
        current.plan_at += asleep
        current.progress_at = current.reachable_at = now
        current.seen = dict.fromkeys(current.seen, now)

    def _stage(self, key: Key, hashes: bytes) -> None:
        """Notes what is on disk. Writing undoes a state that was finished; a tile has one version there."""
        current = self.round
        current.verified.clear()
        if current.staged.get(key, hashes) != hashes:
            current.building = None
            current.outcome = None
            current.missing = None
        current.staged[key] = hashes
        wanted = current.missing.get(key) if current.missing else None
        if wanted is not None and wanted.hashes == hashes and current.missing:
            del current.missing[key]

    def _forget_staged(self) -> None:
        current = self.round
        current.staged.clear()
        current.fetching.clear()
        current.reducing.clear()
        current.verified.clear()
        current.failed.clear()
        current.verifying = NO_HASH
        current.building = None
        current.outcome = None
        current.missing = None
        current.adopting = current.following = False
        current.close_asked = current.close_asked and current.work.ready
        for index in [index for index, report in current.reports.items() if report.author == self.me]:
            del current.reports[index]

    def _resume(self, record: VoteRecord, now: float) -> None:
        """Back with what is on disk: we hold to every vote in it."""
        self.record = record
        current = self.round
        current.view = max(current.view, record.promised)
        current.missing = None
        for signed in (record.accepted, record.degraded):
            if signed is not None:
                current.proposals[(signed.value.heard, signed.value.ballot)] = signed
        if record.accepted is not None:
            name = record.accepted_hash
            current.own_vote = self._sealer.seal(
                Acceptance(self.rules.fingerprint, current.head, record.accepted_ballot, name)
            )
            current.votes.setdefault((record.accepted_ballot, name), {})[self.me] = current.own_vote
        if record.degraded_votes and record.degraded is not None:
            proposal = record.degraded.value
            commit = self._commit_of(
                DEGRADED, proposal.accepted, proposal.heard, proposal.manifest, record.degraded_votes
            )
            current.offered[commit.certificate.manifest] = commit
