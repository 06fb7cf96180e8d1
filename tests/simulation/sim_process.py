"""One life of a simulated peer on the virtual clock: the real driver's parts over symbols, work of random speed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import Commit, Work
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.data.leases import count
from spes_p2p.ids import Hash, PeerId, sha256, short
from tests.simulation.sim_state import (
    BATCH_SEQUENCES,
    SEQUENCE_TOKENS,
    STEPS,
    Disk,
    FakeSealer,
    Trained,
    check_fake,
    trained_positions,
)
from tests.simulation.symbol_driver import SymbolDriver
from tests.simulation.symbols import Died

if TYPE_CHECKING:
    from tests.simulation.sim_peer import SimPeer


HEARTBEAT_SECONDS = 1.0
SLOW_SHARE, SLOWNESS = 0.1, 100.0
"""How much of the work on a disk that others use, too, takes how many times as long."""
DAY_SECONDS = 86_400.0
"""What the clocks of machines showed when the simulation began."""


class SimProcess:
    """A process of `peer`: the `Surroundings` of its driver on the virtual clock."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self._name = peer.name
        self._world = world = peer.world
        self._disk = disk = peer.disk
        self.judge = world.judge
        life = next(world.lives)
        first = int((DAY_SECONDS + world.now - peer.clock_behind_seconds) * 1000) + life
        start = Start(
            disk.incarnation, disk.tip, disk.tip_commit, disk.record, peer.intent, first,
            tuple(other for other in world.peers if other != peer.name), peer.name.encode(),
            disk.keeps_states,
        )  # fmt: skip
        organiser = FakeSealer(world.rules.organiser) if peer.has_key else None
        identity = Identity(peer.name, world.rules, FakeSealer(peer.name), check_fake, organiser)
        self.core: Consensus = world.machine_of(peer.name).begin(identity, start, Pace(HEARTBEAT_SECONDS), world.now)
        self.others = SimOthers(peer)
        self.trainer = SimTrainer(peer, self)
        self.driver = SymbolDriver(self.core, disk, self)
        world.tell(f"{peer.name} starts, incarnation {disk.incarnation}, at round {disk.tip.round}")

    def begin(self) -> None:
        """What a process does first."""
        self.driver.dispatcher.start()
        self._tick()
        self.trainer.begin()

    def leave(self) -> None:
        """It wants to be named no more."""
        self.driver.tell(on.IntentChanged(self._peer.intent))
        self.trainer.hand_in()

    def receive(self, sender: PeerId, envelope: Envelope) -> None:
        self.driver.tell(on.MessageReceived(envelope))
        if self._world.random.random() < self._world.weather.reply:
            reply = self.driver.dispatcher.reply_to(sender)
            self.judge.saw_message(self._name, reply, self._disk)
            self._world.network.send(self._name, sender, reply)

    def _tick(self) -> None:
        self._peer.later(1.01 * HEARTBEAT_SECONDS, self._tick)
        was_full = self.driver.dispatcher.is_full
        self.driver.dispatcher.tick()
        if was_full and not self.driver.dispatcher.is_full:
            self._world.changed(f"{self._name} tries its disk again")

    def has_made(self, manifest: Manifest) -> bool:
        """Whether the state of a manifest is staged here; what it did not sign for is gone with a crash."""
        root, verified = manifest.state_root, self.core.state.round.verified
        is_kept = manifest_hash(manifest) in verified or self.core.state.is_bound(root)
        return is_kept and root in self._disk.finished

    # ---- Surroundings ----

    def now(self) -> float:
        return self._world.now

    def new_incarnation(self) -> int:
        return self._world.next_incarnation()

    def before(self, action: do.Action) -> None:
        """Dies where that is planned."""
        if self._world.say is not None:
            tell_story(self._world.tell, self._name, action)
        if self._world.dies_before(self._peer, action):
            self._peer.crash()
            raise Died

    def wrote(self, before: VoteRecord, record: VoteRecord) -> None:
        """Springs the traps that wait for a vote."""
        peer = self._peer
        if peer.at_next_proposal is not None and ballot_of(record.proposal) > ballot_of(before.proposal):
            trap, peer.at_next_proposal = peer.at_next_proposal, None
            self._world.after(0.001, trap)
        if peer.at_next_vote is not None and record.locked_ballot >= 0:
            trap, peer.at_next_vote = peer.at_next_vote, None
            trap()

    def send(self, action: do.Send) -> None:
        envelope = action.envelope
        self.judge.saw_message(self._name, envelope, self._disk)
        self.judge.saw_contents(self._name, envelope, self._disk)
        if envelope.commit is not None:
            self.judge.saw_commit(envelope.commit)
        self._world.network.send(self._name, action.to, envelope)

    def notice(self, notice: do.Notice) -> None:
        self._peer.notices.append(notice)

    def work_seconds(self) -> float:
        seconds = self._peer.work_seconds * (0.2 + 1.6 * self._world.random.random())
        is_slow = self._disk.rivals is not None and self._world.random.random() < SLOW_SHARE
        return SLOWNESS * seconds if is_slow else seconds

    def fetch_seconds(self) -> float:
        return self._world.fetch_seconds

    def begin_work(self, action: do.Work) -> None:
        self._peer.later(0.0, lambda: self._go_on(self.driver.work(action)))

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        seconds = self.driver.go_on(work)
        if seconds is not None:
            self._peer.later(seconds, self._go_on, work)


