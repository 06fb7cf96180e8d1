"""One peer's connection to a run: network thread, the run found over it, its place on disk, and the driver.

Everything here runs on the network's thread; the training thread sees the `TrainerBridge`. Starting it touches no GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spes_p2p import __version__
from spes_p2p.config.fingerprint import apply_peer_overrides, differences, split_overrides
from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.membership import LINK_PRIVATE, LINK_PUBLIC
from spes_p2p.consensus.messages import Commit, Intent, Status
from spes_p2p.data.copies import Copies
from spes_p2p.data.feed import Feed, PieceDataset
from spes_p2p.data.held import Held
from spes_p2p.data.leases import Leases
from spes_p2p.data.loader import spans_of
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.web_mirrors import WebMirrors
from spes_p2p.errors import ConfigError, NetworkError, PermanentError, RemoteProtocolError
from spes_p2p.exchange.moments import MomentStore
from spes_p2p.exchange.piece_fetcher import PieceFetcher, fetch_catalogue
from spes_p2p.exchange.pieces import DataTraffic, PieceServing, PieceSource, held_by
from spes_p2p.exchange.transfers import Transfers, WrongSize
from spes_p2p.files import storing
from spes_p2p.ids import Hash, PeerId
from spes_p2p.interop.own import run_layout
from spes_p2p.limits import allow_open_files
from spes_p2p.observe.live import TRAINING
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.peer.contacts import Contacts, kept_addresses
from spes_p2p.peer.data_copies import DataCopies, Surroundings
from spes_p2p.peer.data_feed import DATA, DataFeed, keep_catalogue, kept_catalogue
from spes_p2p.peer.folder import CHECKPOINTS, RUN, claim_folder
from spes_p2p.peer.options import NetworkOptions, PeerOptions, check_columns, column_budget, config_path
from spes_p2p.peer.phases import phase_of
from spes_p2p.peer.stopping import Stopped, until_stopped
from spes_p2p.peer.vitals import VitalsKeeper
from spes_p2p.peer.web_data import mirrors_of
from spes_p2p.state.moments import NO_MOMENTS, Moments
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread, Reach
from spes_p2p.swarm.records import MAX_SPEED, PeerRecord
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.composition import build_driver, open_disk
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.finding import find_run
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.joining import Joining, load_run
from spes_p2p.sync.node import Node, Run, stall_seconds_of
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch, Words, read_words, together
from spes_p2p.sync.recorder import FlightRecorder
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.surroundings import Disk, Role
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.trainer_bridge import TrainerBridge
from spes_p2p.sync.web_sources import SourceKeeper
from spes_p2p.wire import pack

T = TypeVar("T")
ANSWER_SECONDS = 15.0
LEAVE_SECONDS = 8.0
LINGER_SECONDS = 10.0
MOMENTS_PAUSE_SECONDS = 0.1
MOMENTS_STALL_SECONDS = 2.0


class MonotonicClock:
    """Seconds that never jump."""

    def now(self) -> float:
        return time.monotonic()


@dataclass
class Progress:
    """What the peer's own DHT record says of its training; written by the training thread."""

    step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0


async def open_network(options: NetworkOptions, identity: Path) -> HivemindNetwork:
    """Joins the DHT. Raises NetworkError, IdentityInUse or ClockSkewed, each with the fix."""
    allow_open_files()
    return await HivemindNetwork.start(
        options.initial_peers,
        options.identity_path or identity,
        options.host_maddrs,
        options.announce_maddrs,
        options.client_mode,
        StreamLimits(upload_bytes_per_second=options.max_upload, download_bytes_per_second=options.max_download),
    )


def reach_text(network: HivemindNetwork) -> str:
    """What a person should know of how others reach this machine; empty where nothing was found out."""
    if network.reach is Reach.PUBLIC:
        return f"others can dial this machine, at {network.dialled_at}"
    if network.reach is Reach.PRIVATE:
        return (
            "nobody can dial this machine (NAT or a firewall): it trains all the same, over connections that it keeps "
            "open; to let it reduce for others too, forward a TCP port and name it in --host-maddrs"
        )
    return ""


