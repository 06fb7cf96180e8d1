"""A few peers, one round, and every step that could come next: what the exhaustive search walks through.

A state is small: the names of what each peer knows (`Local`), the messages under way, and how many faults are left. One
peer's step hangs on what it knows and on what comes to it alone, so it is worked out once, by the real `Consensus`, and
looked up wherever the same comes together again. Each step is judged as it is made. See docs/protocol.md, "What is
checked, and how", for what is left out of this world.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Member, leader_order
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.rules import RunRules, genesis_manifest
from spes_p2p.ids import PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.wire import pack
from tests.simulation.judge import Judge
from tests.simulation.sim_state import Disk, initial_state, root_of, run_rules
from tests.simulation.small_peer import Local, Setting, small_step
from tests.simulation.snapshots import Snapshots

LOSE, CRASH, LATE, DOUBLE = "lose", "crash", "late", "double"
FAULTS = (LOSE, CRASH, LATE, DOUBLE)
Event = tuple[Any, ...]
"""What happens next: a word, then whom it befalls and which of the things at hand."""


@dataclass(frozen=True)
class Step:
    """What one event does to one peer.

    `sends` are (receiver, message); `crashes` where the peer may die on the way: (what is left of it, how many of the
    sends had left). `plain`: a message that told nothing new; `quiet`: a status that moved nothing at its receiver.
    """

    after: int
    sends: tuple[tuple[int, int], ...]
    crashes: tuple[tuple[int, int], ...]
    commits: tuple[int, ...]
    plain: bool = False
    quiet: bool = False


class StepTable:
    """What each event makes of each state of one peer, worked out once and looked up from then on.

    Peers' states (`locals`) and messages (`things`) by number, and the steps between them, each judged once.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.snapshots = Snapshots()
        self.fired: Counter[str] = Counter()
        self.locals: list[Local] = []
        self.things: list[Any] = []
        self._local_ids: dict[bytes, int] = {}
        self._thing_ids: dict[bytes, int] = {}
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._received: dict[tuple[int, int], Step] = {}
        self._deaths: dict[int, int] = {}
        self._commits: dict[tuple[Any, ...], int] = {}
        self._judged: set[tuple[int, ...]] = set()

    @property
    def size(self) -> tuple[int, int]:
        """(different states of one peer, different steps of one peer) that were worked out so far."""
        return len(self.locals), len(self._steps) + len(self._received)

    def keep(self, local: Local) -> int:
        """The number of what a peer knows."""
        name = self.snapshots.name(local)
        known = self._local_ids.setdefault(name, len(self.locals))
        if known == len(self.locals):
            self.locals.append(self.snapshots.clone(local))
        return known

    def id_of(self, thing: Any) -> int:
        """The number of a message or a commit."""
        name = self.snapshots.frozen.digest(thing)
        known = self._thing_ids.setdefault(name, len(self.things))
        if known == len(self.things):
            self.things.append(self.snapshots.frozen.one(thing))
        return known

    def judge_commits(self, commits: tuple[int, ...]) -> None:
        """All that were ever made in one history must go together."""
        if commits in self._judged:
            return
        judge = self.setting.fresh_judge()
        for commit in commits:
            judge.saw_commit(self.things[commit])
        self._judged.add(commits)

    def receive(self, at: int, peer: int, message: int) -> Step:
        """A peer that knows what `at` names hears a message."""
        key = (at, message)
        known = self._received.get(key)
        if known is None:
            known = self._received[key] = self._work_out(at, peer, ("receive", message))
        return known

    def step(self, at: int, peer: int, what: tuple[Any, ...]) -> Step:
        """Anything else happens to it."""
        key = (at, *(part if isinstance(part, int | str) else self.snapshots.name(part) for part in what))
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._work_out(at, peer, what)
        return known

    def _work_out(self, at: int, peer: int, what: tuple[Any, ...]) -> Step:
        before = self.locals[at]
        local: Local = self.snapshots.clone(before)
        if local.core is None and what[0] != "start":
            return Step(at, (), (), ())
        given = ("receive", self.things[what[1]]) if what[0] == "receive" else what
        taken = small_step(self.setting, self.snapshots, local, lambda: self._remains(local), given)
        sends = [(self.setting.names.index(to), self.id_of(envelope)) for to, envelope in taken.sends]
        core = local.running
        self.fired.update(core.fired)
        decided = [commit for commit in (core.state.round.decided, core.state.own.commit) if commit is not None]
        after = self.keep(local)
        silent = what[0] == "receive" and not taken.acted and not core.fired
        quiet = silent and not self.things[what[1]].has_news
        # whether nothing has changed but when somebody was heard last
        plain = silent and self.snapshots.name(before, timeless=True) == self.snapshots.name(local, timeless=True)
        return Step(after, tuple(sends), tuple(taken.crashes), tuple(map(self._id_of_commit, decided)), plain, quiet)

    def _id_of_commit(self, commit: Commit) -> int:
        """Certificates of one kind are alike to the judge."""
        one = self.id_of(commit)
        self.judge_commits((one,))
        certificate = commit.certificate
        return self._commits.setdefault((certificate.manifest, certificate.kind), one)

    def dead(self, at: int) -> int:
        """What is left of a peer that dies now."""
        if at not in self._deaths:
            self._deaths[at] = self._remains(self.locals[at])
        return self._deaths[at]

    def _remains(self, local: Local) -> int:
        """What a crash leaves: the disk, and which sequences were used."""
        core = local.core
        used = core.state.own.sequence if core is not None else local.sequence
        disk = self.snapshots.clone(local.disk)
        return self.keep(Local(local.name, None, disk, lives=local.lives, sequence=used))


