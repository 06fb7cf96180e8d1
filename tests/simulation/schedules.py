"""Seeded schedules of faults: who crashes when and comes back how, who is cut off, who sleeps, leaves, joins.

`plan_run(seed)` is a whole run: its size, its weather and its faults. Faults are spread over the first seconds; then
the world heals (`end_faults`) and must make progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.electorate import Electorate
from spes_p2p.consensus.machine import Consensus
from tests.simulation.judge import voters
from tests.simulation.sim import ORGANISER, SECOND, Weather, World
from tests.simulation.sim_peer import SimPeer

FAULT_SECONDS = 6.5
CRASH_POINTS: tuple[type[do.Action], ...] = (
    do.Send, do.Persist, do.Persist, do.Persist, do.Adopt, do.Build, do.Verify, do.Reduce, do.Fetch, do.CloseTraining,
)  # fmt: skip
"""Actions before which a crash may come; each vote begins with a Persist."""

SERVERS = (0, 0, 0, 0, 0, 0, 1, 1, 1, 2)
"""How many of the first members train nothing, each as likely as another."""

WITH_NODE = 0.8
"""How likely the organiser has a machine for the run; it may be off."""

Fault = Callable[[World, random.Random], None]


@dataclass(frozen=True)
class Kind:
    """A kind of schedule: its faults, drawn `at_least` to `at_most` times; all is mended after `mended_seconds`.

    `slowness` scales how long peers train, and `most_founders` bounds how many they are: long schedules need no more
    rounds than short ones, nor as many messages at once.
    """

    name: str
    faults: tuple[Fault, ...]
    at_least: int = 1
    at_most: int = 2
    weight: int = 1
    mended_seconds: float = FAULT_SECONDS + 1.0
    slowness: float = 1.0
    most_founders: int = 7


def plan_run(seed: int, core_class: type[Consensus] = Consensus, only: str | None = None) -> tuple[World, Kind]:
    """The world of a seed, with all faults in its queue; `only` names the kind of schedule, else it is drawn."""
    chance = random.Random(seed ^ 0x5EED)
    kinds = [kind for kind in KINDS if only in (None, kind.name)]
    kind = chance.choices(kinds, [kind.weight for kind in kinds])[0]
    founders = chance.choice((3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7))
    founders = min(founders, kind.most_founders)
    weather = Weather(
        longest_delay=chance.choice((0.1, 0.3, 1.0)),
        loss=chance.choice((0.0, 0.0, 0.02, 0.1)),
        doubling=chance.choice((0.0, 0.0, 0.05)),
        broken_transfer=chance.choice((0.0, 0.0, 0.05, 0.2)),
    )
    columns, replicas = chance.choice((2, 3, founders)), chance.choice((1, 1, 2))
    servers = random.Random(seed ^ 0x5E12).choice(SERVERS)  # apart: it changes no other draw
    world = World(seed, max(2, founders - servers), columns, replicas, weather, core_class, kind.slowness, servers)
    nodes = random.Random(seed ^ 0x0DE)  # apart: it changes no other draw
    if nodes.random() < WITH_NODE:
        world.add_organiser(keeps_states=nodes.random() < 0.5, starts=nodes.random() < 0.8)
    for _ in range(chance.randint(kind.at_least, kind.at_most)):
        fault = chance.choice(kind.faults)
        world.at(chance.uniform(0.2, FAULT_SECONDS), fault, world, random.Random(chance.getrandbits(32)))
    return world, kind


def end_faults(world: World, chance: random.Random) -> None:
    """Everything heals, some of those who are down come back, and somebody who can vote is there."""
    world.mended_at = world.now
    world.network.heal()
    world.weather.broken_transfer = 0.0
    world.weather.loss = min(world.weather.loss, 0.05)
    for peer in world.peers.values():
        peer.crash_after.clear()
        peer.at_next_vote = peer.at_next_proposal = None
        peer.restart_plan = None
        if peer.core is None and not peer.is_gone_for_good and chance.random() < 0.5:
            peer.start()
    _ensure_elector(world, chance)
    _ensure_trainer(world, chance)


def _ensure_trainer(world: World, chance: random.Random) -> None:
    """Where only those are left who serve, no round is made: that is an end, too."""
    able = [peer for peer in world.peers.values() if peer.trains and not peer.is_gone_for_good]
    if able and not any(peer.core is not None for peer in able):
        chance.choice(able).start()
    world.result.extinct |= not able


def _ensure_elector(world: World, chance: random.Random) -> None:
    """Without a quorum of the newest manifest's electors the organiser's node must be there."""
    chosen = voters(world.newest())
    able = [p for p in world.peers.values() if chosen.get(p.name) == p.disk.incarnation and not p.is_gone_for_good]
    down = [peer for peer in able if peer.core is None]
    if len(able) - len(down) >= Electorate(tuple(chosen), world.faults).quorum or world.can_be_renewed():
        return
    node = world.peers.get(ORGANISER)
    if node is not None and node.core is None and (not down or chance.random() < 0.5):
        down = [node]
    if not down:
        world.result.extinct = True
        return
    chance.choice(down).start()
    _ensure_elector(world, chance)


# -------------------------------------------------------------------- faults


def _victim(world: World, chance: random.Random) -> SimPeer | None:
    up = [peer for peer in world.up() if not peer.is_gone_for_good]
    return chance.choice(up) if up else None


def _leader(world: World, chance: random.Random) -> SimPeer | None:
    """The leader of the present ballot, where somebody knows one."""
    for peer in world.up():
        if peer.core is not None and peer.core.state.round.order:
            order, view = peer.core.state.round.order, peer.core.state.round.vote.ballot
            leader = world.peers[order[view % len(order)]]
            if leader.core is not None and not leader.is_gone_for_good:
                return leader
    return _victim(world, chance)


def _plan_restart(peer: SimPeer, chance: random.Random, amnesia: float, death: float) -> None:
    """What follows the next crash: nothing, a restart with the disk, or one without."""
    fate, delay = chance.random(), chance.choice((0.2, 2.0, 8.0, 20.0))

    def restart() -> None:
        peer.restart_plan = None
        if fate < death:
            return
        if fate < death + amnesia:
            peer.wipe()
        peer.world.result.restarts += 1
        peer.world.after(delay, _come_back, peer)

    peer.restart_plan = restart


def _come_back(peer: SimPeer) -> None:
    if not peer.is_gone_for_good:
        peer.world.changed()
        peer.start()


def crash(world: World, chance: random.Random, amnesia: float = 0.0, death: float = 0.2) -> None:
    """A peer dies now, or at one of its next actions."""
    peer = _leader(world, chance) if chance.random() < 0.5 else _victim(world, chance)
    if peer is None:
        return
    _plan_restart(peer, chance, amnesia, death)
    peer.refuses = chance.random() < 0.7
    if chance.random() < 0.4:
        peer.crash()
    else:
        peer.crash_after[chance.choice(CRASH_POINTS)] = chance.choice((0, 0, 0, 1, 2, 5))


def crash_with_amnesia(world: World, chance: random.Random) -> None:
    crash(world, chance, amnesia=0.7, death=0.1)


def crash_of_many(world: World, chance: random.Random) -> None:
    """Most peers die at about the same time; some come back much later, or never."""
    up = world.up()
    for peer in chance.sample(up, k=(len(up) + 1) // 2):
        _plan_restart(peer, chance, amnesia=0.2, death=0.5)
        peer.refuses = chance.random() < 0.7
        world.after(chance.random(), peer.crash)


def quick_restart(world: World, chance: random.Random) -> None:
    """A peer dies around a vote and is back at once, with its disk."""
    peer = _victim(world, chance)
    if peer is not None:
        peer.restart_plan = lambda: world.after(0.1, _come_back, peer)
        peer.crash_after[chance.choice((do.Send, do.Persist, do.Adopt))] = chance.choice((0, 1, 2, 3))


def power_cut(world: World, chance: random.Random) -> None:
    """All die at once and come back with their disks."""
    for peer in world.up():
        if not peer.is_gone_for_good:
            peer.restart_plan = None
            peer.crash()
            world.after(chance.uniform(0.5, 3.0), _come_back, peer)


def cut(world: World, chance: random.Random, longest: float = 8.0) -> None:
    """The network falls apart into two or three parts for a while."""
    parts = chance.choice((2, 2, 3))
    world.network.partition({name: chance.randrange(parts) for name in world.peers})
    world.after(chance.uniform(1.0, longest), world.network.heal)


def quorum_gone(world: World, chance: random.Random) -> None:
    """More than half of the electors die at once; some of them come back, before a renewal or long after it."""
    chosen = [world.peers[name] for name in voters(world.newest())]
    up = [peer for peer in chosen if peer.core is not None and not peer.is_gone_for_good]
    for peer in chance.sample(up, k=min(len(up), len(chosen) // 2 + 1)):
        _plan_restart(peer, chance, amnesia=0.1, death=0.4)
        peer.crash()
        if chance.random() < 0.4 and peer.restart_plan is None:
            world.after(chance.uniform(15.0, 60.0), _come_back, peer)


def node_cut_off(world: World, chance: random.Random) -> None:
    """The organiser's node and some peers reach nobody else for a while: both parts may go on, and meet again."""
    apart = {name for name in world.peers if name in (ORGANISER, SECOND) or chance.random() < 0.35}
    world.network.partition(dict.fromkeys(apart, 1))
    met = chance.uniform(25.0, 70.0)
    world.after(met, world.network.heal)
    for _ in range(chance.choice((0, 1, 1, 2))):
        trouble = chance.choice((crash, quick_restart, isolate, cut, sleep, join, power_cut))
        world.after(met + chance.uniform(-3.0, 12.0), trouble, world, chance)


