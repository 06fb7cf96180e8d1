"""One machine of the simulated swarm: a disk, a process on it or none, and the faults that befall both.

It crashes, sleeps, runs out of disk and leaves when told to. Its `Disk` survives. What its process does stands in
`sim_process`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Intent
from spes_p2p.ids import PeerId
from tests.simulation.sim_process import SimProcess
from tests.simulation.sim_state import NOTHING, STATE, STEPS, Disk
from tests.simulation.symbols import Died

if TYPE_CHECKING:
    from tests.simulation.sim import World

LEAVING_SECONDS = 10.0


class SimPeer:
    """A machine of the swarm, and the plans that were made for it. `process` is None while it is down."""

    def __init__(self, world: World, name: PeerId, disk: Disk, link_class: int, serving: bool = False) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.process: SimProcess | None = None
        columns = 0 if serving else world.max_columns
        self.intent = Intent(joining=True, max_columns=columns, link_class=link_class, serving=serving)
        self.step_seconds = world.step_seconds * world.random.choice((0.2, 0.3, 0.3, 0.4, 0.8))
        self.work_seconds = world.random.choice((0.02, 0.05, 0.3))
        self.asleep_until = 0.0
        self.crash_after: dict[type[do.Action], int] = {}
        self.restart_plan: Callable[[], None] | None = None
        self.at_next_vote: Callable[[], None] | None = None
        self.at_next_proposal: Callable[[], None] | None = None
        self.is_gone_for_good = False
        self.clock_behind_seconds = 0.0
        self.backup: Disk | None = None
        self.notices: list[do.Notice] = []
        self.has_key = False
        """Whether this is the organiser's node."""
        self.refuses = True
        """Whether the host answers when the process is gone, or a firewall in its place."""

    @property
    def core(self) -> Consensus | None:
        return None if self.process is None else self.process.core

    def start(self) -> None:
        """A process starts on what is on disk."""
        if self.process is None:
            self.disk.arrive(self.world.next_incarnation)
            self.disk.rivals, self.disk.free = None, STATE
            self.process = SimProcess(self)
            self.run(self.process, self.process.begin)

    def crash(self, reason: str = "") -> None:
        """The process ends; only the disk is left."""
        if self.process is None:
            return
        self.world.result.fired.update(self.process.core.fired)
        self.world.changed(f"{self.name} dies")
        self.process.driver.dispatcher.halted = True
        self.process = None
        if self.restart_plan is not None:
            self.restart_plan()

    def wipe(self) -> None:
        """The disk is lost: what starts next is a new incarnation."""
        world = self.world
        self.disk = Disk(world.genesis, world.state, world.next_incarnation())

    def back_up(self) -> None:
        """Somebody keeps a copy of the disk as it is now."""
        self.backup = copy.copy(self.disk)
        for name in ("chain", "staged", "finished"):
            setattr(self.backup, name, copy.copy(getattr(self.disk, name)))

    def roll_back(self) -> None:
        """The copy takes the place of the disk."""
        if self.backup is not None:
            self.disk, self.backup = self.backup, None
            self.disk.places = []
            self.world.judge.copies.add(self.name)

    def sleep(self, seconds: float) -> None:
        """The machine is suspended: nothing runs, nothing is answered."""
        if self.asleep_until > self.world.now:
            return
        self.world.changed(f"{self.name} sleeps for {seconds} s")
        self.asleep_until = self.world.now + seconds
        self.world.at(self.asleep_until, self.world.changed, f"{self.name} wakes")

    def fill_disk(self, seconds: float) -> None:
        """Nothing can be written for a while."""
        self.world.changed(f"{self.name} has a full disk for {seconds} s")
        self.disk.free = NOTHING
        self.later(seconds, self._empty_disk)

    def share_disk(self, seconds: float) -> None:
        """Others fill and free it for a while, at any write."""
        self.world.changed(f"{self.name} shares its disk for {seconds} s")
        self.disk.rivals = self.world.random
        self.later(seconds, self._empty_disk)

    def _empty_disk(self) -> None:
        self.disk.rivals, self.disk.free = None, STATE
        self.world.changed(f"{self.name} has room again")

    def leave(self) -> None:
        """A clean end: what was trained counts, and the peer goes when a manifest names it no more."""
        if self.process is None or self.intent.leaving:
            return
        self.world.changed(f"{self.name} leaves")
        serving = self.intent.serving
        self.intent = Intent(joining=serving, leaving=True, link_class=self.intent.link_class, serving=serving)
        self.restart_plan = None
        self.is_gone_for_good = True
        self.later(LEAVING_SECONDS, self.crash)
        self.run(self.process, self.process.leave)

    def receive(self, sender: PeerId, envelope: Envelope) -> None:
        if self.process is None:
            return
        if self.asleep_until > self.world.now and self.world.random.random() >= 0.5:
            return
        self.run(self.process, self.process.receive, sender, envelope)

    # ---- time ----

    def later(self, seconds: float, work: Callable[..., object], *arguments: object) -> None:
        """Something happens in the process after so long, if it still runs then."""
        self.world.after(seconds, self.run, self.process, work, *arguments)

    def run(self, process: SimProcess | None, work: Callable[..., object], *arguments: object) -> None:
        """Something happens in the process: when the machine is awake, and it may die of it."""
        if process is None or process is not self.process:
            return
        if self.asleep_until > self.world.now:
            self.world.at(self.asleep_until, self.run, process, work, *arguments)
            return
        self.asleep_until = 0.0
        try:
            work(*arguments)
        except Died:
            return

    # ---- questions ----

    @property
    def is_full(self) -> bool:
        """Whether nothing can be written, or it has not tried again yet."""
        is_short = self.disk.free < STATE or self.disk.rivals is not None
        return is_short or (self.process is not None and self.process.driver.dispatcher.is_full)

    @property
    def trains(self) -> bool:
        return not self.intent.serving and not self.has_key

    @property
    def round_seconds(self) -> float:
        """How long it trains in a round at full length."""
        return STEPS * self.step_seconds if self.trains else 0.0

    def has_state(self, manifest: Manifest) -> bool:
        """Whether it has the state of a manifest, or of a later one."""
        return self.disk.tip.round >= manifest.round or (self.process is not None and self.process.has_made(manifest))
