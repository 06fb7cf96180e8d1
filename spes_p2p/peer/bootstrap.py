"""`run_bootstrap`: the organiser's node, which needs no GPU. It founds the DHT, signs genesis, and follows the run.

With `BootstrapOptions.mirror` it does the same for a run that somebody else began, but signs nothing (`mirror.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from spes_p2p import __version__
from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import ConfigError, NetworkError, Stopped
from spes_p2p.exchange.pieces import DataTraffic, PieceServing, PieceSource, held_by
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.files import made_folder, on_a_sound_disk
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.sinks import unfailing
from spes_p2p.peer.contacts import Contacts, kept_addresses
from spes_p2p.peer.data_feed import DATA
from spes_p2p.peer.entrance import check_dialable
from spes_p2p.peer.folder import as_it_began, claim_folder, kept_run, open_archive
from spes_p2p.peer.herald import commit_lines, genesis_lines, how_to_join, introduction, join_command, order_lines
from spes_p2p.peer.mirror import Mirror
from spes_p2p.peer.network import open_network
from spes_p2p.peer.node_metrics import NodeState, measuring, state_of_node, state_of_run
from spes_p2p.peer.options import DEFAULT_MAX_DATA_DISK, JoinTarget, NetworkOptions, config_path
from spes_p2p.peer.run_data import open_run_data
from spes_p2p.peer.start_state import make_start, start_folder, start_from
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.state.initial import InitialState
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.ports import Blob, MonotonicClock
from spes_p2p.swarm.records import MAX_ADDRESSES, PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.chain_mending import opened_chain
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch, Words
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.organising.seat import Duty, Seat
from spes_p2p.sync.passes import PASSES_FILE, Doorkeeper, full_roll_line
from spes_p2p.sync.starting import zeros
from spes_p2p.sync.web_sources import SourceKeeper

Say = Callable[[str], None]
HERALD_SECONDS = 1.0
LEAVE_SECONDS = 8.0
READ_SECONDS = 10.0


@dataclass(frozen=True)
class BootstrapOptions:
    """`config_path` None: only a DHT node. `folder` keeps identity, genesis, certificates and the initial state.

    `archive`: a folder to keep the newest state in too (None: nowhere). `init_from`: a Hugging Face folder, or ORG/NAME
    of the hub, whose values the run starts from (None: made from its seed). `serve`: take part, without training, as
    the public peer of the others. `mirror`: the run to mirror, in the place of a config; `max_data_disk`: bytes of its
    data that are copied, where `data` names no copy. `metrics_port`: where Prometheus may ask at `metrics_host` (None:
    nowhere).
    """

    network: NetworkOptions
    folder: Path
    config_path: Path | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()
    archive: Path | None = None
    init_from: Path | None = None
    serve: bool = False
    mirror: JoinTarget | None = None
    max_data_disk: int = DEFAULT_MAX_DATA_DISK
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"


def run_bootstrap(options: BootstrapOptions, say: Say, ready: Callable[[str], None] = lambda command: None) -> None:
    """Runs until SIGINT or SIGTERM. `ready` is called with the join command once peers can come."""
    options = with_start_folder(options, say)
    with NetworkThread() as thread:
        stop = asyncio.Event()
        with leaving_on_signals(lambda: thread.loop.call_soon_threadsafe(stop.set), say):
            thread.run(serve_until(stop, options, say, ready))


async def serve_until(
    stop: asyncio.Event, options: BootstrapOptions, say: Say, ready: Callable[[str], None] = lambda command: None
) -> None:
    """As `run_bootstrap`, but on the running loop and until `stop` is set. Ignores an OSError from `say`."""
    say, ready = unfailing(say), unfailing(ready)
    _check(options)
    with contextlib.suppress(Stopped), made_folder(options.folder), on_a_sound_disk(options.folder):
        run = await _read_run(options, say) if options.config_path is not None else None
        await until_stopped(stop, _serve(options, run, say, ready))


def with_start_folder(options: BootstrapOptions, say: Say) -> BootstrapOptions:
    """With the model that the run starts from on this machine: one of the hub is downloaded, which may take long."""
    return replace(options, init_from=start_folder(options.init_from, options.folder, say))


def _check(options: BootstrapOptions) -> None:
    if options.mirror is not None and (options.config_path or options.overrides or options.init_from):
        raise ConfigError(
            "--mirror serves an existing run, so it cannot be combined with --config, overrides or --init-from",
            fix="leave these out",
        )
    if options.serve and options.config_path is None and options.mirror is None:
        raise ConfigError("--serve needs a run to serve", fix="give the run with --config")
    if options.serve and options.archive is not None:
        raise ConfigError(
            "--serve already keeps the newest state in --output; --archive would keep it twice",
            fix="leave --archive out",
        )


@dataclass(frozen=True)
class _Found:
    """The run to serve. `data`: None if peers bring their own. `mirror`: set if somebody else started the run."""

    config: Config
    data: PieceSource | None
    mirror: Mirror | None = None


async def _read_run(options: BootstrapOptions, say: Say) -> _Found:
    """What `open_run_data` makes of the config that was given."""
    assert options.config_path is not None
    overrides = list(options.overrides)
    if options.data is not None:
        overrides.append(f"data.path={options.data}")
    config = load_config(config_path(options.config_path), overrides)
    start = options.init_from
    if start is not None:
        config = start_from(start, config, options.folder, say)
    at_hand = start if start is not None and start.is_dir() else None  # once the run has begun it may be gone
    return _Found(*await open_run_data(config, options.folder / DATA, at_hand, say))


async def _serve(options: BootstrapOptions, run: _Found | None, say: Say, ready: Callable[[str], None]) -> None:
    network = await _open(options)
    try:
        check_dialable(network)
        # from the first moment on: what a node makes or fetches before it serves may take hours
        await _first_failure(network.keep_alive(say), _serve_on(network, options, run, say, ready))
    finally:
        await network.close()


async def _serve_on(
    network: HivemindNetwork, options: BootstrapOptions, run: _Found | None, say: Say, ready: Callable[[str], None]
) -> None:
    if options.mirror is not None:
        await _mirror(options, options.mirror, network, say, ready)
    elif run is None:
        say(f"DHT node at {' '.join(network.transport.addresses)}")
        me, look = network.signer.peer_id, partial(state_of_node, network.transport)
        async with measuring(options.metrics_port, options.metrics_host, "", me, look, say):
            await asyncio.Event().wait()
    else:
        dataset = run.data.grid.catalogue.dataset_hash if run.data is not None else NO_HASH
        info = as_it_began(options.folder, describe_run(run.config, dataset, network.signer.peer_id))
        await RunNode(options, run, info, network, say).serve(ready)


async def _mirror(
    options: BootstrapOptions, meeting: JoinTarget, network: HivemindNetwork, say: Say, ready: Callable[[str], None]
) -> None:
    mirror = await Mirror.find(network, meeting, options.folder, say)
    try:
        data = await mirror.open_data(options.data, options.max_data_disk)
        found = _Found(mirror.run.config, data, mirror)
        await RunNode(options, found, mirror.run.info, network, say).serve(ready)
    finally:
        await mirror.close()


async def _open(options: BootstrapOptions) -> HivemindNetwork:
    """Joins the DHT of the given initial peers and of the nodes that this node knew before its last restart.

    A node that already holds a run can do without them: if none of them answers, it starts a new DHT.
    """
    identity, fingerprint = options.folder / "identity.key", options.mirror.fingerprint if options.mirror else None
    given, known = options.network.initial_peers, kept_addresses(options.folder, fingerprint)
    everybody = replace(options.network, known_peers=known)
    is_needed = given and (options.mirror is None or kept_run(options.folder, fingerprint) is None)
    if is_needed or not (given or known):
        return await open_network(everybody, identity)
    with contextlib.suppress(NetworkError):
        network = await open_network(everybody, identity)
        if not network.client_mode:
            return network
        await network.close()  # that a few peers could not dial it is no reason not to be there for the others
    return await open_network(replace(options.network, initial_peers=()), identity)


class RunNode:
    """A bootstrap node in a run: what it opens, what goes on there, and (for its Announcer) what it says of itself."""

    def __init__(
        self, options: BootstrapOptions, found: _Found, info: RunInfo, network: HivemindNetwork, say: Say
    ) -> None:
        layout = state_layout(found.config)
        self._options = options
        self._config, self._data, self._mirror = found.config, found.data, found.mirror
        self._network, self._me = network, network.signer.peer_id
        self._info, self._say = info, say
        self._run, self._node = Run(info, found.config, layout), Node(network, MonotonicClock(), say)
        self._folder = options.folder / "run"
        claim_folder(self._folder, info, layout, self._me)
        self._sources = SourceKeeper(info, self._node.checker.check, options.folder / DATA)
        self._trouble = asyncio.get_running_loop().create_future()
        self._words = Words()
        self._started = int(time.time())

    async def serve(self, ready: Callable[[str], None]) -> None:
        """Until something fails. `ready` is called with the join command once peers can come."""
        options, network = self._options, self._network
        async with contextlib.AsyncExitStack() as ends:
            self._chain, store = await self._open(ends)
            files = RunFiles(self._folder, self._chain, store, self._answers())
            self._seat = seat = Seat(
                self._run, self._node, files, _duty(options), lambda: self._announcer.sources(), self._failed,
                options.network.max_upload,
            )  # fmt: skip
            self._organiser = organiser = Organiser(seat)
            ends.push_async_callback(organiser.stop)
            self._contacts = Contacts(options.folder, self._info, self._me, options.network.initial_peers)
            self._announcer = announcer = Announcer(self, self._info, network, self._failed)
            ends.push_async_callback(announcer.stop)
            await organiser.start()
            await announcer.start()
            ends.push_async_callback(seat.leave, LEAVE_SECONDS)
            self._watch = watch = OrganiserWatch(
                self._info, network.directory, self._node.checker.check, self._hear, self._failed,
                self._folder / WORDS_FILE,
            )  # fmt: skip
            ends.push_async_callback(watch.stop)
            lines = introduction(self._config, self._info, self._chain.newest, self._mirror is not None)
            addresses, brings_data = network.transport.addresses, self._info.dataset == NO_HASH
            for line in [*lines, *how_to_join(self._contacts.word, options.folder, addresses, brings_data)]:
                self._say(line)
            port, host = options.metrics_port, options.metrics_host
            await ends.enter_async_context(measuring(port, host, self._info.run_id, self._me, self._look, self._say))
            ready(join_command(network.transport.addresses, self._info))
            await watch.start()  # after that: where few answer, a look at the DHT takes long
            await _first_failure(self._trouble, *self._chores())

    # ---------------------------------------------------------------- the disk

    async def _open(self, ends: contextlib.AsyncExitStack) -> tuple[Chain, StateStore]:
        """The chain, and the store of all states that are kept; each with what it lacked."""
        store = StateStore(self._folder / "state", self._run.layout)
        ends.callback(store.close)
        others = partial(read_peers, self._network, self._info.run_id, READ_SECONDS)
        chain = await opened_chain(self._folder / "chain", self._run, self._node, others)
        if store.latest() is None:
            await self._make_initial(store, chain)
        if self._options.archive is not None:
            store = open_archive(self._options.archive, self._info, store)
            ends.callback(store.close)
        return chain, store

    async def _make_initial(self, store: StateStore, chain: Chain) -> None:
        options, config, layout = self._options, self._config, self._run.layout
        given = config.run.initial_state
        if given and chain.length and options.init_from is None:
            work = partial(store.create_initial, zeros)
        elif given and self._mirror is not None:
            await self._mirror.fetch_initial(store)
            return
        elif given:
            work = partial(make_start, store, layout, config, options.init_from)
        else:
            self._say("computing the initial state")
            work = partial(store.create_initial, InitialState(layout, config.run.seed, config.model.init_std))
        await asyncio.to_thread(work)

    def _answers(self) -> Callable[[DataRequest], Blob] | None:
        """For who asks this node for data; None where peers bring their own."""
        if self._data is None:
            return None
        if self._mirror is None:
            self._sources.publish(self._config.data.urls, time.time_ns() // 1000, self._node.sealer)
        return PieceServing(self._data, DataTraffic(), lambda: self._sources.packed).answer

    # ---------------------------------------------------------------- what goes on

    def _chores(self) -> list[Coroutine[Any, Any, None]]:
        """What never ends well."""
        transport, announcer, chores = self._network.transport, self._announcer, [self._report_commits()]
        if self._me == self._info.organiser and self._config.swarm.trusted == "vouched":
            chores.append(self._admit())
        if self._mirror is not None:
            chores += [self._mirror.await_genesis(self._organiser), self._mirror.copy_data(announcer)]
            if self._data is not None:
                known = self._sources.look_on(
                    transport, lambda: tuple(announcer.known), lambda: self._run.stall_seconds
                )
                chores.append(known)
        return chores

    def _failed(self, error: BaseException) -> None:
        if not self._trouble.done():
            self._trouble.set_exception(error)

    def _hear(self, words: Words) -> None:
        """Says what the organiser has ordered, and obeys."""
        for line in order_lines(words, self._words, self._chain.newest):
            self._say(line)
        self._seat.obey(words)
        self._words = words

    def _look(self) -> NodeState:
        return state_of_run(self._network.transport, self._chain, self._announcer, self._organiser, _held(self._data))

    async def _report_commits(self) -> None:
        """Says each new commit of the chain."""
        chain, told = self._chain, self._chain.length
        while True:
            for round in range(told, chain.length):
                if (commit := chain.find(round)) is None:  # another history won in this moment
                    break
                before = chain.parent_of(commit.manifest)
                for line in genesis_lines(commit.manifest) if before is None else commit_lines(commit, before):
                    self._say(line)
            told = chain.length
            await asyncio.sleep(HERALD_SECONDS)

    async def _admit(self) -> None:
        """Vouches for the peers that bring a pass."""
        keeper = Doorkeeper(
            self._info, self._node.checker.check, self._node.sealer, self._folder / PASSES_FILE,
            lambda peer, missing: self._say(full_roll_line(peer, self._options.folder, missing)), self._say,
        )  # fmt: skip
        while True:
            tokens = {peer: record.token for peer, record in self._announcer.known.items()}
            await keeper.admit(self._watch, tokens)
            await asyncio.sleep(HERALD_SECONDS)

    # ---------------------------------------------------------------- for the Announcer

    def describe(self) -> PeerRecord:
        """The record of now."""
        newest = self._chain.newest
        return PeerRecord(
            run_id=self._info.run_id,
            peer=self._me,
            addresses=self._network.transport.addresses[:MAX_ADDRESSES],
            version=__version__,
            round=newest.manifest.round if newest else 0,
            step=newest.manifest.step if newest else 0,
            tokens=0,
            tokens_per_second=0.0,
            owned=(),
            role="bootstrap",
            client_mode=self._network.client_mode,
            joined_at_seconds=self._started,
            data_pieces=_held(self._data),
            held=held_by(self._data),
        )

    def newest(self) -> tuple[Commit, float] | None:
        """The newest commit here, and when it came."""
        return self._chain.newest_received

    def acquaintances(self) -> tuple[PeerId, ...]:
        """The members by the newest commit."""
        newest = self._chain.newest
        return tuple(member.peer for member in newest.manifest.members) if newest is not None else ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        """Who is in the DHT and no member hears from us too."""
        self._seat.greet(peer for peer in known if peer != self._me)
        self._contacts.learnt(known.values())


def _duty(options: BootstrapOptions) -> Duty:
    if options.serve:
        return Duty.SERVER
    return Duty.CERTIFICATES if options.archive is None else Duty.ARCHIVE


def _held(data: PieceSource | None) -> int:
    return data.held if data is not None else 0


async def _first_failure(*work: Awaitable[None]) -> None:
    """Awaits all of `work`, which never ends well, until one fails."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