def node_restored(world: World, chance: random.Random) -> None:
    """The organiser's node comes back with an old disk."""
    node = world.peers.get(ORGANISER)
    if node is None or node.backup is not None:
        return
    node.back_up()

    def strike() -> None:
        node.restart_plan = None
        node.crash()
        node.roll_back()
        world.after(chance.choice((0.1, 3.0)), _come_back, node)

    world.after(chance.uniform(5.0, 30.0), strike)


def second_node(world: World, chance: random.Random) -> None:
    """The organiser's key is started on another machine, too; at times where the first is not reached."""
    if SECOND in world.peers:
        return
    world.changed("the key starts on another machine")
    world.add_organiser(chance.random() < 0.5, SECOND)
    if chance.random() < 0.5:
        world.network.partition({name: chance.randrange(2) for name in world.peers})
        world.after(chance.uniform(25.0, 60.0), world.network.heal)


def slow_states(world: World, chance: random.Random) -> None:
    """From now on states take longer to come here than a round."""
    world.fetch_seconds = chance.choice((1.0, 4.0, 8.0))


def node_flickers(world: World, chance: random.Random) -> None:
    """The organiser's node, or a peer, is off and on again."""
    peer = world.peers.get(ORGANISER) if chance.random() < 0.7 else _victim(world, chance)
    if peer is not None:
        peer.restart_plan = lambda: world.after(chance.uniform(1.0, 25.0), _come_back, peer)
        peer.crash()


