"""A swarm of simulated peers on a virtual clock: the network between them, and the faults that befall them.

One heap of events, one seeded random generator: the same seed gives the same run. Who is up, who reaches whom and what
is lost is decided here; what a peer does with its `Consensus` stands in `sim_peer`, what must never happen in `judge`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Commit, Intent
from spes_p2p.consensus.place import place_of
from spes_p2p.consensus.renewing import MOST_ROUNDS_BACK
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.ids import Hash, PeerId
from spes_p2p.ownership.assign import OwnershipRequest
from tests.simulation.judge import Judge, Violation, voters
from tests.simulation.sim_peer import SimPeer
from tests.simulation.sim_state import Disk, initial_state, root_of, run_rules

ORGANISER = PeerId("o0")
SECOND = PeerId("o1")
"""Another machine with the organiser's key."""
RENEW_SECONDS = 20.0
EXTINCT_SECONDS = 30.0
"""So long after the last fault without anybody who could go on, a run is over."""
MOST_BOUNDS = 6
"""So many times as long as a commit may take, all have come to one history after the last fault."""


class Network:
    """Carries messages by the weather of `world`, and the faults of links."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.groups: dict[PeerId, int] = {}
        self._cut_until: dict[tuple[PeerId, PeerId], float] = {}
        self._late: dict[PeerId, tuple[float, float]] = {}

    def partition(self, groups: dict[PeerId, int]) -> None:
        """From now on only peers with the same number reach each other; those not named have number 0."""
        self._world.changed(f"who reaches whom: {groups or 'all'}")
        self.groups = groups

    def heal(self) -> None:
        self._cut_until.clear()
        self._late.clear()
        self.partition({})

    def cut_links(self, links: Iterable[tuple[PeerId, PeerId]], seconds: float) -> None:
        """Messages from the first to the second of each pair are lost for a while; tiles still get through."""
        links = list(links)
        self._world.changed(f"no message gets through: {links}")
        self._cut_until.update((link, self._world.now + seconds) for link in links)
        self._world.after(seconds, self._world.changed, "links are mended")

    def delay_words_of(self, name: PeerId, late_seconds: float, seconds: float) -> None:
        """For a while all that this peer says comes late, by half of `late_seconds` to all of it."""
        self._world.changed(f"what {name} says comes up to {late_seconds} s late")
        self._late[name] = (self._world.now + seconds, late_seconds)
        self._world.after(seconds, self._world.changed, f"what {name} says comes in time again")

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return self.groups.get(one, 0) == self.groups.get(other, 0)

    def delay(self) -> float:
        weather = self._world.weather
        return weather.shortest_delay + self._world.random.random() ** 3 * (
            weather.longest_delay - weather.shortest_delay
        )

    def send(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        """Delivers, loses, doubles or delays; order is not kept."""
        self._world.result.messages += 1
        weather = self._world.weather
        if self._cut_until and self._cut_until.get((sender, to), 0.0) > self._world.now:
            return
        if self._world.random.random() >= weather.loss:
            self._world.after(self.delay() + self._lateness(sender), self._deliver, sender, to, envelope)
        if weather.doubling and self._world.random.random() < weather.doubling:
            self._world.after(20 * self.delay(), self._deliver, sender, to, envelope)

    def _lateness(self, sender: PeerId) -> float:
        until, late_seconds = self._late.get(sender, (0.0, 0.0))
        return late_seconds * (0.5 + 0.5 * self._world.random.random()) if until > self._world.now else 0.0

    def _deliver(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        peer = self._world.peers.get(to)
        if peer is None or peer.core is None or not self.reaches(sender, to):
            return
        peer.receive(sender, envelope)


@dataclass
class Weather:
    """How well messages and data get through. Delays in seconds, the others are probabilities."""

    shortest_delay: float = 0.01
    longest_delay: float = 0.15
    loss: float = 0.0
    doubling: float = 0.0
    broken_transfer: float = 0.0
    reply: float = 0.1


@dataclass
class Result:
    """What came of one run."""

    rounds: int = 0
    commits: int = 0
    renewals: int = 0
    forks: int = 0
    switches: int = 0
    restarts: int = 0
    handovers: int = 0
    """Commits that give columns to other owners."""
    seconds: float = 0.0
    messages: int = 0
    longest_stall: float = 0.0
    tightest_bound: float = 0.0
    extinct: bool = False
    fired: Counter[str] = field(default_factory=Counter)


class World:
    """One simulated run of up to `len(names)` first members; more may join."""

    faults: ClassVar[Faults] = Faults.CRASH
    poisoned: ClassVar[float] = 0.02
    """How likely one block of a snapshot is not finite."""
    network_class: ClassVar[type[Network]] = Network
    liars: Mapping[PeerId, type[Consensus]] = {}
    """Who does not keep to the protocol, and what it runs in its place."""

    def __init__(
        self,
        seed: int,
        founders: int,
        columns: int,
        replicas: int,
        weather: Weather,
        core_class: type[Consensus] = Consensus,
        step_seconds: float = 1.0,
        servers: int = 0,
    ) -> None:
        """`step_seconds` scales how long peers train: slow ones leave more of a run to what happens between rounds.

        `servers` more of the first members reduce, hold and vote, and train nothing.
        """
        self.step_seconds = step_seconds
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = weather
        self.core_class = core_class
        rules = run_rules(columns, replicas=replicas)
        self.rules = replace(
            rules, faults=self.faults,
            organiser=ORGANISER, renew_after_seconds=RENEW_SECONDS,
        )  # fmt: skip
        self.fetch_seconds = 0.0
        """How long a state of others takes to come here."""
        self.max_columns = columns
        self.result = Result()
        self.peers: dict[PeerId, SimPeer] = {}
        self.last_change = 0.0
        self.mended_at = float("inf")
        """From then on no more faults come: before, somebody may come back who can go on."""
        self._adopted: set[Hash] = set()
        self.say: Callable[[str], None] | None = None
        self.network = self.network_class(self)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._tie = itertools.count()
        self._incarnations = itertools.count(1)
        self.lives = itertools.count(1)
        names = [PeerId(f"p{index}") for index in range(founders)]
        incarnations = {name: self.next_incarnation() for name in names}
        members = [Member(name, incarnations[name], True, self.random.choice((0, 0, 1))) for name in names]
        for index in range(servers):
            members.append(Member(PeerId(f"s{index}"), self.next_incarnation(), True, 0, trains=False))
        self.has_servers = servers > 0
        self.state = initial_state(self.rules)
        wishes = {member.peer: OwnershipRequest(self.max_columns if member.trains else 0) for member in members}
        self.genesis = genesis_manifest(self.rules, root_of(self.state), members, wishes)
        self.judge = Judge(self.rules, self.genesis, self.state)
        self.judge.liars = set(self.liars)
        for member in self.genesis.members:
            self._add(member.peer, member.incarnation, member.link_class, not member.trains)

    def add_organiser(self, keeps_states: bool, name: PeerId = ORGANISER, starts: bool = True) -> SimPeer:
        """A machine that has the organiser's key: it looks on, and renews."""
        disk = Disk(self.genesis, self.state, self.next_incarnation(), keeps_states=keeps_states)
        peer = self.peers[name] = SimPeer(self, name, disk, 0)
        peer.intent, peer.has_key = Intent(), True
        if starts:
            peer.start()
        return peer

    def members_up(self) -> list[SimPeer]:
        """Peers whose process runs, but for the organiser's."""
        return [peer for peer in self.up() if not peer.has_key]

    # ---------------------------------------------------------------- time

    def at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._queue, (time, next(self._tie), action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, action, *arguments)

    def step(self) -> bool:
        """Carries out the next event; False when there is none."""
        if not self._queue:
            return False
        self.now, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)
        return True

    def next_incarnation(self) -> int:
        return next(self._incarnations)

    def dies_before(self, peer: SimPeer, action: do.Action) -> bool:
        """Whether this action is the one that a planned crash waits for."""
        planned = peer.crash_after
        if type(action) not in planned:
            return False
        planned[type(action)] -= 1
        return planned[type(action)] == 0

    def machine_of(self, name: PeerId) -> type[Consensus]:
        """What decides for a peer."""
        return self.liars.get(name, self.core_class)

    # ---------------------------------------------------------------- peers and faults

    def _add(self, name: PeerId, incarnation: int, link_class: int, serving: bool = False) -> None:
        disk = Disk(self.genesis, self.state, incarnation)
        self.peers[name] = SimPeer(self, name, disk, link_class, serving)
        self.peers[name].start()

    def join(self, serving: bool = False) -> None:
        """One more peer comes, with an empty disk."""
        name = PeerId(f"{'s' if serving else 'p'}{len(self.peers)}")
        self.changed(f"{name} joins")
        self._add(name, self.next_incarnation(), self.random.choice((0, 0, 1)), serving)

    def changed(self, what: str = "") -> None:
        """A fault or its end: the time allowed for the next commit starts again."""
        self.last_change = self.now
        self.tell(what)

    def tell(self, what: str) -> None:
        """A line of the story, where somebody listens."""
        if self.say is not None:
            self.say(f"{self.now:8.2f} {what}")

    def up(self) -> list[SimPeer]:
        """Peers whose process runs."""
        return [peer for peer in self.peers.values() if peer.core is not None]

    def available(self, asker: PeerId, other: PeerId) -> SimPeer | None:
        """`other`, where `asker` can fetch from it now."""
        peer = self.peers.get(other)
        if peer is None or peer.core is None or peer.asleep_until > self.now or not self.network.reaches(asker, other):
            return None
        return peer

    # ---------------------------------------------------------------- progress

    def newest(self) -> Manifest:
        """The manifest that goes before all others that a running peer stands on with its state."""
        tips = [peer.disk.tip for peer in self.up() if peer.disk.keeps_states]
        return max(tips, key=place_of, default=self.genesis)

    def is_one_history(self) -> bool:
        """Whether all who run, and do not leave, stand on one chain."""
        chains: list[list[Commit]] = [[], *(peer.disk.chain for peer in self.up())]
        longest = max(chains, key=lambda chain: place_of(chain[-1].manifest) if chain else (0, 0, b""))
        names = [manifest_hash(self.genesis), *(commit.certificate.manifest for commit in longest)]
        tips = [peer.disk.tip for peer in self.up() if not peer.intent.leaving]
        return all(tip.round < len(names) and names[tip.round] == manifest_hash(tip) for tip in tips)

    def note_commit(self, manifest: Manifest) -> None:
        """A peer adopted a commit: the first to do so, on the winning chain, ends a stall."""
        name = manifest_hash(manifest)
        if name in self._adopted or manifest_hash(self.newest()) != name:
            return
        self._adopted.add(name)
        _check_servers(self, manifest)
        _check_newcomers(self, manifest)
        self.result.rounds = manifest.round
        self.result.longest_stall = max(self.result.longest_stall, self.now - self.last_change)
        self.last_change = self.now

    def bound_seconds(self) -> float:
        """The longest that the next commit may take from now, if nothing else happens; see docs/protocol.md."""
        tip = self.newest()
        head, chosen = manifest_hash(tip), voters(tip)
        running = [p for p in self.up() if p.core is not None]
        able = [p for p in running if chosen.get(p.name) == p.disk.incarnation and not p.is_full]
        able = [peer for peer in able if peer.asleep_until <= self.now]
        if not any(self._would_train(peer) for peer in running):
            return float("inf")
        groups = Counter(self.network.groups.get(p.name, 0) for p in able)
        connected = max(groups.values(), default=0) >= Electorate(tuple(chosen), self.faults).quorum
        if not connected and not self.can_be_renewed():
            return float("inf")
        cores = [p.core for p in running if p.core is not None]
        pace = max((core.state.pace for core in cores), key=lambda pace: pace.deadline_seconds(0))
        view = max((c.state.round.vote.ballot for c in cores if c.tip_hash == head), default=0)
        training = max(p.round_seconds for p in running)
        # the node may have to step back first, and a round may begin anew, on the renewal
        wait = 0.0 if connected else 2 * self.rules.renew_after_seconds + 3 * training + 8 * self.fetch_seconds
        asking = pace.deadline_seconds(0)
        return wait + asking + 4 * pace.suspect_seconds + 3 * pace.deadline_seconds(view) + 4 * training

    def can_be_renewed(self) -> bool:
        """Whether the organiser's node runs, and reaches enough peers with a state that is not too old."""
        awake = [peer for peer in self.up() if not peer.is_full and peer.asleep_until <= self.now]
        nodes = [peer for peer in awake if peer.has_key]
        able = [peer for peer in awake if not peer.has_key and not peer.intent.leaving]
        return any(sum(self._may_name(node, peer) for peer in able) >= self.rules.fewest_renewed for node in nodes)

    def _may_name(self, node: SimPeer, peer: SimPeer) -> bool:
        oldest = node.disk.tip.round - MOST_ROUNDS_BACK
        is_near = node.disk.keeps_states or peer.disk.tip.round >= oldest
        return is_near and self.network.reaches(node.name, peer.name)

    def _would_train(self, peer: SimPeer) -> bool:
        """Whether rounds are made for this peer's sake; those who only serve keep the state as it is."""
        return peer.trains and not peer.is_gone_for_good and peer.asleep_until <= self.now

    def check_stall(self) -> None:
        """Raises Violation when the next commit is late. Notes when there can be none any more."""
        waited = self.now - self.last_change
        bound = self.bound_seconds()
        asleep = any(peer.asleep_until > self.now for peer in self.up())
        is_over = bound == float("inf") and waited > EXTINCT_SECONDS and not asleep
        self.result.extinct = self.now > self.mended_at and is_over
        if waited > bound:
            raise Violation("stall", f"no commit for {waited:.1f} s, at most {bound:.1f} s are allowed")
        if self.now - self.mended_at > MOST_BOUNDS * bound:
            raise Violation("apart", f"{self.now - self.mended_at:.1f} s after the last fault not all stand together")
        if bound < float("inf"):
            self.result.tightest_bound = max(self.result.tightest_bound, waited / bound)


def _check_servers(world: World, manifest: Manifest) -> None:
    """Checks that peers that only serve are not named as trainers, nor trainers as servers."""
    wrong = [m.peer for m in manifest.members if m.trains == world.peers[m.peer].intent.serving]
    if wrong:
        raise Violation("serving", f"round {manifest.round} takes {wrong} for what they are not")


def _check_newcomers(world: World, manifest: Manifest) -> None:
    """Who is named for the first time has caught up."""
    known = {(m.peer, m.incarnation) for m in world.judge.known[manifest.parent].manifest.members}
    for member in manifest.members:
        peer = world.peers[member.peer]
        is_it = peer.core is not None and peer.disk.incarnation == member.incarnation
        stood = peer.disk.tip.round
        if (member.peer, member.incarnation) not in known and is_it and stood < manifest.round - 1:
            raise Violation("newcomer", f"round {manifest.round} names {member.peer}, who is at {stood}")