class Connection:
    """Made by `Connection.open`, ended by `close`. `config` has this peer's own choices on top of the run's."""

    def __init__(
        self,
        thread: NetworkThread,
        options: PeerOptions,
        gate: TrainerBridge,
        say: Callable[[str], None],
        data_traffic: DataTraffic | None = None,
    ) -> None:
        self._thread = thread
        self._options = options
        self._say = say
        self.gate = gate
        self.clock = MonotonicClock()
        self.progress = Progress()
        self.vitals = VitalsKeeper()
        self._joined_at = int(time.time())
        self._announcer: Announcer | None = None
        self._known_nodes: Contacts | None = None
        self._driver: Driver | None = None
        self._network: HivemindNetwork | None = None
        self._disk: Disk | None = None
        self._watch: asyncio.Task[None] | None = None
        self._shelf: PieceSource | None = None
        self._feed: Feed | None = None
        self._copies: Copies | None = None
        self._feeding: Tasks | None = None
        self._web: WebMirrors | None = None
        self._data_traffic = data_traffic or DataTraffic()
        self._pause_asked = False
        self._paused = False
        """Asks for no columns: `_pause_asked`, unless nobody else could train them."""
        self._beats: Tasks | None = None
        self._is_in = False
        self._tip: tuple[Commit, float] | None = None
        self._organiser: OrganiserWatch | None = None
        self.last_round: int | None = None
        """After which the organiser has ended the run."""

    @classmethod
    def open(
        cls,
        thread: NetworkThread,
        options: PeerOptions,
        gate: TrainerBridge,
        say: Callable[[str], None],
        data_traffic: DataTraffic | None = None,
    ) -> tuple[Connection, Config, RunInfo]:
        """Joins the DHT, finds the run and checks its config; the run itself is entered by `enter`.

        Raises Stopped, here and in `enter`, when the gate says stop.
        """
        self = cls(thread, options, gate, say, data_traffic)
        try:
            config, info = thread.run(self._unless_stopped(self._find()))
        except BaseException:
            self.close()
            raise
        return self, config, info

    def enter(self, columns_that_fit: int = 0) -> Commit:
        """Waits for genesis, opens the disk and begins to take part; the commit to start training from.

        `columns_that_fit`: expert columns that this machine's memory has room for.
        """
        return self._thread.run(self._unless_stopped(self._enter(columns_that_fit)))

    def serve_data(self, shelf: PieceSource) -> None:
        """From `enter` on others get pieces of the run's dataset from here."""
        self._shelf = shelf

    def feed_from_others(self, say: Callable[[str], None]) -> Feed:
        """The run's dataset, of which pieces come from others from `enter` on. Raises NetworkError, and Stopped."""
        self._feed = self._thread.run(self._unless_stopped(self._open_feed(say)))
        self._shelf = self._feed.cache
        return self._feed

    # ---- what others may look at; written on the network's thread ----

    @property
    def invitation(self) -> str:
        """The newest one; kept in the output folder, too."""
        assert self._known_nodes is not None
        return self._known_nodes.word

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
        assert self._network is not None
        return self._network.signer.peer_id

    def is_member(self) -> bool:
        return self.driver.core.state.is_member()

    def others(self) -> list[Status]:
        """Newest statuses of all others of the run that are alive."""
        core, now = self.driver.core, self.clock.now()
        contacts = list(core.state.others.contacts.items())
        return [contact.status for peer, contact in contacts if core.alive(peer, now)]

    def known(self) -> dict[PeerId, PeerRecord]:
        """What the nodes of the run last said of themselves in the DHT."""
        return dict(self._announcer.known) if self._announcer is not None else {}

    def lost_round(self) -> int | None:
        """The newest round by the word of the bootstrap node, where nobody who is heard has its state."""
        core = self.driver.core
        known = max([core.tip.round, *(status.round for status in self.others())])
        return core.state.others.told_round if core.state.others.told_round > known else None

    def are_others_behind(self, round: int) -> bool:
        """Whether others stay, an archive among them, and none of them has the state of `round` yet."""
        others = [status for status in self.others() if not status.intent.leaving]
        return bool(others) and all(status.round < round for status in others)

    def fetch_moments(self, holder: PeerId, head: Hash, column: int, until: float) -> Moments | None:
        """Optimizer moments as `holder` had them on top of `head`, unchecked; NO_MOMENTS where it has none to give.

        None, after a pause, where it may offer them yet. Takes no longer than `until` (monotonic seconds), and not on
        when the gate says stop.
        """
        try:
            return self._thread.run(self._unless_stopped(self._fetch_moments(holder, head, column, until)))
        except (Stopped, TimeoutError, NetworkError, WrongSize):
            return NO_MOMENTS

    # ---- the network's thread ----

    async def _fetch_moments(self, holder: PeerId, head: Hash, column: int, until: float) -> Moments | None:
        assert self._network is not None
        core = self.driver.core
        contact, members = core.state.others.contacts.get(holder), {member.peer for member in core.tip.members}
        if holder not in members and (contact is None or not contact.status.intent.leaving):  # it was lost
            return NO_MOMENTS
        transfers = Transfers(self._network.transport, self.layout, lambda: MOMENTS_STALL_SECONDS)
        async with asyncio.timeout(until - self.clock.now()):
            try:
                moments = await transfers.moments(holder, head, column)
            except WrongSize:
                raise
            except RemoteProtocolError:  # its training thread may not have come to it yet
                await asyncio.sleep(MOMENTS_PAUSE_SECONDS)
                return None
            await transfers.moments_taken(holder, head, column)
            return moments or NO_MOMENTS

    def _tell_of_data(self, peer: PeerId, text: str) -> None:
        self.gate.notice(Notice("data", text, peer))

    async def _open_feed(self, say: Callable[[str], None]) -> Feed:
        assert self._network is not None
        folder, dataset = self._options.output / DATA, self._info.dataset
        catalogue = kept_catalogue(folder, dataset)
        if catalogue is None:
            holders = [self._info.organiser, *(peer for peer in self._publishers if peer != self._info.organiser)]
            catalogue = await fetch_catalogue(
                self._network.transport, dataset, holders, ANSWER_SECONDS, self._tell_of_data
            )
            keep_catalogue(folder, pack(catalogue))
        grid = PieceGrid(catalogue)
        whole, bound = bytes_text(grid.tokens * grid.item_bytes), bytes_text(self._options.max_disk)
        self._say(f"data comes from other peers: {whole} in all, at most {bound} are kept here")
        open_cache = partial(PieceCache, folder, grid, self._options.max_disk)
        return Feed(await asyncio.to_thread(open_cache), say)

    def _start_feeding(self) -> None:
        """Pieces are fetched from now on, also while the run has not begun: what is held out is needed in any case."""
        assert self._network is not None
        if self._shelf is None:
            return
        self._feeding, transport = Tasks(self.gate.failed), self._network.transport
        check = EnvelopeChecker(self._network.verifier).check
        self._sources = SourceKeeper(self._info, check, self._options.output / DATA)
        stall_seconds = stall_seconds_of(self.config)
        looking = self._sources.look_on(transport, lambda: tuple(self._data_holders()), lambda: stall_seconds)
        self._feeding.spawn(looking)
        if self._feed is None:
            return
        web = mirrors_of(
            self._sources, self._feed.grid, self._options.web_data, self.config.data.urls, self._data_traffic,
            transport.download, self.gate.notice,
        )  # fmt: skip
        fetcher = PieceFetcher(
            transport, self._feed.grid, self._info.organiser, self._data_holders, self._tell_of_data,
            self._data_traffic, lambda: stall_seconds, self._feeding.in_thread, web,
        )  # fmt: skip
        self._feeding.spawn(DataFeed(self._feed, fetcher).run())
        self._web = web
        spans = spans_of(PieceDataset(self._feed), self.config)
        self._copies = Copies(self._feed, spans, self.peer_id, self.config.data.copies)
        copying = DataCopies(
            self._feed, self._copies, fetcher, self._surroundings, self._is_syncing, self._feeding.in_thread
        )
        self._feeding.spawn(copying.run())

    def _surroundings(self) -> Surroundings:
        others = {peer: record for peer, record in self.known().items() if peer != self.peer_id}
        held = {peer: record.held for peer, record in others.items()}
        peers = frozenset(peer for peer, record in others.items() if record.role == "peer")
        return Surroundings(self._driver.core.tip.leases if self._driver else Leases(), held, peers)

    def _is_syncing(self) -> bool:
        """Or fetching the state of a run that has begun."""
        if self._driver is None:
            return self._round_met > 0
        return phase_of(self._driver.core.state.round) != TRAINING

    def _held(self) -> Held:
        held = self._copies.held if self._copies is not None else held_by(self._shelf)
        return replace(held, web=self._shelf is not None and bool(self._sources.urls))

    def _data_holders(self) -> dict[PeerId, int]:
        return {peer: record.data_pieces for peer, record in self.known().items()}

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, broken off and unwound when the gate says stop. Raises what the peer failed with, or Stopped."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        with self.gate.on_stop(lambda: loop.call_soon_threadsafe(stop.set)):
            try:
                return await until_stopped(stop, work)
            except Stopped:
                self.gate.check()
                raise

    async def _find(self) -> tuple[Config, RunInfo]:
        options = self._options
        expected = self._check_options()
        before = kept_addresses(options.output, options.fingerprint)
        addresses = tuple(dict.fromkeys((*options.network.initial_peers, *before)))
        if not addresses:
            fix = "give the word that the organiser printed: spes-p2p join spes1..."
            raise ConfigError("no invitation is given", fix=fix)
        network = await open_network(replace(options.network, initial_peers=addresses), options.output / "identity.key")
        self._network = network
        if said := reach_text(network):
            self._say(said)
        group = await find_run(network.directory, options.run_id, ANSWER_SECONDS, options.fingerprint)
        self._publishers = tuple(group.addresses())
        self._round_met = group.round
        self._info, agreed = await load_run(network.transport, group, ANSWER_SECONDS)
        check_organiser(options.organiser, self._info)
        self._known_nodes = Contacts(options.output, self._info, self.peer_id, addresses)
        await self._check_not_over(group.round)
        if options.rounds is not None and group.round > options.rounds:
            raise PermanentError(
                f"the run is at round {group.round}, and this peer was to stop with round {options.rounds}",
                fix="give a later round with --rounds, or leave it out",
            )
        if expected is not None:
            _check_same(expected, agreed, self._info)
        overrides = list(options.overrides)
        if options.data is not None:
            overrides.append(f"data.path={options.data}")
        self.config = apply_peer_overrides(agreed, overrides)
        self.layout = run_layout(self.config, options.model)
        if options.owned_experts is not None:
            check_columns(options.owned_experts, self.layout.num_columns)
        column_budget(options, self.config.swarm.experts_per_peer, 0, self.layout.num_columns)
        claim_folder(options.output / RUN, self._info, self.layout)  # before anything of this run is written there
        self._say(f"run {self._info.run_id}, fingerprint {self._info.fingerprint.hex()[:16]}")
        return self.config, self._info

    async def _check_not_over(self, round: int) -> None:
        assert self._network is not None
        check = EnvelopeChecker(self._network.verifier).check
        try:
            words = await read_words(self._network.directory, self._info, check, ANSWER_SECONDS)
        except NetworkError:  # it is looked for again when we are in
            return
        last_round = together(words.values()).last_round
        if last_round is not None and round >= last_round:
            raise PermanentError(
                f"run {self._info.run_id} is over: its organiser has ended it with round {last_round}",
                fix="take its model with spes-p2p export, or ask for an invitation to another run",
            )

    def _hear_organiser(self, words: Words) -> None:
        self.driver.choose(words.children)
        if words.last_round != self.last_round:
            self.last_round = words.last_round
            text = f"the organiser ends the run with round {self.last_round}: then this peer saves and goes"
            self.gate.notice(Notice("ending", text))

    def _check_options(self) -> Config | None:
        """What can be checked before anybody is asked; the config that the run must have, where one was given."""
        options = self._options
        split_overrides(options.overrides)
        return None if options.config_path is None else load_config(config_path(options.config_path))

    async def _enter(self, columns_that_fit: int) -> Commit:
        network, config, info = self._network, self.config, self._info
        assert network is not None
        self.intent = self._first_intent(columns_that_fit)
        intent = self._wished()
        self._announcer = Announcer(
            info, network.transport, network.directory, self._describe, self._newest, self.gate.failed, self._contacts,
            learnt=self._greet,
        )  # fmt: skip
        await self._announcer.start()
        self._start_feeding()
        folder = self._options.output / RUN
        run, node = Run(info, config, self.layout), Node(network, self.clock, self._say)
        joining = Joining(run, node, folder, self._options.output / CHECKPOINTS)
        place = await joining.enter(intent, self._announcer.sources)
        data = None
        if self._shelf is not None:
            data = PieceServing(self._shelf, self._data_traffic, lambda: self._sources.packed).answer
        self._disk = disk = open_disk(place, folder, self.layout, data)
        with storing(folder, 0):
            disk.moments = MomentStore(folder / "moments", self.layout)
        role = Role(intent, tuple(await self._announcer.sources()), follow=self._options.follow)
        self._driver = build_driver(run, node, place.tip, disk, role, self.gate)
        FlightRecorder(
            self._options.output / "flight", info, say=lambda text: self.gate.notice(Notice("recorder", text))
        ).attach(self._driver.core)
        self._data_traffic.begin_rounds()
        self.gate.attach(self._driver, asyncio.get_running_loop())
        await self._driver.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_daemon(network))
        self._organiser = OrganiserWatch(
            info, network.directory, node.checker.check, self._hear_organiser, self.gate.failed, folder / WORDS_FILE
        )
        await self._organiser.start()
        self._is_in = True
        self._tell()  # it may have been paused meanwhile
        self._beats = Tasks(self.gate.failed)
        self._beats.spawn(self._settle_pauses())
        return place.tip

    def _first_intent(self, columns_that_fit: int) -> Intent:
        assert self._network is not None
        options, experts_per_peer = self._options, self.config.swarm.experts_per_peer
        return Intent(
            joining=True,
            max_columns=column_budget(options, experts_per_peer, columns_that_fit, self.layout.num_columns),
            claims=options.owned_experts or (),
            link_class=LINK_PRIVATE if self._network.client_mode else LINK_PUBLIC,
            uplink_bytes_per_second=int(options.network.max_upload or 0),
        )

    async def _watch_daemon(self, network: HivemindNetwork) -> None:
        try:
            await network.keep_alive(lambda text: self.gate.notice(Notice("network", text)))
        except Exception as error:  # noqa: BLE001 (nobody waits for this task)
            self.gate.failed(error)

    def _greet(self, known: Iterable[PeerId]) -> None:
        """Who is in the DHT and no member of ours hears from us: it may stand on another history of the run."""
        if self._driver is not None:
            self._driver.greet(known)
        if self._announcer is not None and self._known_nodes is not None:
            self._known_nodes.learnt(self._announcer.known.values())

    def _contacts(self) -> tuple[PeerId, ...]:
        return tuple(self._driver.core.state.others.contacts) if self._driver is not None else ()

    def _newest(self) -> tuple[Commit, float] | None:
        """The newest commit here, and when it came."""
        commit = self._driver.core.state.own.commit if self._driver is not None else None
        if commit is None:
            return None
        if self._tip is None or self._tip[0] is not commit:  # its file goes before it does, where another history won
            self._tip = commit, self.disk.chain.received_of(commit.manifest) or time.time()
        return self._tip

    def _describe(self) -> PeerRecord:
        assert self._network is not None
        transport, core = self._network.transport, self._driver.core if self._driver else None
        return PeerRecord(
            run_id=self._info.run_id,
            peer=self.peer_id,
            addresses=() if self._network.client_mode else transport.addresses[:16],
            version=__version__,
            round=core.tip.round if core else 0,
            step=self.progress.step,
            tokens=self.progress.tokens,
            tokens_per_second=min(self.progress.tokens_per_second, MAX_SPEED),
            owned=columns_of(core.tip.ownership, self.peer_id) if core and core.state.is_member() else (),
            role="peer",
            client_mode=self._network.client_mode,
            joined_at_seconds=self._joined_at,
            data_pieces=self._shelf.held if self._shelf is not None and core is not None else 0,
            held=self._held() if core is not None else Held(),
            vitals=self.vitals.now(self._phase(core)),
        )

    def _phase(self, core: Consensus | None) -> str:
        if self._pause_asked:
            return "paused"
        return phase_of(core.state.round) if core is not None and core.state.is_member() else "waiting"

    # ---- the end ----

    def limit_columns(self, fit: int) -> bool:
        """Asks for no more expert columns than there is memory for, if nobody has set it; whether that is news."""
        if self._options.max_experts is not None or fit >= self.intent.max_columns:
            return False
        self.intent = replace(self.intent, max_columns=fit)
        self._tell()
        return True

    def pause(self, paused: bool) -> None:
        """Who does not train asks for no columns: others take them over, if there are any. For any thread."""
        self._pause_asked = paused
        self._settle_pause()

    def _settle_pause(self) -> None:
        paused = self._pause_asked and (not self._is_in or self._has_company())
        if paused != self._paused:
            self._paused = paused
            self._tell()

    async def _settle_pauses(self) -> None:
        """Others may come, and go, while this peer pauses."""
        while True:
            self._settle_pause()
            await asyncio.sleep(self.config.swarm.heartbeat_seconds)

    def leave(self) -> None:
        """Tells the others that this peer goes; what it has trained so far counts."""
        self.intent = replace(self.intent, leaving=True)
        self._tell()

    def _has_company(self) -> bool:
        return any(status.intent.joining and not status.intent.leaving for status in self.others())

    def _wished(self) -> Intent:
        return replace(self.intent, max_columns=0, claims=()) if self._paused else self.intent

    def _tell(self) -> None:
        if self._is_in:
            self.gate.wish(self._wished())

    def close(self) -> None:
        """Ends driver, records and network. What is on disk stays."""
        self._thread.run(self._close())

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for tasks in (self._beats, self._feeding):
            if tasks is not None:
                await tasks.stop()
        if self._web is not None:
            await self._web.close()
        if self._organiser is not None:
            await self._organiser.stop()
        if self._driver is not None:
            await self._driver.stop()
        if self._announcer is not None:
            await self._announcer.stop()
        if self._network is not None:
            await self._network.close()
        if self._disk is not None:
            self._disk.store.close()
        if self._feed is not None:
            self._feed.cache.close()


def check_organiser(expected: PeerId | None, info: RunInfo) -> None:
    """Raises RemoteProtocolError where the run is not that of the organiser who invited."""
    if expected not in (None, info.organiser):
        raise RemoteProtocolError(
            f"run {info.run_id} is of the organiser {info.organiser}, the invitation of {expected}",
            fix="ask who invited you for another invitation",
        )


def _check_same(ours: Config, theirs: Config, info: RunInfo) -> None:
    """Raises PermanentError naming the fields in which a local config differs from the run's."""
    wrong = differences(ours, theirs)
    if wrong:
        shown = ", ".join(f"{item.key} is {item.ours!r} here and {item.theirs!r} there" for item in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PermanentError(
            f"--config has another fingerprint than run {info.run_id}: {shown}{more}",
            fix="leave --config out (the run's config comes from the swarm), or join the right run with --run-id",
        )