def long_cut(world: World, chance: random.Random) -> None:
    """Long enough that the organiser renews; sometimes electors change sides meanwhile."""
    world.network.partition({name: chance.randrange(2) for name in world.peers})
    if chance.random() < 0.5:
        world.after(chance.uniform(60.0, 80.0), cut, world, chance)


def split_and_meet(world: World, chance: random.Random) -> None:
    """The parts that can go on do, for several rounds, then meet; while peers go over there is more trouble."""
    parts = chance.choice((2, 2, 2, 3))
    world.network.partition({name: chance.randrange(parts) for name in world.peers})
    met = chance.uniform(75.0, 105.0)
    world.after(met, world.network.heal)
    for _ in range(chance.choice((0, 1, 1, 2))):
        trouble = chance.choice((crash, quick_restart, isolate, cut, sleep, join, power_cut))
        world.after(met + chance.uniform(-3.0, 12.0), trouble, world, chance)


def lone_commit(world: World, chance: random.Random) -> None:
    """One peer reaches nobody for long, is heard for a moment or longer, and is cut off or dies."""
    peer = _victim(world, chance)
    if peer is None:
        return
    away = chance.uniform(62.0, 100.0)
    world.network.partition({peer.name: 1})
    world.after(away, world.network.heal)
    heard = away + chance.choice((0.3, 1.5, 4.0, 15.0))
    fate = chance.random()
    if fate < 0.4:
        world.after(heard, peer.crash)
    elif fate < 0.6:
        world.after(heard, world.network.partition, {peer.name: 1})


def lone_vote(world: World, chance: random.Random) -> None:
    """As soon as somebody has accepted a proposal it reaches nobody for long."""
    voter = _victim(world, chance)
    if voter is None:
        return

    def trap() -> None:
        world.network.partition({voter.name: 1})
        world.after(chance.uniform(65.0, 90.0), world.network.heal)

    voter.at_next_vote = trap


