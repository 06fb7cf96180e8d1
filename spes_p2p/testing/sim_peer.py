"""One simulated peer: carries out what its `Consensus` decides, as the real driver does, on symbols instead of tensors.

It trains, reduces, fetches, builds and stages with random speed; it crashes, sleeps, runs out of disk and leaves when
told to. Its `Disk` survives. Leaves out the trainer's arithmetic and everything about sockets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.events import placed
from spes_p2p.consensus.forks import Way
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.messages import (
    Commit,
    Envelope,
    Intent,
    Manifest,
    Merge,
    Report,
    Status,
    Work,
    manifest_hash,
    plan_hash,
)
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.votes import VoteRecord
from spes_p2p.data.leases import count
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256, short
from spes_p2p.testing.judge import Guard, Violation, voters
from spes_p2p.testing.sim_state import (
    BATCH_SEQUENCES,
    SEQUENCE_TOKENS,
    STEPS,
    Disk,
    FakeSealer,
    Trained,
    check_fake,
    neighbours_of,
    reduce_tiles,
    root_of,
    split,
    trained_positions,
)

if TYPE_CHECKING:
    from spes_p2p.testing.sim import World

HEARTBEAT_SECONDS = 1.0
LEAVING_SECONDS = 10.0
DAY_SECONDS = 86_400.0
"""What the clocks of machines showed when the simulation began."""


class SimPeer:
    """A machine of the swarm. `core` is None while its process does not run."""

    def __init__(self, world: World, name: PeerId, disk: Disk, link_class: int, serving: bool = False) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.core: Consensus | None = None
        columns = 0 if serving else world.max_columns
        self.intent = Intent(joining=True, max_columns=columns, link_class=link_class, serving=serving)
        self.step_seconds = world.step_seconds * world.random.choice((0.2, 0.3, 0.3, 0.4, 0.8))
        self.work_seconds = world.random.choice((0.02, 0.05, 0.3))
        self.asleep_until = 0.0
        self.awake_since = 0.0
        self.up_since = 0.0
        self.full_until = float("-inf")
        self.crash_after: dict[type[do.Action], int] = {}
        self.restart_plan: Callable[[], None] | None = None
        self.at_next_vote: Callable[[], None] | None = None
        self.at_next_proposal: Callable[[], None] | None = None
        self.is_gone_for_good = False
        self.clock_behind_seconds = 0.0
        self.backup: Disk | None = None
        self.parted = False
        """Whether it has met another final history, and stays on its own."""
        self._heard: dict[PeerId, tuple[float, Status]] = {}
        self._quorum_at = (NO_HASH, 0.0)
        self._wait_seconds = 0.0
        self._decided: Commit | None = None
        self._sleeps_since = 0.0
        self._life = 0
        self._trained: Trained | None = None
        self._work = Work()
        self._training_since: float | None = None

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """The process starts on what is on disk."""
        if self.core is not None:
            return
        world, now = self.world, self.world.now
        self._life = next(world.lives)
        self.up_since = self.awake_since = now
        self._heard.clear()
        self._trained, self._work, self._training_since = None, Work(), None
        self.disk.restart()
        self.disk.arrive(world.next_incarnation, restarted=True)
        self.disk.full = False
        first = int((DAY_SECONDS + now - self.clock_behind_seconds) * 1000) + self._life
        start = Start(
            self.disk.incarnation, self.disk.tip, self.disk.tip_commit, self.disk.record, self.intent, first,
            tuple(peer for peer in world.peers if peer != self.name),
        )  # fmt: skip
        identity = Identity(self.name, world.rules, FakeSealer(self.name), check_fake)
        self.core = world.core_class.begin(identity, start, Pace(HEARTBEAT_SECONDS), now)
        self.world.tell(f"{self.name} starts, incarnation {self.disk.incarnation}, at round {self.disk.tip.round}")
        self._restore()
        self._tick(self._life)
        self._begin_training(self._life)

    def crash(self, reason: str = "") -> None:
        """The process ends; only the disk is left."""
        if self.core is None:
            return
        self.world.result.fired.update(self.core.fired)
        self.world.changed(f"{self.name} dies")
        self.core = None
        if self.restart_plan is not None:
            self.restart_plan()

    def wipe(self) -> None:
        """The disk is lost: what starts next is a new incarnation."""
        world = self.world
        self.disk = Disk(world.genesis, world.state, world.next_incarnation())

    def back_up(self) -> None:
        """Somebody keeps a copy of the disk as it is now."""
        self.backup = copy.copy(self.disk)
        for name in ("chain", "staged", "finished", "left"):
            setattr(self.backup, name, copy.copy(getattr(self.disk, name)))

    def roll_back(self) -> None:
        """The copy takes the place of the disk."""
        if self.backup is not None:
            self.disk, self.backup = self.backup, None

    def sleep(self, seconds: float) -> None:
        """The machine is suspended: nothing runs, nothing is answered."""
        if self.asleep_until > self.world.now:
            return
        self.world.changed(f"{self.name} sleeps for {seconds} s")
        self._sleeps_since = self.world.now
        self.asleep_until = self.world.now + seconds
        self.world.at(self.asleep_until, self.world.changed, f"{self.name} wakes")

    def fill_disk(self, seconds: float) -> None:
        """Nothing can be written for a while."""
        self.world.changed(f"{self.name} has a full disk for {seconds} s")
        self.disk.full = True
        self.full_until = self.world.now + seconds
        self._later(seconds, self._has_room)

    def leave(self) -> None:
        """A clean end: what was trained counts, and the peer goes when a manifest names it no more."""
        if self.core is None or self.intent.leaving:
            return
        self.world.changed(f"{self.name} leaves")
        serving = self.intent.serving
        self.intent = Intent(joining=serving, leaving=True, link_class=self.intent.link_class, serving=serving)
        self.restart_plan = None
        self.is_gone_for_good = True
        self._later(LEAVING_SECONDS, self.crash)
        self._tell(on.IntentChanged(self.intent))
        self._close_training(self._life)

    def choose(self, child: Hash) -> None:
        """The organiser's choice has come."""
        self._tell(on.HistoryChosen((child,)))

    @property
    def round_seconds(self) -> float:
        """How long it trains in a round at full length."""
        return 0.0 if self.intent.serving else STEPS * self.step_seconds

    # ---------------------------------------------------------------- events

    def receive(self, sender: PeerId, envelope: Envelope) -> None:
        if self.core is None:
            return
        if self.asleep_until > self.world.now:
            if self.world.random.random() < 0.5:
                self.world.at(self.asleep_until, self.receive, sender, envelope)
            return
        self._note_wake()
        self._note_heard(envelope)
        self._tell(on.MessageReceived(envelope))
        if self.core is not None and self.world.random.random() < self.world.weather.reply:
            for action in self.core.handle(on.ReplyRequested(sender), self.world.now):
                assert isinstance(action, do.Send)
                self.world.judge.saw_message(self.name, action.envelope, self.disk)
                self.world.send(self.name, sender, action.envelope)

    def _tick(self, life: int) -> None:
        if life != self._life or self.core is None:
            return
        now = self.world.now
        if self.asleep_until > now:
            self.world.at(self.asleep_until, self._tick, life)
            return
        self._note_wake()
        self._note_quorum()
        self.world.after(1.01 * HEARTBEAT_SECONDS, self._tick, life)
        self._tell(on.ClockTicked())

    def _later(self, seconds: float, work: Callable[..., object], *arguments: object) -> None:
        """Work that ends with the process, and sleeps with the machine."""
        self.world.after(seconds, self._run, self._life, work, arguments)

    def _run(self, life: int, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if life != self._life or self.core is None:
            return
        if self.asleep_until > self.world.now:
            self.world.at(self.asleep_until, self._run, life, work, arguments)
            return
        self._note_wake()
        work(*arguments)

    def _note_wake(self) -> None:
        """A nap of a few heartbeats is no sleep: no event is late enough to be noticed."""
        if self.asleep_until and self._sleeps_since + 5 * HEARTBEAT_SECONDS < self.world.now:
            self.awake_since = self.world.now
        self.asleep_until = 0.0

    def _note_heard(self, envelope: Envelope) -> None:
        """The truth about who was heard, for the judge."""
        for signed in envelope.statuses:
            status = signed.value
            known = self._heard.get(status.peer)
            if known is None or (status.incarnation, status.sequence) > (known[1].incarnation, known[1].sequence):
                self._heard[status.peer] = (self.world.now, status)
        self._note_quorum()

    def _note_quorum(self) -> None:
        core = self._the_core
        head, at = self._quorum_at
        if head != core.tip_hash:
            at = self.world.now
        if 2 * len(self._live()) > len(voters(core.tip)):
            at = self.world.now
        self._quorum_at = (core.tip_hash, at)
        self._wait_seconds = (
            core.state.pace.degraded_wait_seconds()
        )  # what an event teaches counts from the next one on

    def _live(self) -> frozenset[PeerId]:
        """The electors that live by what was heard, worked out beside the core."""
        core, now = self._the_core, self.world.now
        chosen = voters(core.tip)
        able = core.state.own.intent.can_vote and core.state.liveness.can_be_counted_on(core.state.pace, now)
        live = {self.name} if chosen.get(self.name) == core.state.own.incarnation and able else set()
        for peer, incarnation in chosen.items():
            at, status = self._heard.get(peer, (float("-inf"), None))
            if peer == self.name or status is None or now - at > core.state.pace.suspect_seconds:
                continue
            stands = status.head == core.tip_hash or (
                0 <= status.round < core.tip.round and self.disk.is_on_chain(status.head, status.round)
            )
            if stands and status.incarnation == incarnation and status.intent.can_vote:
                live.add(peer)
        return frozenset(live)

    def _judge_decision(self) -> None:
        """A degraded child that others made is judged when the core decides for it."""
        decided = self._the_core.state.round.decided
        if decided is not self._decided and decided is not None and self.name not in decided.certificate.heard:
            self.world.judge.saw_taken(self.name, decided, self.guard())
        self._decided = decided

    def guard(self) -> Guard:
        """What the judge is told when this peer makes or takes a degraded child."""
        wait = self._wait_seconds
        self._note_quorum()
        now, pace = self.world.now, self._the_core.state.pace
        since = max(self._quorum_at[1], self.awake_since)
        just_asked = now - self.awake_since <= 2.5 * pace.deadline_seconds(0)
        return Guard(now - since, min(wait, self._wait_seconds) - 1e-6, just_asked, self._live())

    def _tell(self, event: on.Event) -> None:
        """Something happened: carries out what follows."""
        core = self._the_core
        self._do(core.handle(placed(event, core.tips_to_place(event), self.disk.is_on_chain), self.world.now))

    def _do(self, actions: Sequence[do.Action]) -> None:
        """Carries out actions in order; the process may die before or after any of them."""
        life = self._life
        self._judge_decision()
        told: set[PeerId] = set()
        for action in actions:
            if self.world.say is not None:
                self._tell_story(action)
            left = self.crash_after.get(type(action))
            if left is not None:
                self.crash_after[type(action)] = left - 1
                if left == 0:
                    self.crash()
                    return
            if isinstance(action, do.Send):
                if action.to in told:
                    raise Violation("storm", f"{self.name} sends two envelopes to {action.to} for one event")
                told.add(action.to)
                self._send(action)
            elif isinstance(action, do.Forget):
                self.disk.record, self.disk.left = None, set()
                self.disk.incarnation = max(self.world.next_incarnation(), action.above + 1)
                self._tell(on.IncarnationBegun(self.disk.incarnation))
            elif isinstance(action, do.Persist):
                if self.disk.full:
                    self._tell(on.DiskFull(self.disk.record or VoteRecord(NO_HASH)))
                    return
                self._persist(action)
            else:
                self._begin(action)
            if self._life != life or self.core is None:
                return

    def _tell_story(self, action: do.Action) -> None:
        match action:
            case do.Send():
                parts = ("plan", "reports", "proposals", "votes", "degraded_votes", "commit")
                said = [name for name in parts if getattr(action.envelope, name)]
                if said:
                    self.world.tell(f"{self.name} to {action.to}: {', '.join(said)}")
            case do.Persist(record):
                said_degraded = f", degraded with {record.degraded.value.heard}" if record.degraded else ""
                self.world.tell(
                    f"{self.name} persists: promised {record.promised}, accepted {record.accepted_ballot} "
                    f"{short(record.accepted_hash)}, proposed {[b for b, _ in record.proposed]}{said_degraded}"
                )
            case do.Reduce():
                self.world.tell(f"{self.name}: Reduce {action.index}")
            case do.Fetch():
                self.world.tell(
                    f"{self.name}: Fetch {action.piece.key} {short(sha256(action.hashes))} of {action.holders}"
                )
            case do.Adopt():
                self.world.tell(f"{self.name}: Adopt {short(action.commit.certificate.manifest)}")
            case _:
                self.world.tell(f"{self.name}: {str(action)[:100]}")

    @property
    def _the_core(self) -> Consensus:
        assert self.core is not None
        return self.core

    def _send(self, action: do.Send) -> None:
        envelope = action.envelope
        self.world.judge.saw_message(self.name, envelope, self.disk)
        self.world.judge.saw_proposals(self.name, envelope, self.disk)
        if envelope.commit is not None:
            self.world.judge.saw_commit(envelope.commit)
        self.world.send(self.name, action.to, envelope)

    def _persist(self, action: do.Persist) -> None:
        before, self.disk.record = self.disk.record, action.record
        world = self.world
        if self.at_next_proposal is not None and len(action.record.proposed) > len(before.proposed if before else ()):
            trap, self.at_next_proposal = self.at_next_proposal, None
            world.after(0.001, trap)
        world.judge.saw_record(self.name, action.record, self.disk, self.guard)
        if self.at_next_vote is not None and action.record.accepted is not None:
            trap, self.at_next_vote = self.at_next_vote, None
            trap()

    def _begin(self, action: do.Action) -> None:
        match action:
            case do.CloseTraining():
                rest = self.world.random.random() * self.step_seconds
                self._later(rest, self._finish_training, self._the_core.tip_hash)
            case do.Notice():
                if action.kind == "refused":
                    raise Violation("refused", f"{self.name} refused what {action.peer} said: {action.text}")
            case _ if self.disk.full:
                self._later(0.01, self._is_full)
            case do.Reduce():
                self._later(self._work_time(), self._reduce, action)
            case do.Fetch():
                self._later(self._work_time(), self._fetch, action)
            case do.Build():
                self._later(self._work_time(), self._build, action)
            case do.Verify():
                self._later(self._work_time(), self._verify, action)
            case do.Adopt():
                self._later(0.01, self._adopt, action.commit)
            case do.CatchUp():
                self._later(3 * self._work_time(), self._catch_up, action, self._the_core.tip_hash)

    def _work_time(self) -> float:
        return self.work_seconds * (0.2 + 1.6 * self.world.random.random())

    # ---------------------------------------------------------------- training

    def _begin_training(self, life: int) -> None:
        if (
            self.core is None
            or life != self._life
            or not self.core.state.is_member()
            or self._training_since is not None
        ):
            return
        if self.intent.serving:
            return
        if self.intent.leaving:
            self._close_training(life)
            return
        self._training_since = self.world.now
        head = self.core.tip_hash
        self._later(self.round_seconds * (0.9 + 0.2 * self.world.random.random()), self._finish_training, head)
        if self.world.random.random() < 0.3:
            self._later(0.5 * self.round_seconds, self._tell_progress, head)

    def _tell_progress(self, head: Hash) -> None:
        core = self._the_core
        if core.tip_hash == head and self._training_since is not None and not core.state.round.work.ready:
            self._tell(on.TrainingProgressed(self._work_so_far(ready=False)))

    def _finish_training(self, head: Hash) -> None:
        if self._the_core.tip_hash == head and self._training_since is not None:
            self._close_training(self._life)

    def _close_training(self, life: int) -> None:
        core = self.core
        if core is None or life != self._life or core.state.round.work.ready or self.intent.serving:
            return
        if self._training_since is None and not self.intent.leaving:
            return
        if core.tip_hash != manifest_hash(self.disk.tip):
            return
        self._work = self._work_so_far(ready=True)
        self._training_since = None
        if self._work.sequences and core.state.is_member():
            positions = trained_positions(core.tip, self.name, self._work.sequences)
            poison = self.world.random.random() < 0.02
            blocks = (
                frozenset({self.world.random.randrange(len(self.world.rules.block_tiles))}) if poison else frozenset()
            )
            number = next(self.world.lives)
            self._trained = Trained(number, self.name, core.tip_hash, self._work, positions, blocks)
        self._tell(on.TrainingProgressed(self._work))

    def _work_so_far(self, ready: bool) -> Work:
        core, since = self._the_core, self._training_since
        seconds = 0.0 if since is None else self.world.now - since
        steps = min(STEPS, int(seconds / self.step_seconds + 0.2))
        held = count(core.tip.leases.of(self.name))
        sequences = min(held, self._work.sequences + steps * BATCH_SEQUENCES)
        steps = (sequences - self._work.sequences) // BATCH_SEQUENCES
        sequences = self._work.sequences + steps * BATCH_SEQUENCES
        return Work(
            ready,
            sequences * SEQUENCE_TOKENS,
            self._work.steps + steps,
            sequences,
            seconds,
            0.0 if ready else self.step_seconds,
            STEPS * BATCH_SEQUENCES * SEQUENCE_TOKENS,
        )

    # ---------------------------------------------------------------- data

    def contribution(self, action: do.Reduce) -> Trained | None:
        """What this peer gives to a reducer: the values that the plan counts, while they are here."""
        trained, plan, core = self._trained, action.plan.value, self._the_core
        entry = next(entry for entry in plan.roster if entry.peer == self.name)
        return trained if trained is not None and core.is_counted(plan.parent, entry) else None

    def _reduce(self, action: do.Reduce) -> None:
        plan, core = action.plan.value, self._the_core
        if core.tip_hash != plan.parent or not self._is_settled():
            return
        piece = plan.slices[action.index]
        fit: list[Trained] = []
        left_out: list[tuple[PeerId, str]] = []
        for peer in piece.contributors:
            holder = self if peer == self.name else self.world.available(self.name, peer)
            broken = peer != self.name and self.world.random.random() < self.world.weather.broken_transfer
            trained = None if holder is None or broken else holder.contribution(action)
            if trained is None:
                left_out.append((peer, "lost"))
            elif piece.block in trained.poison:
                left_out.append((peer, "not finite"))
            else:
                fit.append(trained)
        if not core.wants_reduced(plan_hash(plan), action.index):
            return
        if not fit and self.world.random.random() < 0.5:
            self._tell(on.ReduceFailed(action.index))
            return
        tiles = reduce_tiles(plan, piece, fit) if fit else ()
        for tile in tiles:
            self.world.judge.reduced[tile] = tuple(fit)
        if tiles:
            self.disk.stage(piece, tiles)
        names = tuple(trained.peer for trained in fit)
        report = Report(plan_hash(plan), action.index, self.name, names, tiles, tuple(left_out))
        self._tell(on.SliceReduced(report))

    def _fetch(self, action: do.Fetch) -> None:
        core, piece = self._the_core, action.piece
        if not core.wants_staged(piece.key, action.hashes) or not self._is_settled():
            return
        for name in action.holders:
            holder = self.world.available(self.name, name)
            broken = self.world.random.random() < self.world.weather.broken_transfer
            if holder is None:
                self._later(0.0, self._refused, name)
            if holder is not None and not broken and holder.disk.has(piece, action.hashes):
                self.disk.stage(piece, split(action.hashes))
                self._tell(on.SliceStaged(piece.key, action.hashes))
                return
        self._tell(on.FetchFailed(piece.key))

    def _build(self, action: do.Build) -> None:
        core = self._the_core
        if not self._is_settled():
            return
        if not all(self.disk.has(piece, hashes) for piece, hashes in zip(action.slices, action.hashes, strict=True)):
            self._tell(on.SlicesLost(tuple(piece.key for piece in action.slices)))
            return
        merge = Merge(action.alpha, neighbours_of(self.world.rules.num_columns)) if action.alpha else None
        root = self.disk.finish(self.world.rules, action.slices, merge)
        wire_root = self.world.judge.saw_build(action.hashes)
        self._later(self._work_time(), self._built, action, wire_root, root, merge, core.tip_hash)

    def _built(self, action: do.Build, wire_root: Hash, root: Hash, merge: Merge | None, head: Hash) -> None:
        """Other slices may have come meanwhile: then it is no more what is on disk."""
        if self._the_core.tip_hash == head:
            self._tell(on.StateBuilt(action, wire_root, root, merge))

    def _verify(self, action: do.Verify) -> None:
        core, proposal = self._the_core, action.proposal.value
        manifest = proposal.manifest
        if (
            core.state.round.verifying != manifest_hash(manifest)
            or core.tip_hash != manifest.parent
            or not self._is_settled()
        ):
            return
        pairs = list(zip(manifest.slices, proposal.wire_hashes, strict=True))
        root = None
        if all(self.disk.has(piece, hashes) for piece, hashes in pairs):
            if manifest.state_root in self.disk.finished:
                root = manifest.state_root
            else:
                root = self.disk.finish(self.world.rules, manifest.slices, manifest.merge)
        if root != manifest.state_root or sha256(*proposal.wire_hashes) != manifest.wire_root:
            self._tell(on.VerifyFailed())
            return
        self._tell(on.StateVerified(manifest_hash(manifest)))

    # ---------------------------------------------------------------- commits

    def _adopt(self, commit: Commit) -> None:
        core, manifest = self._the_core, commit.manifest
        if manifest.parent != core.tip_hash or not self._is_settled():
            return
        state = self.disk.finished.get(manifest.state_root)
        if state is None:
            core.handle(on.StateLost((manifest.state_root,)), self.world.now)
            self._tell(on.AdoptFailed())
            return
        self.world.judge.saw_commit(commit)
        self.disk.publish([commit], state)
        self._later(0.005, self._applied, [commit])

    def _catch_up(self, action: do.CatchUp, head: Hash) -> None:
        core = self._the_core
        if not self._is_settled() or core.tip_hash != head:  # our own child was adopted meanwhile
            return
        holder = self.world.available(self.name, action.holder)
        broken = self.world.random.random() < self.world.weather.broken_transfer
        if holder is None or broken:
            self._tell(on.CatchUpFailed())
            return
        common = self.disk.shared_with(holder.disk)
        ours, theirs = tuple(self.disk.chain[common:]), tuple(holder.disk.chain[common:])
        if not theirs:
            self._tell(on.CatchUpFailed())
            return
        way = core.way_to(ours, theirs, self.world.now)
        self.parted |= way is Way.PARTED
        if way is not Way.MOVE:
            self._tell(on.ForkRejected(action.head, way is Way.WAIT))
            return
        for commit in theirs:
            self.world.judge.saw_commit(commit)
        if root_of(holder.disk.state) != theirs[-1].manifest.state_root:
            raise Violation("state", f"{holder.name} serves another state than it committed")
        if not ours:
            self.world.judge.saw_taken(self.name, theirs[0], self.guard())
            self.disk.publish(theirs, holder.disk.state)
            self._later(0.005, self._applied, list(theirs))
            return
        self.world.judge.saw_switch(self.name, ours, theirs)
        self.disk.switch(common, theirs, holder.disk.state)
        self.disk.arrive(self.world.next_incarnation, restarted=False)
        self._later(0.005, self._switched, theirs[-1])

    def _switched(self, commit: Commit) -> None:
        self.world.tell(f"{self.name} goes over to round {commit.manifest.round} {short(commit.certificate.manifest)}")
        self.world.result.switches += 1
        self._work, self._trained, self._training_since = Work(), None, None
        self.world.note_commit(commit.manifest)
        self._tell(on.HistorySwitched(commit, self.disk.incarnation))
        self._after_commit()

    def _applied(self, commits: list[Commit]) -> None:
        """The commits are durable here; work that none of them counted is carried on if its data is still ours."""
        core = self._the_core
        before = core.tip
        for commit in commits:
            self._carry(before, commit.manifest)
            before = commit.manifest
        newest = commits[-1]
        self.world.judge.saw_state(self.name, newest.manifest, self.disk.state)
        self._training_since = None
        self._trained = None
        self.world.note_commit(newest.manifest)
        self.world.tell(f"{self.name} stands on round {newest.manifest.round} {short(newest.certificate.manifest)}")
        self._tell(on.CommitApplied(newest))
        self._after_commit()

    def _after_commit(self) -> None:
        if self.core is None:
            return
        self._note_quorum()
        if self.intent.leaving and not self.core.state.is_member():
            self.crash()
            return
        self._begin_training(self._life)

    def _carry(self, before: Manifest, after: Manifest) -> None:
        counted = any(entry.peer == self.name for entry in after.roster)
        mine = trained_positions(before, self.name, self._work.sequences)
        if counted or trained_positions(after, self.name, self._work.sequences) != mine:
            self._work = Work()

    def _restore(self) -> None:
        """A state that was signed for before the crash, or the full disk, and is still staged, is stood by."""
        core = self._the_core
        for proposal in (core.state.own.record.accepted, core.state.own.record.degraded):
            if proposal is not None and proposal.value.manifest.state_root in self.disk.finished:
                self._tell(on.StateVerified(manifest_hash(proposal.value.manifest)))
                if self.core is None:
                    return

    # ---------------------------------------------------------------- small things

    def has_state(self, manifest: Manifest) -> bool:
        """Whether it has the state of a manifest, or of a later one; what it did not sign for is gone with a crash."""
        if self.disk.tip.round >= manifest.round:
            return True
        core, name = self._the_core, manifest_hash(manifest)
        bound = (
            signed for signed in (core.state.own.record.accepted, core.state.own.record.degraded) if signed is not None
        )
        stood_by = name in core.state.round.verified or any(
            manifest_hash(signed.value.manifest) == name for signed in bound
        )
        return stood_by and manifest.state_root in self.disk.finished

    def _refused(self, name: PeerId) -> None:
        """A dial is refused where a process is gone, and by some firewalls where a network has fallen apart."""
        peer = self.world.peers[name]
        is_cut = not self.world.reaches(self.name, name)
        if peer.refuses and (peer.core is None or is_cut):
            self._tell(on.HostRefusedDial(name))

    refuses = True
    """Whether the host answers when the process is gone, or a firewall in its place."""

    def _is_settled(self) -> bool:
        """Whether we may write for the round of the core: there is room, and no commit on its way from disk to core."""
        return not self._is_full() and self._the_core.tip_hash == manifest_hash(self.disk.tip)

    def _is_full(self) -> bool:
        """Whether the disk took no more; the core is told so."""
        if self.disk.full and self._the_core.state.own.intent.can_vote:
            self._tell(on.DiskFull(self.disk.record or VoteRecord(NO_HASH)))
        return self.disk.full

    def _has_room(self) -> None:
        self.disk.full = False
        self.world.changed(f"{self.name} has room again")
        self.full_until = self.world.now
        self._tell(on.DiskHasRoom())
        if self.core is not None:
            self._restore()