class State(NamedTuple):
    """`links[i]` are the messages under way on link i, the first one first; `late` those that were overtaken."""

    locals: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    late: tuple[tuple[int, int], ...]
    commits: tuple[int, ...]
    faults: int
    beats: int


class Happening(NamedTuple):
    """Something that may come next, whom it befalls and what it does to it."""

    event: Event
    peer: int
    step: Step


def _led_by(leader: PeerId, rules: RunRules, members: list[Member]) -> tuple[RunRules, Manifest]:
    """The rules of a run whose first round this member leads, and its genesis."""
    wishes, root = {member.peer: OwnershipRequest(0) for member in members}, root_of(initial_state(rules))
    runs = (replace(rules, fingerprint=sha256(b"small run", pack(number))) for number in itertools.count())
    found = ((named, genesis_manifest(named, root, members, wishes)) for named in runs)
    return next(one for one in found if leader_order(manifest_hash(one[1]), one[1].members)[0] == leader)


class SmallWorld:
    """The steps of `count` peers in their first round; `ordered`: messages of one link do not overtake each other.

    The last `servers` of them train nothing. `electors_may` do so much wrong: it makes the quorum. `leader`: which of
    them leads first. What there is to search hangs on it, and else it would change with every field of a manifest.
    """

    def __init__(
        self,
        count: int = 3,
        core_class: type[Consensus] = Consensus,
        ordered: bool = True,
        servers: int = 0,
        electors_may: Faults = Faults.CRASH,
        leader: int = 1,
    ) -> None:
        self.names = [PeerId(f"p{index}") for index in range(count)]
        self.ordered = ordered
        self.quick = True
        serving = self.names[count - servers :]
        members = [Member(name, 1, True, 0, name not in serving) for name in self.names]
        rules = replace(run_rules(columns=0, shared_tiles=1), faults=electors_may)
        self.rules, genesis = _led_by(self.names[leader], rules, members)
        initial = initial_state(self.rules)
        setting = Setting(
            tuple(self.names), self.rules, genesis, initial, core_class, frozenset(serving),
            Judge(self.rules, genesis, initial),
        )  # fmt: skip
        self.table = StepTable(setting)
        self.snapshots, self.things = self.table.snapshots, self.table.things
        self._disks = [Disk(genesis, initial, 1) for _ in self.names]
        self._pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        self._link = {pair: at for at, pair in enumerate(self._pairs)}

    # ---------------------------------------------------------------- the beginning

    def start(self, faults: int) -> State:
        """Everybody is up, was heard by everybody, and has asked what became of the run; training is about to end."""
        down = [self.table.keep(Local(name, None, disk)) for name, disk in zip(self.names, self._disks)]
        state = State(tuple(down), ((),) * len(self._pairs), (), (), faults, 0)
        for peer in range(len(self.names)):
            state = self._apply(state, peer, self.table.step(state.locals[peer], peer, ("start",)))
        state = self._delivered(state)
        while any(
            local.core is not None and local.core.state.liveness.asking_since is not None
            for local in self.locals_of(state)
        ):
            state = self._delivered(self._beat(state))
        return state._replace(beats=0)

    def _delivered(self, state: State) -> State:
        """All that is under way has come, in one order."""
        while any(state.links):
            link = next(at for at, messages in enumerate(state.links) if messages)
            step = self.table.receive(state.locals[self._pairs[link][1]], self._pairs[link][1], state.links[link][0])
            state = self._after(state, Happening(("deliver", link, 0), self._pairs[link][1], step))
        return state

    def is_over(self, state: State) -> bool:
        """Everybody who is up stands on a commit, or the commits differ (which was judged to be allowed)."""
        if not state.commits:
            return all(self.table.locals[at].core is None for at in state.locals)
        up = [local for local in self.locals_of(state) if local.core is not None]
        return all(local.disk.chain for local in up) or self.is_split(state)

    def is_known(self, state: State) -> bool:
        """Everybody who is up knows of the commit."""
        if not state.commits:
            return False
        cores = [local.core for local in self.locals_of(state) if local.core is not None]
        return bool(cores) and all(core.tip.round > 0 or core.state.round.decided is not None for core in cores)

    def is_lost(self, state: State) -> bool:
        """Somebody who is up knows of a commit whose state went down with those who had it."""
        up = [local for local in self.locals_of(state) if local.core is not None]
        decided = [local.core.state.round.decided for local in up if local.core is not None]
        return any(d is not None and not any(local.disk.holds(d.manifest) for local in up) for d in decided)

    def is_training(self, state: State) -> bool:
        """Whether somebody is up who does more than serve."""
        up = [local.core for local in self.locals_of(state) if local.core is not None]
        return any(not core.state.own.intent.serving for core in up)

    def is_split(self, state: State) -> bool:
        return len({self.things[commit].certificate.manifest for commit in state.commits}) > 1

    def locals_of(self, state: State) -> list[Local]:
        """What each peer knows; not to be changed."""
        return [self.table.locals[at] for at in state.locals]

    # ---------------------------------------------------------------- what can happen

    def successors(self, state: State, kinds: tuple[str, ...] = FAULTS) -> list[tuple[Event, State]]:
        """All that can come next, each with the state after it. Raises Violation.

        What makes no difference to any order comes at once: a heartbeat that tells nothing new, a status that moves
        nothing at its receiver, and (`quick`) work that is asked for.
        """
        deliveries = list(self._deliveries(state))
        for happening in deliveries:
            if happening.step.plain:
                return [(happening.event, self._after(state, happening))]
        if self.quick:
            for happening in deliveries:
                if happening.step.quiet:
                    return self._with_faults(state, [happening], kinds, crash=False)
            works = next(self._works(state), None)
            if works is not None:
                return self._with_faults(state, [works], kinds)
        at_hand = [*deliveries, *self._works(state)]
        found = self._with_faults(state, at_hand, kinds)
        found += [(late.event, self._after(state, late)) for late in self._late(state)]
        if not at_hand:
            found.append((("beat",), self._beat(state)))
            for peer, local in enumerate(self.locals_of(state)):
                if local.core is None and state.faults:
                    step = self.table.step(state.locals[peer], peer, ("start",))
                    back = state._replace(beats=0, faults=state.faults - 1)
                    found.append((("return", peer), self._apply(back, peer, step)))
        return found

    def _deliveries(self, state: State) -> Iterator[Happening]:
        for link, messages in enumerate(state.links):
            peer = self._pairs[link][1]
            for at in range(min(1, len(messages)) if self.ordered else len(messages)):
                yield Happening(("deliver", link, at), peer, self.table.receive(state.locals[peer], peer, messages[at]))

    def _works(self, state: State) -> Iterator[Happening]:
        for peer, local in enumerate(self.locals_of(state)):
            for at in range(len(local.todo)):
                step = self.table.step(state.locals[peer], peer, ("work", at, *self._brought(state, peer, at)))
                yield Happening(("work", peer, at), peer, step)

    def _late(self, state: State) -> Iterator[Happening]:
        for at, (link, message) in enumerate(state.late):
            peer = self._pairs[link][1]
            yield Happening(("arrive", at), peer, self.table.receive(state.locals[peer], peer, message))

    def _with_faults(
        self, state: State, happenings: list[Happening], kinds: tuple[str, ...], crash: bool = True
    ) -> list[tuple[Event, State]]:
        found = [(happening.event, self._after(state, happening)) for happening in happenings]
        if not state.faults:
            return found
        faulty = state._replace(faults=state.faults - 1, beats=0)
        for event, peer, step in happenings:
            if event[0] == "deliver":
                found += [((kind, *event[1:]), _disturbed(faulty, kind, event)) for kind in kinds if kind != CRASH]
            if crash and CRASH in kinds:
                for left, sent in step.crashes:
                    after = self._sent(_consumed(faulty, event), peer, step.sends[:sent])
                    found.append((("crash in", sent, event), self._died(after, peer, left)))
        if crash and CRASH in kinds:
            for peer, local in enumerate(self.locals_of(state)):
                if local.core is not None:
                    found.append((("crash", peer), self._died(faulty, peer, self.table.dead(state.locals[peer]))))
        return found

    def _after(self, state: State, happening: Happening) -> State:
        return self._apply(_consumed(state, happening.event), happening.peer, happening.step)

    def _died(self, state: State, peer: int, left: int) -> State:
        """What was under way to a process that is gone is lost; what it said still arrives."""
        links = tuple(() if to == peer else messages for (_, to), messages in zip(self._pairs, state.links))
        late = tuple((link, message) for link, message in state.late if self._pairs[link][1] != peer)
        return state._replace(locals=_set(state.locals, peer, left), links=links, late=late, beats=0)

    def _beat(self, state: State) -> State:
        """Nothing is under way: a heartbeat's time passes for all, and everybody speaks."""
        late = tuple(sorted((link, self.table.id_of(self.snapshots.aged(self.things[m]))) for link, m in state.late))
        state = state._replace(late=late, beats=state.beats + 1)
        for peer in range(len(self.names)):
            state = self._apply(state, peer, self.table.step(state.locals[peer], peer, ("tick",)))
        return state

    def _apply(self, state: State, peer: int, step: Step) -> State:
        state = state._replace(locals=_set(state.locals, peer, step.after))
        commits = tuple(sorted({*state.commits, *step.commits})) if step.commits else state.commits
        if commits != state.commits:
            self.table.judge_commits(commits)
            state = state._replace(commits=commits)
        return self._sent(state, peer, step.sends)

    def _sent(self, state: State, peer: int, sends: tuple[tuple[int, int], ...]) -> State:
        links = list(state.links)
        for to, message in sends:
            if self.table.locals[state.locals[to]].core is not None:
                link = self._link[(peer, to)]
                links[link] = (*links[link], message)
        return state._replace(links=tuple(links))

    # ---------------------------------------------------------------- what others bring to a peer's work

    def _brought(self, state: State, peer: int, at: int) -> tuple[Any, ...]:
        """The outside results of a piece of work: which values arrived, who had the tiles, and which peers are gone."""
        local = self.table.locals[state.locals[peer]]
        work, others = local.todo[at], dict(zip(self.names, self.locals_of(state)))
        match work:
            case do.Reduce(plan, index):
                piece = plan.value.slices[index]
                entries = {entry.peer: entry for entry in plan.value.roster}
                asked = [(others[name], entries[name]) for name in piece.contributors]
                return tuple(
                    holder.trained
                    if holder.core is not None and holder.core.is_counted(plan.value.parent, entry)
                    else None
                    for holder, entry in asked
                )
            case do.Fetch(piece, hashes, holders):
                having = [others[name] for name in holders if others[name].core is not None]
                return (any(holder.disk.has(piece, hashes) for holder in having),)
            case do.CatchUp(holder):
                there = others[holder]
                return (tuple(there.disk.chain), there.disk.state) if there.core is not None else ()
        return ()


def _consumed(state: State, event: Event) -> State:
    """The message is no longer under way."""
    if event[0] == "deliver":
        return _without(state, event[1], event[2])
    if event[0] == "arrive":
        return state._replace(late=state.late[: event[1]] + state.late[event[1] + 1 :])
    return state


def _disturbed(state: State, kind: str, event: Event) -> State:
    link, at = event[1:]
    message = state.links[link][at]
    if kind != LOSE:
        state = state._replace(late=tuple(sorted((*state.late, (link, message)))))
    return state if kind == DOUBLE else _without(state, link, at)


def _without(state: State, link: int, at: int) -> State:
    messages = state.links[link]
    return state._replace(links=_set(state.links, link, messages[:at] + messages[at + 1 :]))


def _set(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
