"""One life of a simulated peer on the virtual clock: the real driver's parts over symbols, work of random speed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, manifest_hash
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash, PeerId, sha256, short
from spes_p2p.testing.judge import Guard
from spes_p2p.testing.sim_state import Disk, FakeSealer, Trained, check_fake
from spes_p2p.testing.sim_trainer import SimTrainer
from spes_p2p.testing.symbol_driver import SymbolDriver
from spes_p2p.testing.symbols import Died
from spes_p2p.testing.witness import Witness

if TYPE_CHECKING:
    from spes_p2p.testing.sim_peer import SimPeer

HEARTBEAT_SECONDS = 1.0
HARMFUL, WRONG, CANNOT_TRY = 0.05, 0.05, 0.1
"""How many columns are harmful, and how often one who tries them finds the opposite, or nothing."""
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
        self.witness = Witness(world.now)
        self._decided: Commit | None = None
        life = next(world.lives)
        first = int((DAY_SECONDS + world.now - peer.clock_behind_seconds) * 1000) + life
        start = Start(
            disk.incarnation, disk.tip, disk.tip_commit, disk.record, peer.intent, first,
            tuple(other for other in world.peers if other != peer.name), peer.name.encode(),
            disk.ledger(disk.tip.round),
        )  # fmt: skip
        identity = Identity(peer.name, world.rules, FakeSealer(peer.name), check_fake)
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
        self.witness.hear(self.core, envelope, self._world.now)
        self.look()
        self.driver.tell(on.MessageReceived(envelope))
        if self._world.random.random() < self._world.weather.reply:
            reply = self.driver.dispatcher.reply_to(sender)
            self.judge.saw_message(self._name, reply, self._disk)
            self._world.network.send(self._name, sender, reply)

    def _tick(self) -> None:
        self._peer.later(1.01 * HEARTBEAT_SECONDS, self._tick)
        self.look()
        was_full = self.driver.dispatcher.is_full
        self.driver.dispatcher.tick()
        if was_full and not self.driver.dispatcher.is_full:
            self._world.changed(f"{self._name} tries its disk again")

    def look(self) -> None:
        self.witness.look(self.core, self._disk.is_on_chain, self._world.now)

    def has_made(self, manifest: Manifest) -> bool:
        """Whether the state of a manifest is staged here; what it did not sign for is gone with a crash."""
        root, verified = manifest.state_root, self.core.state.round.verified
        is_kept = manifest_hash(manifest) in verified or self.driver.dispatcher.is_bound(root)
        return is_kept and root in self._disk.finished

    # ---- Surroundings ----

    def now(self) -> float:
        return self._world.now

    def guard(self) -> Guard:
        return self.witness.guard(self.core, self._disk.is_on_chain, self._world.now)

    def new_incarnation(self) -> int:
        return self._world.next_incarnation()

    def handled(self) -> None:
        """A degraded child that others made is judged when the core decides for it."""
        decided = self.core.state.round.decided
        if decided is not self._decided and decided is not None and self._name not in decided.certificate.heard:
            self.judge.saw_taken(self._name, decided, self.guard())
        self._decided = decided

    def before(self, action: do.Action) -> None:
        """Dies where that is planned."""
        if self._world.say is not None:
            tell_story(self._world.tell, self._name, action)
        planned = self._peer.crash_after
        if type(action) in planned:
            planned[type(action)] -= 1
            if planned[type(action)] == 0:
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
        self._peer.parted |= notice.kind == "parted"

    def work_seconds(self) -> float:
        return self._peer.work_seconds * (0.2 + 1.6 * self._world.random.random())

    def finds_harmful(self, column: Hash) -> bool:
        """Of one column in twenty most say so; now and then somebody is wrong, or cannot say."""
        chance = self._world.random.random()
        if chance < CANNOT_TRY:
            return False
        return (column[0] < HARMFUL * 256) is not (chance > 1 - WRONG)

    def finds_work(self, entry: Contribution) -> str | None:
        """It was done; now and then somebody is wrong, or cannot say."""
        chance = self._world.random.random()
        if chance < CANNOT_TRY:
            return None
        return PASSED if chance <= 1 - WRONG else FAILED

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
            parts = ("plan", "reports", "votes", "contents", "degraded_proposals", "degraded_votes", "commit")
            if said := [part for part in parts if getattr(envelope, part)]:
                tell(f"{name} to {to}: {', '.join(said)}")
        case do.Persist(record):
            degraded = f", degraded with {record.degraded.value.heard}" if record.degraded else ""
            words = ", ".join(
                f"{kind} {signed.value.ballot} {short(signed.value.value)}"
                for kind in ("proposal", "prevote", "precommit")
                if (signed := getattr(record, kind)) is not None
            )
            tell(f"{name} persists: {words}{degraded}")
        case do.Fetch(piece, hashes, holders):
            tell(f"{name}: Fetch {piece.key} {short(sha256(hashes))} of {holders}")
        case do.Adopt(commit):
            tell(f"{name}: Adopt {short(commit.certificate.manifest)}")
        case _:
            tell(f"{name}: {str(action)[:100]}")
