"""`run_bootstrap`: the organiser's node, which needs no GPU. It founds the DHT, signs genesis, and follows the run.

With `BootstrapOptions.mirror` it does the same for a run that somebody else began, but signs nothing (`mirror.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
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
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.interop.own import Model, run_layout
from spes_p2p.observe.sinks import unfailing
from spes_p2p.peer.contacts import Contacts, kept_addresses
from spes_p2p.peer.data_feed import DATA
from spes_p2p.peer.folder import claim_folder, kept_run, make_folder, open_archive
from spes_p2p.peer.herald import commit_lines, genesis_lines, how_to_join, introduction, join_command, order_lines
from spes_p2p.peer.mirror import Mirror
from spes_p2p.peer.network import open_network
from spes_p2p.peer.node_metrics import NodeState, measuring, state_of_node, state_of_run
from spes_p2p.peer.options import DEFAULT_MAX_DATA_DISK, JoinTarget, NetworkOptions, config_path
from spes_p2p.peer.remote_archive import RemoteArchive, RemoteFolder
from spes_p2p.peer.run_data import open_run_data
from spes_p2p.peer.start_state import make_own_start, make_start, start_folder, start_from, start_from_own
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.ports import MonotonicClock
from spes_p2p.swarm.records import MAX_ADDRESSES, PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch, Words
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.organising.renewer import RENEWALS
from spes_p2p.sync.organising.seat import Duty, Seat
from spes_p2p.sync.passes import PASSES_FILE, Doorkeeper
from spes_p2p.sync.starting import zeros
from spes_p2p.sync.web_sources import SourceKeeper

Say = Callable[[str], None]
HERALD_SECONDS = 1.0
LEAVE_SECONDS = 8.0


@dataclass(frozen=True)
class BootstrapOptions:
    """`config_path` None: only a DHT node. `folder` keeps identity, genesis, certificates and the initial state.

    `archive`: where to keep the newest state too, a folder or a URL that fsspec opens (None: nowhere). `init_from`: a
    Hugging Face folder, or ORG/NAME of the hub, whose values the run starts from (None: made from its seed). `model`: a
    model of one's own that the run trains. `serve`: take part, without training, as the public peer of the others.
    `mirror`: the run to mirror, in the place of a config; `max_data_disk`: bytes of its data that are copied, where
    `data` names no copy. `metrics_port`: where Prometheus may ask at `metrics_host` (None: nowhere).
    """

    network: NetworkOptions
    folder: Path
    config_path: Path | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()
    archive: str | None = None
    init_from: Path | None = None
    model: Model | None = None
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
    make_folder(options.folder)
    run = await _read_run(options, say) if options.config_path is not None else None
    with contextlib.suppress(Stopped):
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
    if options.archive is not None and "://" in options.archive:
        RemoteFolder(options.archive)  # now, not when terabytes of data have been hashed
    if options.serve and options.config_path is None and options.mirror is None:
        raise ConfigError("--serve needs a run to serve", fix="give the run with --config")
    if options.serve and _archive_folder(options) is not None:
        raise ConfigError(
            "--serve already keeps the newest state in --output; --archive would keep it twice",
            fix="leave --archive out, or give it a URL",
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
    elif options.model is not None:
        config = start_from_own(options.model, config, options.folder)
    at_hand = start if start is not None and start.is_dir() else None  # once the run has begun it may be gone
    return _Found(*await open_run_data(config, options.folder / DATA, at_hand, say))


async def _serve(options: BootstrapOptions, run: _Found | None, say: Say, ready: Callable[[str], None]) -> None:
    network = await _open(options)
    try:
        check_dialable(network)
        if options.mirror is not None:
            await _mirror(options, options.mirror, network, say, ready)
        elif run is None:
            say(f"DHT node at {' '.join(network.transport.addresses)}")
            async with _measuring(options, "", network, partial(state_of_node, network.transport), say):
                await network.keep_alive(say)
        else:
            dataset = run.data.grid.catalogue.dataset_hash if run.data is not None else NO_HASH
            info = describe_run(run.config, dataset, network.signer.peer_id)
            await _organise(options, run, info, network, say, ready)
    finally:
        await network.close()


async def _mirror(
    options: BootstrapOptions, meeting: JoinTarget, network: HivemindNetwork, say: Say, ready: Callable[[str], None]
) -> None:
    mirror = await Mirror.find(network, meeting, options.folder, say)
    try:
        data = await mirror.open_data(options.data, options.max_data_disk)
        await _organise(options, _Found(mirror.config, data, mirror), mirror.info, network, say, ready)
    finally:
        await mirror.close()


async def _open(options: BootstrapOptions) -> HivemindNetwork:
    """Joins the DHT of the given initial peers and of the nodes that this node knew before its last restart.

    A node that already holds a run can do without them: if none of them answers, it starts a new DHT.
    """
    identity, fingerprint = options.folder / "identity.key", options.mirror.fingerprint if options.mirror else None
    given, known = options.network.initial_peers, kept_addresses(options.folder, fingerprint)
    everybody = replace(options.network, initial_peers=tuple(dict.fromkeys((*given, *known))))
    is_needed = given and (options.mirror is None or kept_run(options.folder, fingerprint) is None)
    if is_needed or not everybody.initial_peers:
        return await open_network(everybody, identity)
    with contextlib.suppress(NetworkError):
        network = await open_network(everybody, identity)
        if not network.client_mode:
            return network
        await network.close()  # that a few peers could not dial it is no reason not to be there for the others
    return await open_network(replace(options.network, initial_peers=()), identity)


def check_dialable(network: HivemindNetwork) -> None:
    """Raises NetworkError where others have tried to dial this node and could not: nobody would come."""
    if network.client_mode:
        raise NetworkError(
            "nobody can dial this machine (NAT or a firewall), so nobody could join through it",
            fix="forward a TCP port to it, listen there with --port PORT, and name the address "
            "that others see with --announce-maddrs /ip4/ADDRESS/tcp/PORT",
        )


async def _organise(
    options: BootstrapOptions,
    found: _Found,
    info: RunInfo,
    network: HivemindNetwork,
    say: Say,
    ready: Callable[[str], None],
) -> None:
    config, data, mirror = found.config, found.data, found.mirror
    layout = run_layout(config, options.model)
    run, node = Run(info, config, layout), Node(network, MonotonicClock(), say)
    folder = options.folder / "run"
    claim_folder(folder, info, layout, network.signer.peer_id)
    async with contextlib.AsyncExitStack() as stack:
        store = StateStore(folder / "state", layout)
        stack.callback(store.close)
        chain = Chain(folder / "chain")
        remote = _remote_archive(options, run, node, network)
        if remote is not None:
            await remote.restore_chain(chain, folder / RENEWALS)
        if store.latest() is None and config.run.initial_state and chain.length and options.init_from is None:
            await asyncio.to_thread(store.create_initial, zeros)
        if mirror is not None and config.run.initial_state and store.latest() is None:
            await mirror.fetch_initial(store)
        await _make_initial(store, layout, config, options, say)
        if (archive := _archive_folder(options)) is not None:
            store = open_archive(archive, info, store)
            stack.callback(store.close)
        if remote is not None:
            await remote.restore_state(store, chain)
        trouble = asyncio.get_running_loop().create_future()
        serve_data = None
        if data is not None:
            keeper = SourceKeeper(info, node.checker.check, options.folder / DATA)
            if mirror is None:
                keeper.publish(config.data.urls, time.time_ns() // 1000, node.sealer)
            serve_data = PieceServing(data, DataTraffic(), lambda: keeper.packed).answer
        files = RunFiles(folder, chain, store, serve_data)
        seat = Seat(
            run, node, files, _duty(options), lambda: announcer.sources(), _once(trouble), options.network.max_upload
        )
        organiser = Organiser(seat)
        stack.push_async_callback(organiser.stop)
        contacts = Contacts(options.folder, info, network.signer.peer_id, options.network.initial_peers)
        announcer = Announcer(NodePresence(run, network, chain, data, contacts, seat), info, network, _once(trouble))
        stack.push_async_callback(announcer.stop)
        await organiser.start()
        await announcer.start()
        stack.push_async_callback(seat.leave, LEAVE_SECONDS)
        watch = OrganiserWatch(
            info, network.directory, node.checker.check, _hearing(organiser, say), _once(trouble),
            folder / WORDS_FILE,
        )  # fmt: skip
        stack.push_async_callback(watch.stop)
        await watch.start()
        for line in introduction(config, info, chain.newest):
            say(line)
        for line in how_to_join(contacts.word, options.folder, network.transport.addresses):
            say(line)

        def look() -> NodeState:
            return state_of_run(network.transport, chain, announcer, organiser, _held(data))

        await stack.enter_async_context(_measuring(options, info.run_id, network, look, say))
        ready(join_command(network.transport.addresses, info))
        chores = [_report_commits(chain, say), network.keep_alive(say)]
        if network.signer.peer_id == info.organiser and config.swarm.electors == "vouched":
            keeper_of_passes = Doorkeeper(info, node.checker.check, node.sealer, folder / PASSES_FILE)
            chores.append(_admit(keeper_of_passes, announcer, watch))
        if remote is not None:
            chores.append(remote.keep(lambda: seat.kept, chain, store, folder / RENEWALS))
        if mirror is not None:
            chores += [mirror.await_genesis(organiser, store), mirror.copy_data(announcer)]
            if data is not None:
                chores.append(
                    keeper.look_on(network.transport, lambda: tuple(announcer.known), lambda: run.stall_seconds)
                )
        await _first_failure(trouble, *chores)


def _archive_folder(options: BootstrapOptions) -> Path | None:
    """Where states are kept on this disk; what is copied to a URL comes from there, or from a node that serves."""
    if options.archive is None or "://" not in options.archive:
        return Path(options.archive) if options.archive is not None else None
    return None if options.serve else options.folder / "archive"


def _remote_archive(options: BootstrapOptions, run: Run, node: Node, network: HivemindNetwork) -> RemoteArchive | None:
    if options.archive is None or "://" not in options.archive:
        return None
    up, down = network.transport.traffic.upload, network.transport.traffic.download
    return RemoteArchive(
        RemoteFolder(options.archive), run, node.checker.check, node.say,
        partial(up.take, urgent=False), partial(down.take, urgent=False),
    )  # fmt: skip


def _duty(options: BootstrapOptions) -> Duty:
    if options.serve:
        return Duty.SERVER
    return Duty.CERTIFICATES if options.archive is None else Duty.ARCHIVE


def _measuring(
    options: BootstrapOptions, run_id: str, network: HivemindNetwork, look: Callable[[], NodeState], say: Say
) -> contextlib.AbstractAsyncContextManager[None]:
    """Serves this node's metrics to Prometheus while the block runs, if `--metrics-port` was given."""
    return measuring(options.metrics_port, options.metrics_host, run_id, network.signer.peer_id, look, say)