def sleep_alone(world: World, chance: random.Random) -> None:
    """A peer that reaches nobody sleeps for longer than it would have to wait, and is reached again soon after."""
    peer = _victim(world, chance)
    if peer is not None:
        world.network.partition({peer.name: 1})
        away, asleep = chance.uniform(8.0, 30.0), chance.uniform(40.0, 80.0)
        world.after(away, peer.sleep, asleep)
        world.after(away + asleep + chance.uniform(2.0, 12.0), world.network.heal)


def clock_back(world: World, chance: random.Random) -> None:
    """A peer dies, and its clock is behind when it comes back; at times without its disk."""
    peer = _victim(world, chance)
    if peer is not None:
        peer.clock_behind_seconds = chance.choice((2.0, 30.0, 3600.0))
        _plan_restart(peer, chance, amnesia=0.3, death=0.0)
        peer.crash()


def disk_back(world: World, chance: random.Random) -> None:
    """A peer dies, and comes back with a copy of its disk that was made a while ago."""
    peer = _victim(world, chance)
    if peer is None or peer.backup is not None:
        return
    peer.back_up()

    def strike() -> None:
        if peer.core is not None:
            peer.restart_plan = lambda: world.after(chance.choice((0.1, 3.0)), _come_back, peer)
            peer.crash()
            peer.roll_back()

    world.after(chance.uniform(0.1, 8.0), strike)


def isolate(world: World, chance: random.Random) -> None:
    """One peer reaches nobody for a while."""
    peer = _leader(world, chance) if chance.random() < 0.6 else _victim(world, chance)
    if peer is not None:
        world.network.partition({peer.name: 1})
        world.after(chance.choice((2.0, 6.0, 15.0)), world.network.heal)


def broken_links(world: World, chance: random.Random) -> None:
    """Some messages get through one way only, or not at all, for a while."""
    names = list(world.peers)
    share = chance.choice((0.3, 0.5, 0.7))
    links = [(a, b) for a in names for b in names if a != b and chance.random() < share]
    world.network.cut_links(links, chance.choice((2.0, 7.0, 12.0, 20.0)))


def broken_vote(world: World, chance: random.Random) -> None:
    """As soon as somebody accepts, votes stop getting through but for one peer, which may then know alone."""
    voter = chance.choice(world.up()) if world.up() else None
    if voter is None:
        return
    names = list(world.peers)
    knows = _leader(world, chance) if chance.random() < 0.6 else _victim(world, chance)
    seconds = chance.choice((5.0, 9.0, 15.0))
    reached = {knows.name} if knows is not None else set()
    mute = chance.random() < 0.8

    def trap() -> None:
        links = [(a, b) for a in names for b in names if a != b and (b not in reached or (mute and a in reached))]
        world.network.cut_links(links, chance.uniform(0.3, 2.0))
        world.network.cut_links([(a, b) for a, b in links if a in reached], seconds)

    voter.at_next_vote = trap


