"""One peer of the small world: what one event makes of it, by the real `Consensus`, and whether that is allowed.

It keeps to what the real driver does, with symbols for tensors; whatever takes it no time there takes none here. All
that comes from the world around is passed in. Leaves out who else there is (`small_world`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.forks import Way
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.messages import (
    Commit,
    Envelope,
    Intent,
    Manifest,
    Proposal,
    Report,
    Work,
    manifest_hash,
    plan_hash,
)
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.state import Identity
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.testing.judge import Guard, Judge, Violation, VoteHistory, voters
from spes_p2p.testing.sim_state import (
    BATCH_SEQUENCES,
    SEQUENCE_TOKENS,
    STEPS,
    Disk,
    FakeSealer,
    State,
    Trained,
    check_fake,
    reduce_tiles,
    split,
    trained_positions,
)
from spes_p2p.testing.snapshots import (
    BEAT_SECONDS,
    FIRST_SEQUENCE,
    HEARTBEAT_SECONDS,
    OLDEST_SECONDS,
    SEQUENCES_A_BEAT,
    FixedPace,
    Snapshots,
)


@dataclass
class Local:
    """All of one peer: its process (None while it is down), its disk, and the work that its `Consensus` asked for.

    `heard_at` is the truth about who was heard, for the judge, `live` who of them can vote and stands here by its last
    word, `quorum_at` when a quorum of them lived.
    """

    name: PeerId
    core: Consensus | None
    disk: Disk
    todo: tuple[object, ...] = ()
    trained: Trained | None = None
    lives: int = 0
    sequence: int = FIRST_SEQUENCE
    heard_at: dict[PeerId, float] = field(default_factory=dict)
    newest: dict[PeerId, int] = field(default_factory=dict)
    live: set[PeerId] = field(default_factory=set)
    quorum_at: float = 0.0
    started_at: float = 0.0


class PathJudge(Judge):
    """A judge for whom one step is all of history: what was before stands in the record on disk."""

    def remember(self, peer: PeerId, disk: Disk) -> None:
        """Takes a durable record for what this elector has bound itself to."""
        record = disk.record
        if record is None:
            return
        history = VoteHistory(record.promised, proposed=dict(record.proposed))
        if record.accepted is not None:
            history.accepted[record.accepted_ballot] = record.accepted_hash
        if record.degraded is not None:
            history.degraded.add((record.degraded.value.heard, manifest_hash(record.degraded.value.manifest)))
        self._histories[(peer, disk.incarnation, record.parent)] = history


class SmallPeers:
    """The steps of each of `names` from `genesis` on, judged."""

    def __init__(
        self,
        names: list[PeerId],
        rules: RunRules,
        genesis: Manifest,
        state: State,
        core_class: type[Consensus],
        snapshots: Snapshots,
        servers: Collection[PeerId] = (),
    ) -> None:
        self._names, self._rules, self._genesis, self._state = names, rules, genesis, state
        self._core_class, self._snapshots, self._servers = core_class, snapshots, frozenset(servers)
        self._content = Judge(rules, genesis, state)

    def fresh_judge(self) -> PathJudge:
        """One that knows what values went into which tiles, and nothing else."""
        judge = PathJudge(self._rules, self._genesis, self._state)
        judge.reduced, judge.wires = self._content.reduced, self._content.wires
        return judge

    def persist(self, local: Local, action: do.Persist) -> None:
        """The record is on disk; it must not go back on the one before."""
        name = local.name
        judge = self._judge_of(local)
        local.disk.record = action.record
        judge.saw_record(name, action.record, local.disk, lambda: self._guard(local))

    def say(self, local: Local, envelope: Envelope) -> None:
        """A message leaves; it must not go beyond what is on disk."""
        self._judge_of(local).saw_message(local.name, envelope, local.disk)

    def _judge_of(self, local: Local) -> PathJudge:
        judge = self.fresh_judge()
        judge.remember(local.name, local.disk)
        return judge

    def _guard(self, local: Local) -> Guard:
        """What it truly heard of a quorum."""
        self._note_quorum(local)
        pace = FixedPace(HEARTBEAT_SECONDS)
        just_asked = -local.started_at <= 2.5 * pace.deadline_seconds(0)
        return Guard(-local.quorum_at, pace.degraded_wait_seconds() - 1e-6, just_asked, self._live(local))

    def _note_quorum(self, local: Local) -> None:
        assert local.core is not None
        if 2 * len(self._live(local)) > len(voters(local.core.tip)):
            local.quorum_at = 0.0

    def _live(self, local: Local) -> frozenset[PeerId]:
        core = local.core
        assert core is not None
        chosen, suspect = voters(core.tip), FixedPace(HEARTBEAT_SECONDS).suspect_seconds
        live = {peer for peer in local.live & set(chosen) if -local.heard_at[peer] <= suspect}
        if chosen.get(local.name) == core.state.own.incarnation and core.state.liveness.can_be_counted_on(
            core.state.pace, 0.0
        ):
            live.add(local.name)
        return frozenset(live)

    def note(self, local: Local, action: do.Action) -> None:
        """What is neither said nor written is to be done."""
        if isinstance(action, do.Notice):
            if action.kind == "refused":
                raise Violation("refused", f"{local.name} refused what {action.peer} said: {action.text}")
        elif not isinstance(action, do.CloseTraining):
            local.todo = (*local.todo, self._snapshots.frozen.one(action))

    def event(self, local: Local, what: tuple[Any, ...]) -> tuple[list[do.Action], bool]:
        """(what the core wants done, whether its disk was written before)."""
        core = local.core
        match what:
            case ("start",):
                return self._start(local), False
            case ("tick",):
                assert core is not None
                self._snapshots.age(core)
                local.heard_at = {peer: at - BEAT_SECONDS for peer, at in local.heard_at.items()}
                local.newest = {peer: at - SEQUENCES_A_BEAT for peer, at in local.newest.items()}
                local.quorum_at = max(local.quorum_at - BEAT_SECONDS, -OLDEST_SECONDS)
                local.started_at = max(local.started_at - BEAT_SECONDS, -OLDEST_SECONDS)
                self._note_quorum(local)
                if local.disk.record is not None:
                    local.disk.record = self._snapshots.aged(local.disk.record)
                return core.handle(on.ClockTicked(), 0.0), False
            case ("receive", message):
                return self._receive(local, message), False
            case ("work", at, *brought):
                work = local.todo[at]
                local.todo = local.todo[:at] + local.todo[at + 1 :]
                return self._do_work(local, work, brought)
        raise ValueError(f"nothing is known of {what}")

    def _start(self, local: Local) -> list[do.Action]:
        disk, name = local.disk, local.name
        disk.restart()
        intent = Intent(joining=True, serving=name in self._servers)
        others = tuple(peer for peer in self._names if peer != name)
        begin = Start(disk.incarnation, disk.tip, disk.tip_commit, disk.record, intent, local.sequence, others)
        identity = Identity(name, self._rules, FakeSealer(name), check_fake)
        core = local.core = self._core_class.begin(identity, begin, FixedPace(HEARTBEAT_SECONDS), 0.0)
        local.lives += 1
        local.todo = ("train",) if not disk.chain and name not in self._servers else ()
        local.heard_at, local.live = dict.fromkeys(others, 0.0), set()
        local.quorum_at = local.started_at = 0.0
        actions: list[do.Action] = []
        for proposal in (core.state.own.record.accepted, core.state.own.record.degraded):
            if proposal is not None and proposal.value.manifest.state_root in disk.finished:
                actions += core.handle(on.StateVerified(manifest_hash(proposal.value.manifest)), 0.0)
        return actions + core.handle(on.ClockTicked(), 0.0)

    def _receive(self, local: Local, envelope: Envelope) -> list[do.Action]:
        assert local.core is not None
        for signed in envelope.statuses:
            status = signed.value
            if status.peer in local.heard_at and status.sequence > local.newest.get(status.peer, -1):
                local.newest[status.peer] = status.sequence
                local.heard_at[status.peer] = 0.0
                stands = status.head == local.core.tip_hash or status.round < local.core.tip.round
                (local.live.add if stands and status.intent.can_vote else local.live.discard)(status.peer)
        self._note_quorum(local)
        return local.core.handle(on.MessageReceived(envelope), 0.0)

    def _do_work(self, local: Local, work: Any, brought: list[Any]) -> tuple[list[do.Action], bool]:
        core, disk, name = local.core, local.disk, local.name
        assert core is not None
        match work:
            case "train":
                return self._train(local, core, name), False
            case do.Reduce():
                return self._reduce(core, disk, name, work, brought)
            case do.Fetch(piece, hashes):
                if not core.wants_staged(piece.key, hashes):
                    return [], False
                if not brought[0]:
                    return core.handle(on.FetchFailed(piece.key), 0.0), False
                disk.stage(piece, split(hashes))
                return core.handle(on.SliceStaged(piece.key, hashes), 0.0), True
            case do.Build(_, slices, hashes):
                if core.state.round.building != work:
                    return [], False
                root = disk.finish(self._rules, slices, None)
                return core.handle(on.StateBuilt(work, self._content.saw_build(hashes), root, None), 0.0), True
            case do.Verify(proposal):
                return self._verify(core, disk, proposal.value)
            case do.Adopt(commit):
                return self._adopt(local, core, commit)
            case do.CatchUp(head=head):
                return self._catch_up(local, core, head, brought[0])
        raise ValueError(f"no peer can do {work}")

    def _train(self, local: Local, core: Consensus, name: PeerId) -> list[do.Action]:
        if core.tip.round > 0:
            return []
        sequences = STEPS * BATCH_SEQUENCES
        work = Work(True, sequences * SEQUENCE_TOKENS, STEPS, sequences, expected_tokens=sequences * SEQUENCE_TOKENS)
        number = 100 * self._names.index(name) + local.lives
        local.trained = Trained(number, name, core.tip_hash, work, trained_positions(core.tip, name, sequences))
        return core.handle(on.TrainingProgressed(work), 0.0)

    def _reduce(
        self, core: Consensus, disk: Disk, name: PeerId, work: do.Reduce, brought: list[Any]
    ) -> tuple[list[do.Action], bool]:
        plan = work.plan.value
        piece = plan.slices[work.index]
        if not core.wants_reduced(plan_hash(plan), work.index):
            return [], False
        fit = [trained for trained in brought if trained is not None]
        if not fit:
            return core.handle(on.ReduceFailed(work.index), 0.0), False
        tiles = reduce_tiles(plan, piece, fit)
        self._content.reduced.update((tile, tuple(fit)) for tile in tiles)
        disk.stage(piece, tiles)
        lost = tuple((peer, "lost") for peer, trained in zip(piece.contributors, brought) if trained is None)
        report = Report(plan_hash(plan), work.index, name, tuple(t.peer for t in fit), tiles, lost)
        return core.handle(on.SliceReduced(report), 0.0), True

    def _verify(self, core: Consensus, disk: Disk, proposal: Proposal) -> tuple[list[do.Action], bool]:
        manifest = proposal.manifest
        if core.state.round.verifying != manifest_hash(manifest) or core.tip_hash != manifest.parent:
            return [], False
        pairs = list(zip(manifest.slices, proposal.wire_hashes, strict=True))
        whole = all(disk.has(piece, hashes) for piece, hashes in pairs)
        if whole and manifest.state_root not in disk.finished:
            disk.finish(self._rules, manifest.slices, manifest.merge)
        if not whole or manifest.state_root not in disk.finished or sha256(*proposal.wire_hashes) != manifest.wire_root:
            return core.handle(on.VerifyFailed(), 0.0), whole
        return core.handle(on.StateVerified(manifest_hash(manifest)), 0.0), True

    def _adopt(self, local: Local, core: Consensus, commit: Commit) -> tuple[list[do.Action], bool]:
        disk = local.disk
        if commit.manifest.parent != core.tip_hash:
            return [], False
        state = disk.finished.get(commit.manifest.state_root)
        if state is None:
            core.handle(on.StateLost((commit.manifest.state_root,)), 0.0)
            return core.handle(on.AdoptFailed(), 0.0), False
        if local.name not in commit.certificate.heard:  # who made it was judged when it voted
            self.fresh_judge().saw_taken(local.name, commit, self._guard(local))
        return self._published(core, disk, commit, state), True

    def _catch_up(
        self, local: Local, core: Consensus, head: Hash, commits: Sequence[Commit]
    ) -> tuple[list[do.Action], bool]:
        if not commits or commits[0].manifest.parent != core.tip_hash:
            return core.handle(on.CatchUpFailed(), 0.0), False
        way = core.way_to((), tuple(commits), 0.0)
        if way is not Way.MOVE:
            return core.handle(on.ForkRejected(head, way is Way.WAIT), 0.0), False
        judge = self.fresh_judge()
        judge.saw_commit(commits[0])
        judge.saw_taken(local.name, commits[0], self._guard(local))
        state = judge.known[manifest_hash(commits[0].manifest)].state
        return self._published(core, local.disk, commits[0], state), True

    def _published(self, core: Consensus, disk: Disk, commit: Commit, state: State) -> list[do.Action]:
        judge = self.fresh_judge()
        judge.saw_commit(commit)
        disk.publish([commit], state)
        judge.saw_state(core.me, commit.manifest, disk.state)
        return core.handle(on.CommitApplied(commit), 0.0)