def _hearing(organiser: Organiser, say: Say) -> Callable[[Words], None]:
    """A callback that reports the organiser's orders and obeys them."""
    before = Words()

    def told(words: Words) -> None:
        nonlocal before
        for line in order_lines(words, before, organiser.chain.newest):
            say(line)
        organiser.seat.obey(words)
        before = words

    return told


async def _make_initial(store: StateStore, layout: Layout, config: Config, options: BootstrapOptions, say: Say) -> None:
    if store.latest() is not None:
        return
    if options.model is not None:
        work = partial(make_own_start, store, config, options.model)
    elif config.run.initial_state:
        work = partial(make_start, store, layout, config, options.init_from)
    else:
        say("computing the initial state")
        initial = InitialState(layout, config.run.seed, config.model.init_std)
        work = partial(store.create_initial, initial)
    await asyncio.to_thread(work)


async def _report_commits(chain: Chain, say: Say) -> None:
    """Reports each new commit of the chain through `say`, for ever."""
    told = chain.length
    while True:
        for round in range(told, chain.length):
            if (commit := chain.find(round)) is None:  # another history won in this moment
                break
            before = chain.parent_of(commit.manifest)
            for line in genesis_lines(commit.manifest) if before is None else commit_lines(commit, before):
                say(line)
        told = chain.length
        await asyncio.sleep(HERALD_SECONDS)


