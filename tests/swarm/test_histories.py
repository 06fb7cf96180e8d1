"""A quorum, or the organiser; and the history that counted most: scenes with real processes.

The same and more on the simulator, with twenty rounds and days in them: tests/consensus/test_histories.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from spes_p2p import failpoints
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import QUORUM, Commit
from spes_p2p.consensus.place import place_of
from spes_p2p.ids import PeerId, short
from spes_p2p.observe.events import Round, Step
from spes_p2p.peer.kept_invite import kept_invite
from spes_p2p.quickstart.processes import BOOTSTRAP
from spes_p2p.swarm.invite import decode
from spes_p2p.wire import unpack
from tests.simulation.faults import FREEZE, HUSH, KILL, SLOW, WHILE_ARMED, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import MICRO, local_swarm, peer_id_of
from tests.swarm.namespaces import Lab, may_make_namespaces

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]
in_a_lab = pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2 to make network namespaces")
AGREED = ("swarm.renew_after_seconds=2", "swarm.experts_per_peer=4")
FRUGAL = ("eval.every_rounds=0", "output.checkpoint_every_rounds=5")
FIVE = ("p0", "p1", "p2", "p3", "p4")
GAP_SECONDS = 6.0
"""Twenty heartbeats: as 20 s are with heartbeats of a second."""
STEP = Fault(failpoints.INNER_STEP, SLOW, times=0, seconds=0.08)
"""Slept, so that a machine with few cores has time for them all."""
SLOWER = {name: Fault(failpoints.INNER_STEP, SLOW, name, times=WHILE_ARMED, seconds=0.4) for name in FIVE}
FEW_STEPS = 4
"""Of the eight of a round."""
HIDES = [Fault("precommit", HUSH, "p0", round, seconds=600.0, after=failpoints.PERSISTED) for round in (1, 2)]
"""Its words get nowhere from its last vote on, once the one before has gone out: it alone completes the certificate."""
HAS_HIDDEN = [Fault(failpoints.PUBLISHED, KILL, "p0", round, after=HUSH) for round in (1, 2)]
RENEWED = Fault(failpoints.APPLIED, FREEZE, "p1")


class Scene:
    """A swarm of which all peers have made a round, and what a person would do in it."""

    def __init__(self, swarm: FaultySwarm, tokens: Path, names: Sequence[str], *node: str) -> None:
        self.swarm, self.tokens = swarm, tokens
        self.agreed = [*MICRO, *AGREED, f"swarm.min_peers={len(names)}"]
        self.up: list[str] = []
        self._told: dict[str, int] = {}
        swarm.bootstrap("tiny", tokens, [*self.agreed, *node])
        self.start(*names)
        swarm.wait_for_round(1, names)
        self.ids = {name: PeerId(peer_id_of(swarm.processes[name])) for name in names}

    def start(self, *names: str) -> None:
        faults = [STEP, *SLOWER.values(), *HIDES, *HAS_HIDDEN, RENEWED]
        for name in names:
            self.swarm.peer(name, self.tokens, FRUGAL, faults=faults)
            self.up.append(name)

    def kill(self, *names: str) -> None:
        """All at once."""
        self.up = [name for name in self.up if name not in names]
        for name in names:
            self.swarm.processes[name].send(signal.SIGKILL)
        for name in names:
            assert self.swarm.processes[name].wait(30.0) == -signal.SIGKILL

    def freeze(self, *names: str) -> None:
        for name in names:
            self.swarm.processes[name].freeze()

    def thaw(self, *names: str) -> None:
        for name in names:
            self.swarm.processes[name].thaw()

    def only_slow(self, *names: str) -> None:
        """These take long for a step, and nobody else does."""
        self.swarm.armed_faults.disarm()
        for name in names:
            self.swarm.armed_faults.arm(SLOWER[name])

    def strikes(self, fault: Fault, peer: str) -> None:
        """Until that has happened to it."""
        struck = self.swarm.armed_faults.victim
        fine = (None, -signal.SIGKILL) if fault.action == KILL else (None,)
        self.swarm.wait_until(lambda: struck(fault) is not None, f"{fault.action} of {peer}", self.up, fine=fine)
        if fault.action == KILL:
            self.kill(peer)

    # ---------------------------------------------------------------- looking on

    def until(self, found: Callable[[], bool], what: str) -> None:
        self.swarm.wait_until(found, what, self.up)

    def tip(self, name: str) -> Manifest:
        return self.newest(name).manifest

    def newest(self, name: str) -> Commit:
        for _ in range(100):
            rounds = (self.swarm.folder / name / "run" / "chain").glob("*.commit")
            with suppress(FileNotFoundError):  # it goes over to another history in this moment
                return unpack(Commit, max(rounds).read_bytes())
        raise AssertionError(f"the chain of {name} cannot be read")

    def is_on(self, manifest: Manifest, *names: str) -> bool:
        """Whether the chains of all of these have it."""
        files = (self.swarm.folder / name / "run" / "chain" / f"{manifest.round:08d}.commit" for name in names)
        try:
            return all(unpack(Commit, file.read_bytes()).manifest == manifest for file in files)
        except FileNotFoundError:
            return False

    def renewals(self, name: str) -> int:
        """That it has applied."""
        return sum(event.commit == "renewal" for event in self.swarm.processes[name].rounds())

    def voters(self, name: str) -> set[str]:
        """Who may vote on the child of its tip."""
        named = {member.peer for member in electors(self.tip(name).members)}
        return {one for one, peer in self.ids.items() if peer in named}

    def all_have_lost(self, *names: str, more_than: Mapping[str, int] | None = None) -> None:
        """Of what was counted; until their events say so, too."""
        before = more_than or dict.fromkeys(names, 0)
        self.until(lambda: all(self.lost_tokens(name) > before[name] for name in names), "they say what is lost")

    def lost_tokens(self, name: str) -> int:
        return sum(event.lost_tokens for event in self.swarm.processes[name].rounds())

    def listen(self) -> None:
        """`said` begins here."""
        self._told = {name: len(process.output()) for name, process in self.swarm.processes.items()}

    def said(self, name: str) -> str:
        """What its screen has said since `listen`."""
        return " ".join(self.swarm.processes[name].output()[self._told[name] :].split())

    def kill_in_training(self, *names: str) -> None:
        """These at once, when everybody trains for the same round: none of them has told the others that it is ready.

        Steps are long until then.
        """
        self.only_slow(*self.up)
        self.until(lambda: are_same(map(self.has_begun, self.up)), "all begin a round")
        self.kill(*names)
        self.only_slow()

    def has_begun(self, name: str) -> int | None:
        """The round that it trains for, where it has made no more than a few steps of it."""
        process = self.swarm.processes[name]
        process.read_events()
        at = max(at for at, (_, event) in enumerate(process.seen) if isinstance(event, Round))
        steps = sum(isinstance(event, Step) for _, event in process.seen[at:])
        last = process.seen[at][1]
        assert isinstance(last, Round)
        return last.round + 1 if 1 <= steps <= FEW_STEPS else None

    def more_rounds(self, more: int, *names: str) -> None:
        goals = {name: self.tip(name).round + more for name in names}
        self.until(lambda: all(self.tip(name).round >= goals[name] for name in names), f"{more} more rounds")

    def all_agree(self) -> Manifest:
        """Until all who are up stand on one chain that grows; its newest manifest that all of them have."""
        goal = max(self.tip(name).round for name in self.up) + 2
        found: list[Manifest] = []

        def agree() -> bool:
            tip = min((self.tip(name) for name in self.up), key=lambda one: one.round)
            found[:] = [tip]
            return tip.round >= goal and self.is_on(tip, *self.up)

        self.until(agree, "one chain of all that grows")
        return found[0]

    def all_are_counted(self, *names: str, by: str) -> None:
        """Until rounds have counted work of each."""
        found: set[PeerId] = set()
        wanted = {self.ids[name] for name in names}

        def are_counted() -> bool:
            found.update(entry.peer for entry in self.tip(by).roster)
            return wanted <= found

        self.until(are_counted, f"work of {', '.join(names)}")

    def all_vote(self, *names: str) -> None:
        self.until(lambda: all(self.voters(name) == {*names} for name in names), f"the votes of {', '.join(names)}")


def are_same(found: Iterable[int | None]) -> bool:
    return len(rounds := {*found}) == 1 and None not in rounds


@contextmanager
def lab_scene(folder: Path, tokens: Path, names: Sequence[str]) -> Iterator[tuple[Scene, Lab]]:
    """Everybody hangs on one of two switches that nothing joins: at first all on "here"."""
    with ExitStack() as stack:
        lab = Lab(stack, switches=("here", "there"))
        hosts = {name: lab.host(name, "here", f"11.0.0.{10 + at}") for at, name in enumerate((BOOTSTRAP, *names))}
        swarm = stack.enter_context(local_swarm(folder, hosts))
        yield Scene(swarm, tokens, names), lab


# ---------------------------------------------------------------- three of five at once


def test_three_of_five_are_killed_at_once(tmp_path: Path, tokens: Path) -> None:
    """With the node they go on by a renewal; without it they wait for the three, or for the key on another machine."""
    gone, left = FIVE[:3], FIVE[3:]
    with local_swarm(tmp_path) as swarm:
        scene = Scene(swarm, tokens, FIVE)
        scene.all_vote(*FIVE)
        scene.kill_in_training(*gone)
        counted = max((scene.tip(name) for name in FIVE), key=place_of)
        scene.until(lambda: scene.renewals("p3") == 1, "a renewal")
        newest = scene.all_agree()
        assert scene.is_on(counted, *left)
        assert newest.tokens > counted.tokens
        scene.start(*gone)
        scene.all_are_counted(*gone, by="p3")
        scene.all_vote(*FIVE)

        swarm.processes[BOOTSTRAP].end()
        scene.listen()
        scene.kill_in_training(*gone)
        they_wait_and_say_for_whom(scene, gone, left)
        stood = scene.tip("p3")
        scene.start(*gone)
        assert scene.all_agree().tokens > stood.tokens
        assert scene.is_on(stood, *FIVE)
        assert scene.renewals("p3") == 1
        scene.all_vote(*FIVE)

        scene.listen()
        scene.kill(*gone)
        scene.until(lambda: "organiser's node runs" in scene.said("p3"), "the screen says so")
        stood = scene.tip("p3")
        met = ["--initial-peers", address_of(swarm, "p3")]
        node = swarm.node("elsewhere", tokens, [*met, *scene.agreed], has_key=True)
        scene.up.append(node.name)
        scene.until(lambda: scene.renewals("p3") == 2, "a renewal by the node elsewhere")
        scene.up.remove(node.name)
        assert scene.all_agree().tokens > stood.tokens
        assert scene.is_on(stood, *left)
        assert sum(map(scene.lost_tokens, FIVE)) == 0


def address_of(swarm: FaultySwarm, name: str) -> str:
    """One at which a peer can be reached."""
    me = peer_id_of(swarm.processes[name])
    return next(one for one in decode(kept_invite(swarm.folder / name)).addresses if one.endswith(f"/p2p/{me}"))


def they_wait_and_say_for_whom(scene: Scene, gone: Sequence[str], left: Sequence[str]) -> None:
    missing = [short(scene.ids[name]) for name in gone]
    helps = ("3 of 5 electors", *missing, "organiser's node runs", "spes-p2p export", "spes-p2p bootstrap --init-from")
    scene.until(lambda: all("needs 3 of 5" in scene.said(name) for name in left), "their screens say that they wait")
    assert [words for words in helps for name in left if words not in scene.said(name)] == []
    word = kept_invite(scene.swarm.folder / left[0])
    said: list[str] = []

    def says_so() -> bool:
        said[:] = [" ".join(scene.swarm.ask("status", word).split())]
        return "WAITING" in said[0]

    scene.until(says_so, "the status says that it waits")
    assert [words for words in helps if words not in said[0]] == []


# ---------------------------------------------------------------- apart, and back


@in_a_lab
def test_the_node_and_a_minority_are_cut_off_and_back(tmp_path: Path, tokens: Path) -> None:
    """Who counted more stays, whoever signed for it: the quorum first, the minority the second time."""
    minority, quorum = FIVE[:2], FIVE[2:]
    with lab_scene(tmp_path, tokens, FIVE) as (scene, lab):
        for quicker, slower in ((quorum, minority), (minority, quorum)):
            scene.all_vote(*FIVE)
            lost = {name: scene.lost_tokens(name) for name in FIVE}
            scene.only_slow(*slower)
            for name in (BOOTSTRAP, *minority):
                lab.move(name, "there")
            cut = min((scene.tip(name) for name in FIVE), key=lambda one: one.round)
            scene.until(partial(has_counted_more, scene, quicker[0], slower[0], cut.round + 3), "who is quick has more")
            stays = scene.tip(quicker[0])
            for name in (BOOTSTRAP, *minority):
                lab.move(name, "here")
            scene.all_agree()
            assert scene.is_on(stays, *FIVE)
            scene.all_have_lost(*slower, more_than=lost)
            assert all(scene.lost_tokens(name) == lost[name] for name in quicker)
        scene.only_slow()
        scene.all_vote(*FIVE)


def has_counted_more(scene: Scene, quick: str, slow: str, round: int) -> bool:
    """Both have come to `round`, too."""
    more, less = scene.tip(quick), scene.tip(slow)
    return min(more.round, less.round) >= round and more.counted > less.counted


@in_a_lab
def test_laptops_that_are_closed_and_wake_without_a_network(tmp_path: Path, tokens: Path) -> None:
    """Two of three, a quorum of where they stood; then a sole elector. Others have counted more meanwhile."""
    three = FIVE[:3]
    with lab_scene(tmp_path, tokens, three) as (scene, lab):
        scene.all_vote(*three)
        scene.freeze("p0", "p1")
        for name in ("p0", "p1"):
            lab.move(name, "there")  # before anything that others decide waits in their sockets
        scene.until(lambda: scene.voters("p2") == {"p2"}, "p2 goes on alone")
        scene.only_slow("p0", "p1")
        scene.more_rounds(5, "p2")
        stood = {name: scene.tip(name).round for name in ("p0", "p1")}
        scene.thaw("p0", "p1")
        scene.until(lambda: all(scene.tip(name).round > at for name, at in stood.items()), "they commit by themselves")
        assert scene.newest("p0").certificate.kind == QUORUM
        day = scene.tip("p2")
        assert not scene.is_on(day, "p0")
        for name in ("p0", "p1"):
            lab.move(name, "here")
        scene.all_agree()
        assert scene.is_on(day, *three)
        scene.all_have_lost("p0", "p1")
        assert scene.lost_tokens("p2") == 0

        scene.only_slow("p0")
        lost = {"p0": scene.lost_tokens("p0")}
        scene.all_vote(*three)
        scene.freeze("p1", "p2")
        scene.until(lambda: scene.voters("p0") == {"p0"}, "p0 goes on alone")
        scene.freeze("p0")
        lab.move("p0", "there")
        scene.thaw("p1", "p2")
        sole = scene.tip("p0")
        scene.until(lambda: scene.tip("p2").counted > sole.counted, "the others have counted more")
        scene.more_rounds(5, "p2")
        scene.thaw("p0")
        scene.more_rounds(1, "p0")
        assert not scene.is_on(scene.tip("p0"), "p2")
        others = scene.tip("p2")
        lab.move("p0", "here")
        scene.all_agree()
        assert scene.is_on(others, *three)
        scene.all_have_lost("p0", more_than=lost)
        assert scene.lost_tokens("p2") == 0
        scene.all_vote(*three)


# ---------------------------------------------------------------- two


def test_a_certified_round_that_one_of_two_never_saw(tmp_path: Path, tokens: Path) -> None:
    """It is back before the renewal's first round: it stays; or after it: what counted more stays. And back no more."""
    with local_swarm(tmp_path) as swarm:
        scene = Scene(swarm, tokens, ("p0", "p1"))
        hidden = hide_a_round(scene, 0)
        swarm.armed_faults.arm(RENEWED)
        scene.strikes(RENEWED, "p1")  # it stops there, until p0 has gone on
        scene.start("p0")
        scene.more_rounds(3, "p0")
        scene.thaw("p1")
        scene.all_agree()
        assert scene.is_on(hidden, "p0", "p1")
        assert scene.lost_tokens("p0") == 0
        scene.all_vote("p0", "p1")

        lost = {name: scene.lost_tokens(name) for name in ("p0", "p1")}
        hidden = hide_a_round(scene, 1)
        scene.until(lambda: scene.tip("p1").round > hidden.round + 2, "p1 goes on")
        others = scene.tip("p1")
        assert place_of(others) > place_of(hidden)
        scene.start("p0")
        scene.all_agree()
        assert scene.is_on(others, "p0", "p1")
        assert not scene.is_on(hidden, "p0")
        scene.all_have_lost("p0", more_than=lost)
        assert scene.lost_tokens("p1") == lost["p1"]
        scene.all_vote("p0", "p1")

        swarm.processes[BOOTSTRAP].end()
        scene.listen()
        scene.kill("p0")  # for good
        scene.until(lambda: "needs 2 of 2 electors" in scene.said("p1"), "p1 says what helps")
        text = scene.said("p1")
        assert all(words in text for words in ("organiser's node", "spes-p2p export", "bootstrap --init-from"))
        model = tmp_path / "model"
        swarm.processes["p1"].send(signal.SIGTERM)
        assert swarm.processes["p1"].wait(30.0) == 0
        swarm.ask("export", "--checkpoint", str(swarm.folder / "p1"), "--output", str(model))
        node = swarm.node("successor", tokens, [*scene.agreed, "--init-from", str(model)], has_key=False)
        swarm.wait_until(lambda: "spes-p2p join spes1" in node.output(), "its successor", [node.name])


