"""One peer of the small world: what one event makes of it, by the real driver's parts, and whether that is allowed.

Nothing takes time: a piece of work that is taken up is done. All that comes from the world around is passed in. Leaves
out who else there is (`small_world`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.consensus import actions as do
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice
from spes_p2p.consensus.messages import Commit, Intent, Work
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId
from tests.simulation.judge import Judge, VoteHistory
from tests.simulation.sim_state import (
    BATCH_SEQUENCES,
    SEQUENCE_TOKENS,
    STEPS,
    Disk,
    FakeSealer,
    State,
    Trained,
    check_fake,
    trained_positions,
)
from tests.simulation.snapshots import FIRST_SEQUENCE, HEARTBEAT_SECONDS, FixedPace, Snapshots
from tests.simulation.symbol_driver import SymbolDriver

TRAIN = "train"


@dataclass
class Local:
    """All of one peer: its process (None while it is down), its disk, and the work that its `Consensus` asked for."""

    name: PeerId
    core: Consensus | None
    disk: Disk
    todo: tuple[object, ...] = ()
    trained: Trained | None = None
    lives: int = 0
    sequence: int = FIRST_SEQUENCE

    @property
    def running(self) -> Consensus:
        """Of a peer that is up."""
        assert self.core is not None
        return self.core


class PathJudge(Judge):
    """A judge for whom one step is all of history: what was before stands in the record on disk."""

    def remember(self, peer: PeerId, disk: Disk) -> None:
        """Takes a durable record for what this elector has bound itself to."""
        record = disk.record
        if record is None:
            return
        history = VoteHistory(locked=(record.locked_ballot, record.locked_value))
        for said, signed in history.words_of(record):
            if signed is not None:
                said[signed.value.ballot] = signed.value.value
        self._histories[(peer, disk.incarnation, record.parent)] = history


@dataclass(frozen=True)
class Setting:
    """What all peers of a small world have in common; `servers` train nothing."""

    names: tuple[PeerId, ...]
    rules: RunRules
    genesis: Manifest
    state: State
    core_class: type[Consensus]
    servers: Collection[PeerId]
    content: Judge
    """Knows which values went into which tiles, for all steps."""

    def fresh_judge(self) -> PathJudge:
        """One that knows what values went into which tiles, and nothing else."""
        judge = PathJudge(self.rules, self.genesis, self.state)
        judge.reduced, judge.wires = self.content.reduced, self.content.wires
        judge.liars = self.content.liars
        return judge


def small_step(
    setting: Setting, snapshots: Snapshots, local: Local, remains: Callable[[], int], what: tuple[Any, ...]
) -> SmallSurroundings:
    """Something happens to a peer: a start, a heartbeat, a message, or a piece of work with what others bring to it.

    Raises Violation. `remains` says what a crash would leave of it now.
    """
    around = SmallSurroundings(setting, snapshots, local, remains)
    if what == ("start",):
        _start(setting, local)
    driver = SymbolDriver(local.running, local.disk, around)
    match what:
        case ("start",):
            driver.dispatcher.start()
            driver.tell(on.ClockTicked())
        case ("tick",):
            _grow_older(snapshots, local)
            driver.tell(on.ClockTicked())
        case ("receive", message):
            driver.tell(on.MessageReceived(message))
        case ("work", at, *brought):
            work, local.todo = local.todo[at], local.todo[:at] + local.todo[at + 1 :]
            around.others = Brought(setting, work, tuple(brought))
            if work == TRAIN:
                _train(setting, local, driver)
            else:
                under_way = driver.work(work)
                while driver.go_on(under_way) is not None:
                    pass
                around.handled()  # for what the work has written last
        case _:
            raise ValueError(f"nothing is known of {what}")
    return around


def _start(setting: Setting, local: Local) -> None:
    disk, name = local.disk, local.name
    intent = Intent(joining=True, serving=name in setting.servers)
    others = tuple(peer for peer in setting.names if peer != name)
    begin = Start(
        disk.incarnation, disk.tip, disk.tip_commit, disk.record, intent, local.sequence, others,
        ledger=disk.ledger(disk.tip.round),
    )  # fmt: skip
    identity = Identity(name, setting.rules, FakeSealer(name), check_fake)
    local.core = setting.core_class.begin(identity, begin, FixedPace(HEARTBEAT_SECONDS), 0.0)
    local.lives += 1
    local.todo = (TRAIN,) if not disk.chain and name not in setting.servers else ()


def _grow_older(snapshots: Snapshots, local: Local) -> None:
    snapshots.age(local.running)


def _train(setting: Setting, local: Local, driver: SymbolDriver) -> None:
    core = driver.core
    if core.tip.round > 0:
        return
    sequences = STEPS * BATCH_SEQUENCES
    work = Work(True, sequences * SEQUENCE_TOKENS, STEPS, sequences, expected_tokens=sequences * SEQUENCE_TOKENS)
    number = 100 * setting.names.index(local.name) + local.lives
    positions = trained_positions(core.tip, local.name, sequences)
    local.trained = Trained(number, local.name, core.tip_hash, work, positions)
    driver.tell(on.TrainingProgressed(work))


class SmallSurroundings:
    """The `Surroundings` of a peer's driver for one event, and what is seen of it.

    `sends` are the messages that left, `crashes` where the process may die on the way: (what `remains` says of it, how
    many of the messages had left).
    """

    def __init__(self, setting: Setting, snapshots: Snapshots, local: Local, remains: Callable[[], int]) -> None:
        self._snapshots = snapshots
        self._local = local
        self._remains = remains
        judge = setting.fresh_judge()
        judge.remember(local.name, local.disk)
        self.judge: Judge = judge
        self.sends: list[tuple[PeerId, Envelope]] = []
        self.crashes: list[tuple[int, int]] = []
        self.acted = False
        """Whether anything was to be done."""
        self.others = Brought(setting, None, ())
        self.trainer = OneRound()
        self._is_durable = False
        self._written = _on_disk(local.disk)

    def now(self) -> float:
        return 0.0

    def work_seconds(self) -> float:
        return 0.0

    def fetch_seconds(self) -> float:
        return 0.0

    def finds_harmful(self, column: Hash) -> bool:
        return False

    def finds_work(self, entry: Contribution) -> str | None:
        return None

    def handled(self) -> None:
        """It may die as soon as something was written."""
        if _on_disk(self._local.disk) != self._written:
            self._written = _on_disk(self._local.disk)
            self.crashes.append((self._remains(), len(self.sends)))
            self._is_durable = False

    def before(self, action: do.Action) -> None:
        self.acted = True
        if isinstance(action, do.Persist | do.Send):
            if self._is_durable:
                self.crashes.append((self._remains(), len(self.sends)))
            self._is_durable = True

    def wrote(self, before: VoteRecord, record: VoteRecord) -> None:
        """Nothing waits for it."""

    def send(self, action: do.Send) -> None:
        self.judge.saw_message(self._local.name, action.envelope, self._local.disk)
        self.sends.append((action.to, action.envelope))

    def begin_work(self, action: do.Work) -> None:
        self._local.todo = (*self._local.todo, self._snapshots.frozen.one(action))

    def notice(self, notice: do.Notice) -> None:
        """Nobody reads it."""

    def new_incarnation(self) -> int:
        return self._local.disk.incarnation + 1


class OneRound:
    """The `Training` of a peer that makes one round: its end is a piece of work like others."""

    def close(self) -> None:
        """It ends in any case."""

    def stands_on(self, commits: Sequence[Commit], switched: bool) -> None:
        """There is no other round."""

    def goes_on(self) -> None:
        """There is no other round."""


class Brought:
    """The `Others` for one piece of work: what they give is passed in with it."""

    def __init__(self, setting: Setting, work: object, brought: tuple[Any, ...]) -> None:
        self._setting = setting
        self._work = work
        self._brought = brought

    def contribution(self, entry: Contribution, parent: Hash) -> Trained | None:
        assert isinstance(self._work, do.Reduce)
        contributors = self._work.plan.value.slices[self._work.index].contributors
        found: dict[PeerId, Trained | None] = dict(zip(contributors, self._brought, strict=True))
        return found[entry.peer]

    def serves(self, holder: PeerId, piece: Slice, hashes: bytes) -> bool:
        return isinstance(self._work, do.Fetch) and bool(self._brought[0])

    def disk_of(self, holder: PeerId) -> Disk | None:
        if not self._brought:
            return None
        chain, state = self._brought
        return Disk(self._setting.genesis, state, 0, list(chain))


def _on_disk(disk: Disk) -> tuple[object, ...]:
    return len(disk.chain), tuple(disk.staged.items()), tuple(disk.finished)