async def _admit(keeper: Doorkeeper, announcer: Announcer, watch: OrganiserWatch) -> None:
    """Vouches for the peers that bring a pass, for ever."""
    while True:
        watch.take(keeper.admitted(watch.known, {peer: record.token for peer, record in announcer.known.items()}))
        await asyncio.sleep(HERALD_SECONDS)


def _held(data: PieceSource | None) -> int:
    return data.held if data is not None else 0


class NodePresence:
    """What the Announcer of a bootstrap node speaks for."""

    def __init__(
        self,
        run: Run,
        network: HivemindNetwork,
        chain: Chain,
        data: PieceSource | None,
        contacts: Contacts,
        seat: Seat,
    ) -> None:
        self._run, self._network, self._chain, self._data = run, network, chain, data
        self._contacts, self._seat = contacts, seat
        self._started = int(time.time())

    def describe(self) -> PeerRecord:
        """The record of now."""
        newest = self._chain.newest
        return PeerRecord(
            run_id=self._run.info.run_id,
            peer=self._network.signer.peer_id,
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
        self._seat.greet(peer for peer in known if peer != self._network.signer.peer_id)
        self._contacts.learnt(known.values())


async def _first_failure(trouble: asyncio.Future[None], *work: Coroutine[Any, Any, None]) -> None:
    """Runs all of `work`, which never ends well, until one fails or `trouble` does."""
    tasks = [asyncio.ensure_future(one) for one in (trouble, *work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _once(future: asyncio.Future[None]) -> Callable[[BaseException], None]:
    return lambda error: None if future.done() else future.set_exception(error)