def hide_a_round(scene: Scene, time: int) -> Manifest:
    """p0 closes with a certified round that p1 never saw."""
    scene.swarm.armed_faults.arm(HAS_HIDDEN[time])
    scene.swarm.armed_faults.arm(HIDES[time])
    scene.strikes(HAS_HIDDEN[time], "p0")
    hidden = scene.tip("p0")
    assert scene.newest("p0").certificate.kind == QUORUM
    assert not scene.is_on(hidden, "p1")
    return hidden


# ---------------------------------------------------------------- one after the other


def test_one_trainer_after_another_beside_a_node_that_serves(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        scene = Scene(swarm, tokens, ("p0",), "--serve")
        for before, name in (("p0", "p1"), ("p1", "p2")):
            if name == "p1":
                swarm.processes[before].send(signal.SIGTERM)
                assert swarm.processes[before].wait(30.0) == 0
                scene.up.remove(before)
            else:
                scene.kill(before)
            stood = scene.tip(before)
            time.sleep(GAP_SECONDS)
            scene.start(name)
            swarm.wait_for_round(stood.round + 3, [name])
            assert scene.is_on(stood, name)
            me = peer_id_of(swarm.processes[name])
            assert me in {entry.peer for entry in scene.tip(name).roster}
        assert sum(map(scene.lost_tokens, ("p0", "p1", "p2"))) == 0
