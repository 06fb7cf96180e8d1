"""`run_bootstrap`: the organiser's node, which needs no GPU. It founds the DHT, signs genesis, and follows the run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spes_p2p import __version__
from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.loader import open_dataset
from spes_p2p.errors import ConfigError, NetworkError
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.interop.hf import state_tensors
from spes_p2p.peer.connection import MonotonicClock, open_network
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.joining import rules_of
from spes_p2p.sync.organiser import Organiser
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer

Say = Callable[[str], None]


@dataclass(frozen=True)
class BootstrapOptions:
    """`config_path` None: only a DHT node. `folder` keeps identity, genesis, certificates and the initial state."""

    network: NetworkOptions
    folder: Path
    config_path: Path | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()


def run_bootstrap(options: BootstrapOptions, say: Say, ready: Callable[[str], None] = lambda command: None) -> None:
    """Runs until SIGINT or SIGTERM. `ready` is called with the join command once peers can come."""
    options.folder.mkdir(parents=True, exist_ok=True)
    run = _read_run(options) if options.config_path is not None else None
    with NetworkThread() as thread:
        stop = asyncio.Event()

        def end(number: int, frame: object) -> None:
            thread.loop.call_soon_threadsafe(stop.set)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            thread.run(_serve(options, run, say, ready, stop))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _read_run(options: BootstrapOptions) -> tuple[Config, Hash]:
    """The config and the hash of its dataset; NO_HASH where peers bring data of their own."""
    assert options.config_path is not None
    overrides = list(options.overrides)
    if options.data is not None:
        overrides.append(f"data.path={options.data}")
    config = load_config(options.config_path, overrides)
    if config.data.source == "local":
        return config, NO_HASH
    if not config.data.path:
        raise ConfigError(
            "the run leases data, but no dataset is given",
            fix="give the folder of the token shards with --data, or let peers bring their own: data.source=local",
        )
    return config, open_dataset(config).dataset_hash


async def _serve(
    options: BootstrapOptions,
    run: tuple[Config, Hash] | None,
    say: Say,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    network = await open_network(options.network, options.folder / "identity.key")
    try:
        if run is None:
            say(f"DHT node at {' '.join(network.transport.addresses)}")
            await _until(stop, network)
            return
        config, dataset = run
        info = describe_run(config, dataset, network.signer.peer_id)
        await _organise(options, config, info, network, say, ready, stop)
    finally:
        await network.close()


async def _organise(
    options: BootstrapOptions,
    config: Config,
    info: RunInfo,
    network: HivemindNetwork,
    say: Say,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    layout = Layout(state_tensors(config.model), config.sync.tile_values)
    folder = options.folder / "run"
    store = StateStore(folder / "state", layout)
    try:
        chain = Chain(folder / "chain")
        _check_chain(chain, info, folder)
        if store.latest() is None:
            say("computing the initial state")
            initial = InitialState(layout, config.run.seed, config.model.init_std)
            await asyncio.get_running_loop().run_in_executor(None, lambda: store.create_initial(initial))
        organiser = Organiser(
            info,
            rules_of(config, info, layout),
            config.swarm.min_peers,
            config.swarm.heartbeat_seconds,
            network.transport,
            KeySealer(network.signer),
            EnvelopeChecker(network.verifier),
            chain,
            store,
            MonotonicClock(),
            say,
        )
        await organiser.start()
        announcer = Announcer(
            info, network.transport, network.directory, _describer(info, network, chain, options), lambda: chain.newest
        )
        await announcer.start()
        say(f"run {info.run_id}, fingerprint {info.fingerprint.hex()}")
        ready(join_command(network.transport.addresses, info))
        await _until(stop, network)
        await announcer.stop()
        await organiser.stop()
    finally:
        store.close()


def _check_chain(chain: Chain, info: RunInfo, folder: Path) -> None:
    """A folder serves one run for ever: a second genesis for it would split the swarm."""
    if chain.length and chain.commit(0).manifest.fingerprint != info.fingerprint:
        raise ConfigError(
            f"{folder} holds another run, fingerprint {chain.commit(0).manifest.fingerprint.hex()[:16]}",
            fix="give the config that it began with, or another --output for a new run",
        )


def _describer(
    info: RunInfo, network: HivemindNetwork, chain: Chain, options: BootstrapOptions
) -> Callable[[], PeerRecord]:
    started = int(time.time())

    def describe() -> PeerRecord:
        newest = chain.newest
        return PeerRecord(
            run_id=info.run_id,
            peer=PeerId(network.signer.peer_id),
            addresses=network.transport.addresses[:16],
            version=__version__,
            round=newest.manifest.round if newest else 0,
            step=newest.manifest.step if newest else 0,
            tokens=0,
            tokens_per_second=0.0,
            owned=(),
            role="bootstrap",
            client_mode=options.network.client_mode,
            joined_at_seconds=started,
        )

    return describe


def join_command(addresses: tuple[str, ...], info: RunInfo) -> str:
    """What a volunteer types; loopback addresses only where there are no others."""
    outside = [address for address in addresses if "/127.0.0.1/" not in address and "/::1/" not in address]
    return f"spes-p2p join --initial-peers {' '.join(outside or addresses)} --run-id {info.run_id}"


async def _until(stop: asyncio.Event, network: HivemindNetwork) -> None:
    """Until told to stop. Raises NetworkError when the libp2p daemon ends first."""
    ends = [asyncio.ensure_future(event.wait()) for event in (stop, network.daemon_ended)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    if not stop.is_set():
        raise NetworkError("the libp2p daemon ended", fix="start the bootstrap node again, it goes on")
