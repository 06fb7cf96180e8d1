"""One peer's connection to a run: network thread, the run found over it, its place on disk, and the driver.

Everything here runs on the network's thread; the training thread sees the `TrainerBridge`. Starting it touches no GPU.
What belongs to it has files of its own: `entrance`, `data_supply`, `wishes`, `presence`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import LINK_PRIVATE, LINK_PUBLIC, Member, trainers
from spes_p2p.consensus.messages import Commit, Intent, Status
from spes_p2p.data.feed import Feed
from spes_p2p.errors import Stopped
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.ids import PeerId
from spes_p2p.peer.data_supply import DataSupply
from spes_p2p.peer.entrance import FoundRun, Say, banned, find, open_peer_network
from spes_p2p.peer.folder import CHECKPOINTS, RUN
from spes_p2p.peer.herald import decay_line
from spes_p2p.peer.options import PeerOptions, column_budget
from spes_p2p.peer.presence import Presence
from spes_p2p.peer.stopping import until_stopped
from spes_p2p.peer.wishes import Wishes
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.ports import MonotonicClock
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.driver import Driver, build_driver
from spes_p2p.sync.joining import Joining
from spes_p2p.sync.node import Node
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch, Words
from spes_p2p.sync.recorder import FlightRecorder
from spes_p2p.sync.surroundings import Disk, Role
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.trainer_bridge import TrainerBridge

T = TypeVar("T")
LEAVE_SECONDS = 8.0
LINGER_SECONDS = 10.0


class Connection:
    """Made by `Connection.open`, ended by `close`. `config` has this peer's own choices on top of the run's."""

    def __init__(
        self,
        thread: NetworkThread,
        options: PeerOptions,
        gate: TrainerBridge,
        say: Say,
        data_traffic: DataTraffic,
        network: HivemindNetwork,
        found: FoundRun,
    ) -> None:
        self._thread = thread
        self._options = options
        self._say = say
        self._network = network
        self.found = found
        self._run = found.run
        self.gate = gate
        self.info, self.config, self.layout = found.run.info, found.run.config, found.run.layout
        self._node = Node(network, MonotonicClock(), say)
        self.wishes = Wishes(
            gate.wish, self._node.me, lambda: heirs(self.others(), self.driver.core.tip.members),
        )  # fmt: skip
        self.data = DataSupply(network, found, options, data_traffic, gate.notice, gate.failed)
        self.presence = Presence(
            self.info.run_id, network, found.contacts, self.data, lambda: self.wishes.asked_to_pause,
            lambda: gate.stopping or self.wishes.intent.leaving, options.token,
        )  # fmt: skip
        self._beside = Tasks(gate.failed)
        self._ends = contextlib.AsyncExitStack()
        """What is ended by `close`, the newest first."""
        self._ends.push_async_callback(network.close)
        self._ends.push_async_callback(self.data.close)
        self._ends.push_async_callback(self._beside.stop)
        # from the first moment on: the run may begin in days
        self._beside.spawn(network.keep_alive(lambda text: gate.notice(Notice("network", text))))
        self._announcer: Announcer | None = None
        self._driver: Driver | None = None
        self._disk: Disk | None = None
        self.last_round: int | None = None
        """The run's last round, if the organiser has ended the run."""
        self._words = Words()

    @classmethod
    def open(
        cls,
        thread: NetworkThread,
        options: PeerOptions,
        gate: TrainerBridge,
        say: Say,
        data_traffic: DataTraffic,
    ) -> Connection:
        """Joins the DHT, finds the run and checks its config; the run itself is entered by `enter`.

        Raises Stopped, here and in `enter`, when this peer is asked to stop.
        """

        async def come() -> Connection:
            network, addresses = await open_peer_network(options, say)
            try:
                found = await find(network, options, addresses, say)
            except BaseException:
                await network.close()
                raise
            return cls(thread, options, gate, say, data_traffic, network, found)

        return thread.run(unless_stopped(gate, come()))

    def enter(self, columns_that_fit: int = 0) -> Commit:
        """Waits for genesis, opens the disk and begins to take part; the commit to start training from.

        `columns_that_fit`: expert columns that this machine's memory has room for.
        """
        return self._await(self._enter(columns_that_fit))

    def feed_from_others(self, warn: Say) -> Feed:
        """The run's dataset, of which pieces come from others from `enter` on. Raises NetworkError, and Stopped."""
        return self._await(self.data.open_feed(self._say, warn))

    # ---- what others may look at; written on the network's thread ----

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def disk(self) -> Disk:
        assert self._disk is not None
        return self._disk

    @property
    def peer_id(self) -> PeerId:
        return self._node.me

    def is_member(self, by: Manifest | None = None) -> bool:
        """By this manifest, or by the newest, of which training may not have heard yet."""
        return self.driver.core.state.is_member(by)

    def others(self) -> list[Status]:
        """Newest statuses of all others of the run that are alive."""
        core, now = self.driver.core, self._node.clock.now()
        contacts = list(core.state.others.contacts.items())
        return [contact.status for peer, contact in contacts if core.alive(peer, now)]

    def known(self) -> dict[PeerId, PeerRecord]:
        """What the nodes of the run last said of themselves in the DHT."""
        return dict(self._announcer.known) if self._announcer is not None else {}

    def lost_round(self) -> int | None:
        """The newest round according to the bootstrap node, if no reachable peer has its state; else None."""
        core = self.driver.core
        known = max([core.tip.round, *(status.round for status in self.others())])
        return core.state.others.told_round if core.state.others.told_round > known else None

    def are_others_behind(self, round: int) -> bool:
        """Whether other nodes (peers or an archive) remain in the run, none of which has the state of `round` yet."""
        others = [status for status in self.others() if not status.intent.leaving]
        return bool(others) and all(status.round < round for status in others)

    # ---- the network's thread ----

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(unless_stopped(self.gate, work))

    async def _enter(self, columns_that_fit: int) -> Commit:
        options, run, folder, ends = self._options, self._run, self._options.folder / RUN, self._ends
        self.wishes.want(self._first_intent(columns_that_fit), may_shrink=options.max_experts is None)
        intent = self.wishes.intent
        announcer = self._announcer = Announcer(self.presence, run.info, self._network, self.gate.failed)

        async def say_last() -> None:
            self.presence.has_left = True
            await announcer.say_last()

        ends.push_async_callback(say_last)
        ends.push_async_callback(announcer.stop)
        await announcer.start()
        self.data.start(self.known)
        joining = Joining(run, self._node, folder, announcer.sources, options.folder / CHECKPOINTS)
        disk = self._disk = await joining.enter(intent, self.data.answers())
        ends.callback(disk.store.close)
        role = Role(intent, tuple(await announcer.sources()))
        driver = self._driver = self.data.driver = build_driver(run, self._node, disk, role, self.gate)
        recorder = FlightRecorder(
            options.folder / "flight", run.info, say=lambda text: self.gate.notice(Notice("recorder", text))
        )
        recorder.attach(driver.core)
        self.presence.begin(driver, disk.chain)
        self.data.traffic.begin_rounds()
        self.gate.attach(driver, asyncio.get_running_loop())
        ends.push_async_callback(driver.stop)
        await driver.start()
        watch = OrganiserWatch(
            run.info, self._network.directory, self._node.checker.check, self._hear_organiser, self.gate.failed,
            folder / WORDS_FILE,
        )  # fmt: skip
        ends.push_async_callback(watch.stop)
        await watch.start()
        ends.push_async_callback(self._beside.stop)  # before the driver, whom it asks
        self.wishes.begin()  # it may have been paused meanwhile
        self._beside.spawn(self.wishes.look_around(run.heartbeat_seconds))
        return disk.tip

    def _first_intent(self, columns_that_fit: int) -> Intent:
        options, experts_per_peer = self._options, self.config.swarm.experts_per_peer
        return Intent(
            joining=True,
            max_columns=column_budget(options, experts_per_peer, columns_that_fit, self.layout.num_columns),
            claims=options.owned_experts or (),
            link_class=LINK_PRIVATE if self._network.client_mode else LINK_PUBLIC,
            uplink_bytes_per_second=int(options.network.max_upload or 0),
        )

    def _hear_organiser(self, words: Words) -> None:
        before, self._words = self._words, words
        self.driver.obey(words)
        if words.is_banned(self.peer_id):
            self.gate.failed(banned(self.info, self.peer_id))
        was_trusted, is_trusted = (said.admission(self._run.rules).is_trusted(self.peer_id) for said in (before, words))
        if is_trusted and not was_trusted:
            self.gate.notice(Notice("vouched", "the organiser vouches for this peer: it is trusted now"))
        if words.decay is not None and before.decay is None:
            self.gate.notice(Notice("decay", decay_line(words.decay.value.steps, self.driver.core.tip)))
        if words.last_round != self.last_round:
            self.last_round = words.last_round
            last = max(self.driver.core.tip.round, self.last_round or 0)  # rounds may be made until one hears of it
            text = f"the organiser has ended the run: this peer saves and exits after round {last}"
            self.gate.notice(Notice("ending", text))

    def close(self) -> None:
        """Ends driver, records and network. What is on disk stays."""
        self._thread.run(self._ends.aclose())


def heirs(others: Iterable[Status], members: Iterable[Member]) -> frozenset[PeerId]:
    """To whom the next round could give columns: `others` that train, stay, and ask for some."""
    training = {(member.peer, member.incarnation) for member in trainers(members)}
    here = (status for status in others if (status.peer, status.incarnation) in training and not status.intent.leaving)
    return frozenset(status.peer for status in here if status.intent.max_columns > 0)


async def unless_stopped(gate: TrainerBridge, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it once this peer is asked to stop. Raises the peer's own failure, or Stopped."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with gate.on_stop(lambda: loop.call_soon_threadsafe(stop.set)):
        try:
            return await until_stopped(stop, work)
        except Stopped:
            gate.check()
            raise