class SimOthers:
    """What a peer gets of others, as the network and their state allow."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self._world = peer.world

    def contribution(self, entry: Contribution, parent: Hash) -> Trained | None:
        holder = self._available(entry.peer)
        return None if holder is None or holder.process is None else holder.process.trainer.counted(entry, parent)

    def serves(self, holder: PeerId, piece: Slice, hashes: bytes) -> bool:
        peer = self._available(holder)
        return peer is not None and peer.disk.has(piece, hashes)

    def disk_of(self, holder: PeerId) -> Disk | None:
        peer = self._available(holder)
        return None if peer is None else peer.disk

    def _available(self, name: PeerId) -> SimPeer | None:
        """Another peer, where it answers; a dial is refused where its process is gone, or by a firewall."""
        if name == self._peer.name:
            return self._peer
        peer = self._world.available(self._peer.name, name)
        broken = self._world.random.random() < self._world.weather.broken_transfer
        if peer is None:
            self._peer.later(0.0, self._note_refusal, name)
        return None if broken else peer

    def _note_refusal(self, name: PeerId) -> None:
        host, process = self._world.peers[name], self._peer.process
        is_gone = host.process is None or not self._world.network.reaches(self._peer.name, name)
        if host.refuses and is_gone and process is not None:
            process.driver.tell(on.HostRefusedDial(name))


def tell_story(tell: Callable[[str], None], name: PeerId, action: do.Action) -> None:
    """What a peer is about to do, for who reads along."""
    match action:
        case do.Send(to, envelope):
            parts = ("plan", "reports", "votes", "contents", "commit")
            if said := [part for part in parts if getattr(envelope, part)]:
                tell(f"{name} to {to}: {', '.join(said)}")
        case do.Persist(record):
            words = ", ".join(
                f"{kind} {signed.value.ballot} {short(signed.value.value)}"
                for kind in ("proposal", "prevote", "precommit")
                if (signed := getattr(record, kind)) is not None
            )
            tell(f"{name} persists: {words}")
        case do.Fetch(piece, hashes, holders):
            tell(f"{name}: Fetch {piece.key} {short(sha256(hashes))} of {holders}")
        case do.Adopt(commit):
            tell(f"{name}: Adopt {short(commit.certificate.manifest)}")
        case _:
            tell(f"{name}: {str(action)[:100]}")


class SimTrainer:
    """What one process trains: `_since` when, while it does."""

    def __init__(self, peer: SimPeer, process: SimProcess) -> None:
        self._peer = peer
        self._process = process
        self._core: Consensus = process.core
        self._world = peer.world
        self._trained: Trained | None = None
        self._work = Work()
        self._since: float | None = None

    def begin(self) -> None:
        """Begins the steps of a round, where it is a member of it."""
        peer = self._peer
        if not self._core.state.is_member() or self._since is not None or peer.intent.serving:
            return
        if peer.intent.leaving:
            self.hand_in()
            return
        self._since = self._world.now
        head = self._core.tip_hash
        peer.later(peer.round_seconds * (0.9 + 0.2 * self._world.random.random()), self._finish, head)
        if self._world.random.random() < 0.3:
            peer.later(0.5 * peer.round_seconds, self._tell_progress, head)

    def close(self) -> None:
        """The round closes: the running step is finished."""
        rest = self._world.random.random() * self._peer.step_seconds
        self._peer.later(rest, self._finish, self._core.tip_hash)

    def _tell_progress(self, head: Hash) -> None:
        if self._core.tip_hash == head and self._since is not None and not self._core.state.round.work.ready:
            self._process.driver.tell(on.TrainingProgressed(self._so_far(ready=False)))

    def _finish(self, head: Hash) -> None:
        if self._core.tip_hash == head and self._since is not None:
            self.hand_in()

    def hand_in(self) -> None:
        """Its work so far is READY."""
        core, peer = self._core, self._peer
        if core.state.round.work.ready or peer.intent.serving or (self._since is None and not peer.intent.leaving):
            return
        if self._process.driver.is_between_rounds:
            return
        self._work = self._so_far(ready=True)
        self._since = None
        work = self._work
        if work.sequences and core.state.is_member():
            life = next(self._world.lives)
            positions = trained_positions(core.tip, peer.name, work.sequences)
            self._trained = Trained(life, peer.name, core.tip_hash, work, positions, self._poison())
        self._process.driver.tell(on.TrainingProgressed(work))

    def _poison(self) -> frozenset[int]:
        chance, blocks = self._world.random, len(self._world.rules.block_tiles)
        return frozenset({chance.randrange(blocks)}) if chance.random() < self._world.poisoned else frozenset()

    def _so_far(self, ready: bool) -> Work:
        done, step_seconds = self._work, self._peer.step_seconds
        seconds = 0.0 if self._since is None else self._world.now - self._since
        steps = min(STEPS, int(seconds / step_seconds + 0.2))
        held = count(self._core.tip.leases.of(self._peer.name))
        steps = (min(held, done.sequences + steps * BATCH_SEQUENCES) - done.sequences) // BATCH_SEQUENCES
        sequences = done.sequences + steps * BATCH_SEQUENCES
        return Work(
            ready, sequences * SEQUENCE_TOKENS, done.steps + steps, sequences, seconds,
            0.0 if ready else step_seconds, STEPS * BATCH_SEQUENCES * SEQUENCE_TOKENS,
        )  # fmt: skip

    def counted(self, entry: Contribution, parent: Hash) -> Trained | None:
        """What this peer gives to a reducer: the values that the plan counts, while they are here."""
        return self._trained if self._trained is not None and self._core.is_counted(parent, entry) else None

    # ---- the committed state ----

    def stands_on(self, commits: Sequence[Commit], switched: bool) -> None:
        """Work that no commit counted is carried on if its data is still ours; on another history it is lost."""
        before, newest = self._core.tip, commits[-1]
        for commit in commits:
            self._carry(before, commit.manifest)
            before = commit.manifest
        if switched:
            self._work = Work()
            self._world.result.switches += 1
        self._trained, self._since = None, None
        self._world.note_commit(newest.manifest)
        name = short(newest.certificate.manifest)
        self._world.tell(f"{self._peer.name} stands on round {newest.manifest.round} {name}")

    def _carry(self, before: Manifest, after: Manifest) -> None:
        counted = any(entry.peer == self._peer.name for entry in after.roster)
        mine = trained_positions(before, self._peer.name, self._work.sequences)
        if counted or trained_positions(after, self._peer.name, self._work.sequences) != mine:
            self._work = Work()

    def goes_on(self) -> None:
        """The next round begins; who leaves and is named no more ends."""
        if self._peer.intent.leaving and not self._core.state.is_member():
            self._peer.crash()
            raise Died
        self.begin()