def hidden_commit(world: World, chance: random.Random) -> None:
    """The next leader's proposal gets through, its own vote and commit do not; a minority hears of neither for a while.

    So it may be the only one to know of the commit, and the others have to go on from what some of them accepted.
    """
    if any(peer.at_next_proposal is not None for peer in world.up()):
        return
    seconds, blind_seconds = chance.choice((9.0, 14.0, 25.0)), chance.choice((1.0, 4.0, 7.0))

    def spring(leader: SimPeer) -> None:
        others = [peer.name for peer in world.up() if peer is not leader]
        for peer in world.up():
            peer.at_next_proposal = None
        blind = chance.sample(others, k=min(len(others), chance.randint(1, max(1, len(others) // 2))))
        names = [*others, leader.name]
        world.network.cut_links([(a, b) for a in names for b in blind], blind_seconds)
        world.network.cut_links([(leader.name, b) for b in others], seconds)
        if chance.random() < 0.5:
            victim = world.peers[chance.choice(names)]
            victim.restart_plan = lambda: world.after(1.0, _come_back, victim)
            world.after(chance.uniform(0.1, 3.0), victim.crash)

    for peer in world.up():
        peer.at_next_proposal = partial(spring, peer)


def slow_leader(world: World, chance: random.Random) -> None:
    """A live leader whose messages are late: others take over from it, and then its old messages arrive."""
    peer = _leader(world, chance) if chance.random() < 0.8 else _victim(world, chance)
    if peer is not None:
        world.network.delay_words_of(peer.name, chance.choice((2.0, 6.0, 12.0)), chance.choice((8.0, 20.0, 60.0)))


def sleep(world: World, chance: random.Random) -> None:
    peer = _leader(world, chance) if chance.random() < 0.5 else _victim(world, chance)
    if peer is not None:
        peer.sleep(chance.choice((2.0, 8.0, 30.0, 120.0)))


def full_disk(world: World, chance: random.Random) -> None:
    peer = _leader(world, chance) if chance.random() < 0.5 else _victim(world, chance)
    if peer is not None:
        peer.fill_disk(chance.choice((2.0, 10.0, 40.0)))


def shared_disk(world: World, chance: random.Random) -> None:
    """A nearly full disk that others fill and free."""
    peer = _leader(world, chance) if chance.random() < 0.3 else _victim(world, chance)
    if peer is not None:
        peer.share_disk(chance.choice((3.0, 10.0, 40.0, 80.0)))


def leave(world: World, chance: random.Random) -> None:
    staying = [peer for peer in world.members_up() if not peer.intent.leaving]
    if len(staying) > 1 or (staying and chance.random() < 0.1):
        chance.choice(staying).leave()


def join(world: World, chance: random.Random) -> None:
    if len(world.peers) < 9:
        world.join(serving=world.has_servers and chance.random() < 0.25)


ALL = (crash, crash_with_amnesia, quick_restart, cut, isolate, sleep, full_disk, leave, join)
SLOW_BESIDE = (quick_restart, broken_vote, crash, full_disk, join, leave)
LEFT_ALONE = (lone_commit, lone_commit, lone_vote, sleep_alone)
IN_LONG_ROUNDS = (long_cut, lone_commit, crash, sleep)
KINDS = (
    Kind("calm", (join,), 0, 1),
    Kind("crash", (crash,), 1, 3, weight=4),
    Kind("votes", (quick_restart, quick_restart, isolate, crash, broken_links, broken_vote), 3, 6, weight=4),
    Kind("hidden", (hidden_commit,), 2, 2, weight=3, mended_seconds=22.0, slowness=2.0),
    Kind("links", (broken_links, broken_vote, broken_vote), 1, 3, weight=6),
    Kind("amnesia", (crash_with_amnesia,), 1, 2, weight=2),
    Kind("power", (power_cut, quick_restart), 1, 2),
    Kind("many", (crash_of_many,), 1, 1, weight=2),
    Kind("cuts", (cut, isolate), 1, 4, weight=2),
    Kind(
        "renewed",
        (quorum_gone, quorum_gone, crash_of_many, node_flickers, join),
        1,
        3,
        weight=3,
        mended_seconds=70.0,
        slowness=3.0,
        most_founders=5,
    ),
    Kind(
        "node cut",
        (node_cut_off, node_cut_off, slow_states, quorum_gone, crash),
        1,
        3,
        weight=3,
        mended_seconds=95.0,
        slowness=4.0,
        most_founders=5,
    ),
    Kind(
        "keys",
        (second_node, node_restored, quorum_gone, node_cut_off, disk_back),
        2,
        4,
        weight=2,
        mended_seconds=95.0,
        slowness=4.0,
        most_founders=5,
    ),
    Kind("long cut", (long_cut,), 1, 1, mended_seconds=95.0, slowness=8.0, most_founders=5),
    Kind("meeting", (split_and_meet,), 1, 1, mended_seconds=125.0, slowness=8.0, most_founders=5),
    Kind("alone", LEFT_ALONE, 1, 1, mended_seconds=125.0, slowness=25.0, most_founders=5),
    Kind("long rounds", IN_LONG_ROUNDS, 1, 3, mended_seconds=220.0, slowness=80.0, most_founders=5),
    Kind("clock", (clock_back, quick_restart), 1, 3),
    Kind("old disk", (disk_back,), 1, 2, slowness=2.0),
    Kind("sleep", (sleep,), 1, 3, slowness=6.0),
    Kind("slow leader", (*4 * (slow_leader,), *SLOW_BESIDE), 1, 4, mended_seconds=68.0, slowness=4.0),
    Kind("disk", (full_disk, *3 * (shared_disk,), quick_restart, isolate, join), 2, 5, slowness=2.0),
    Kind("members", (join, leave, leave), 1, 4, weight=2),
    Kind("mixed", ALL, 3, 7, weight=2),
)
