"""One peer in the real network: starts the daemon, meets the initial peers, joins the DHT, and ends all of it again.

Where the daemon ends by itself, `restart` starts another one in its place: who uses the transport and the directory
goes on with the same objects, and others find the same peer at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler

from spes_p2p.errors import ClockSkewed, DaemonEnded, NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.locks import Scratch
from spes_p2p.swarm.hivemind_backend.daemon import (
    DAEMON_GONE,
    NO_LOOKUP,
    Daemon,
    socket_folder,
    start_daemon,
)
from spes_p2p.swarm.hivemind_backend.dial import is_listing, parse_address
from spes_p2p.swarm.hivemind_backend.directory import DHT_OPTIONS, EnvelopeValidator, HivemindDirectory
from spes_p2p.swarm.hivemind_backend.hello import HelloHandler
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile, RsaSigner, in_use
from spes_p2p.swarm.hivemind_backend.join import Reached, meet
from spes_p2p.swarm.hivemind_backend.reach import DialBackHandler, Reach, find_reach
from spes_p2p.swarm.hivemind_backend.storage import bound, weighing
from spes_p2p.swarm.hivemind_backend.transport import HivemindTransport
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.swarm.stream_server import DEFAULT_LIMITS, StreamLimits

DHTProtocol.node_info = dht_pb2.NodeInfo()  # hivemind takes calls before it has set it: until then it has no id to give
MAX_MESSAGE_BYTES = 16 * 2**20
"""A DHT node answers with all records of a key in one message; one that is larger would never be answered."""
_LEAVE_SECONDS = 5.0
_LOOKUP_SECONDS = 3.0
_MOST_ASKED = 16
MOST_RESTARTS = 5
RESTARTS_WITHIN_SECONDS = 600.0
"""A daemon that ends more often than `MOST_RESTARTS` in this time is not started again."""

_SCOUT = {"no_listen": True, "host_maddrs": None, "dht_mode": "client", "nat_port_map": False}
"""Options of a daemon that only looks at others."""

use_hivemind_log_handler("nowhere")  # our own logging decides what people see


class HivemindNetwork:
    """A running peer: `.transport`, `.directory`, `.signer`, `.verifier`; `close` ends it.

    All its coroutines run on the loop that started it: the one of a NetworkThread.
    """

    signer: RsaSigner
    verifier: RsaVerifier
    transport: HivemindTransport
    directory: HivemindDirectory
    daemon: Daemon
    client_mode: bool
    """It listens nowhere: told so, or found out that nobody can dial it."""
    reach: Reach = Reach.UNKNOWN
    dialled_at: str = ""
    """The address at which another peer has reached us, where one has tried."""
    reached: tuple[Reached, ...] = ()
    """The initial peers that answered at the start, with what their clocks said."""
    folder: str
    """Holds the daemon's sockets; temporary."""

    def __init__(
        self,
        initial_peers: Sequence[str],
        known_peers: Sequence[str],
        options: dict[str, Any],
        wall_clock: Callable[[], float],
    ) -> None:
        """Nothing runs before `start`. `options`: those of the daemon."""
        self._initial_peers = list(dict.fromkeys((*initial_peers, *known_peers)))
        self._quiet = set(known_peers) - set(initial_peers)
        self._options, self._wall_clock = options, wall_clock
        self._stack = AsyncExitStack()
        self._life = AsyncExitStack()
        """The daemon of now, and its place in the DHT."""

    @classmethod
    async def start(  # noqa: PLR0913 (what a person may choose)
        cls,
        initial_peers: Sequence[str] = (),
        identity_path: Path | None = None,
        host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        client_mode: bool = False,
        limits: StreamLimits = DEFAULT_LIMITS,
        wall_clock: Callable[[], float] = time.time,
        known_peers: Sequence[str] = (),
    ) -> HivemindNetwork:
        """Joins the DHT of `initial_peers` and `known_peers`, or founds one when there are none.

        `identity_path`: made on first use; None for an identity of this run alone. `client_mode`: listens nowhere, and
        is reached through the connections that it opens; so it is, too, where a peer that was asked to dial it could
        not (see `reach`). `wall_clock` is compared with that of the initial peers. `known_peers` are asked as well, but
        nobody gave them: if others answer, nothing is said of those that do not.
        Raises NetworkError (a reason for each initial peer; DaemonEnded), IdentityInUse, ClockSkewed, ConfigError.
        """
        options = _daemon_options(host_maddrs, announce_maddrs, client_mode)
        self = cls(initial_peers, known_peers, options, wall_clock)
        try:
            self._take_identity(identity_path)
            await self.daemon.work(self._start(limits, tuple(filter(is_listing, announce_maddrs))))
        except BaseException:
            await self.close()
            raise
        return self

    def _take_identity(self, path: Path | None) -> None:
        self._folder = folder = socket_folder()
        self._stack.callback(folder.remove)
        self.folder = str(folder.path)
        self._identity = identity = IdentityFile(path or folder.path / "identity")
        self._stack.callback(identity.release)
        self.signer, self.verifier = identity.signer, RsaVerifier()
        self.daemon = Daemon(folder, identity.path)

    async def _start(self, limits: StreamLimits, names: tuple[str, ...]) -> None:
        if self._identity.existed and self._initial_peers:
            await _check_identity_free(self._folder, self._identity, self._initial_peers, self._wall_clock)
        self.client_mode = self._options["dht_mode"] == "client"
        await self._start_daemon()
        self.transport = HivemindTransport(self.daemon, limits)
        self.transport.own_addresses.names = names
        await self._attach()
        reached = await self._meet(self._initial_peers, self._quiet)
        if reached and await self._is_hidden(reached):
            reached = await self._hide()
        validator = EnvelopeValidator(self.verifier)
        node = await self._join_dht(reached, validator)
        self.directory = HivemindDirectory(
            node, self.signer, self.verifier, validator, self.daemon, self.transport.connections.connect,
            self.transport.is_member,
        )  # fmt: skip
        self.reached = tuple(reached)
        for one in reached:
            self.transport.learn(one.peer, (one.address,))

    async def _start_daemon(self) -> None:
        await self.daemon.start(self._options)
        self._life.push_async_callback(self.daemon.stop)

    async def _attach(self) -> None:
        async def start_scout() -> P2P:
            return await start_daemon(self._folder, **_SCOUT | {"dht_mode": NO_LOOKUP})

        p2p = self.daemon.p2p
        self._weighing = weighing()
        hello, dial_back = HelloHandler(p2p, self._wall_clock), DialBackHandler(p2p, start_scout)
        await self.transport.attach(hello, dial_back, self._weighing)

    async def _meet(self, addresses: list[str], quiet: Collection[str]) -> list[Reached]:
        """See `meet`; nobody where there are no addresses."""
        return await meet(self.daemon.p2p, addresses, self._wall_clock, quiet=quiet) if addresses else []

    async def _is_hidden(self, reached: list[Reached]) -> bool:
        """Whether nobody can dial us; not asked where we listen nowhere or on loopback, or were told our address."""
        ports = {parse_address(address).port for address in self.transport.addresses} - {0}
        if not ports or self._options.get("announce_maddrs") or _is_local(self._options["host_maddrs"] or ()):
            return False
        self.reach, address = await find_reach(self.daemon.p2p, [one.peer for one in reached], sorted(ports))
        if self.reach is Reach.PUBLIC and address:
            self.dialled_at = address
            self.transport.own_addresses.note_dialled(address)
        return self.reach is Reach.PRIVATE

    async def _hide(self) -> list[Reached]:
        """Another daemon, that listens nowhere, in the place of one that nobody can dial."""
        self.client_mode = True
        self._options = _daemon_options((), (), client_mode=True)
        await self._end_life()
        await self._start_daemon()
        await self._attach()
        self.daemon.ended.clear()
        return await self._meet(self._initial_peers, quiet=self._initial_peers)  # it was said before

    async def _end_life(self) -> None:
        await self._life.aclose()
        self._life = AsyncExitStack()

    async def _join_dht(self, reached: list[Reached], validator: EnvelopeValidator) -> DHTNode:
        try:
            node = await DHTNode.create(
                p2p=self.daemon.p2p,
                initial_peers=[one.address for one in reached] or None,
                client_mode=self._options["dht_mode"] == "client",
                record_validator=validator,
                **DHT_OPTIONS,
            )
        except (RuntimeError, ValidationError, P2PDaemonError) as error:
            raise NetworkError(
                f"joining the DHT failed: {error}", fix="try again, or use another initial peer"
            ) from error
        self._life.push_async_callback(_leave_dht, node, self.daemon)
        is_own_or_member = lambda peer: peer == self.signer.peer_id or self.transport.is_member(peer)  # noqa: E731
        self._weighing |= weighing(bound(node.protocol, validator, is_own_or_member))
        return node

    async def restart(self) -> None:
        """Another daemon in the place of one that ended: the same identity, address and handler.

        Where nobody that we knew answers, it founds a DHT of its own, which `Directory.acquaint` joins to the others'.
        Raises NetworkError where it does not start, DaemonEnded where it ends before all of that is done.
        """
        await self._end_life()
        try:
            await self.daemon.work(self._restart())
        except DaemonEnded:
            self.daemon.ended.set()
            raise

    async def _restart(self) -> None:
        if self._options.get("host_maddrs"):
            self._options["host_maddrs"] = _where_it_was(self._options["host_maddrs"], self.transport.addresses)
        await self._start_daemon()
        await self._attach()
        addresses = self.transport.connections.book.texts(self.transport.is_member)
        known = list(dict.fromkeys((*addresses[:_MOST_ASKED], *self._initial_peers)))
        reached: list[Reached] = []
        with contextlib.suppress(NetworkError, ClockSkewed):  # it was right at the start
            reached = await self._meet(known, self._quiet)
        self.directory.move_to(await self._join_dht(reached, self.directory.validator))
        self.daemon.ended.clear()

    async def keep_alive(self, say: Callable[[str], None]) -> None:
        """For ever: starts the daemon again where it ends. Raises NetworkError where that does not help."""
        ends: list[float] = []
        while True:
            await self.daemon.ended.wait()
            now = time.monotonic()
            why = "had grown too large" if self.daemon.has_grown else "ended"
            if not self.daemon.has_grown:  # that is others' doing, and must not end this node
                ends = [*(at for at in ends if now - at < RESTARTS_WITHIN_SECONDS), now]
            if len(ends) > MOST_RESTARTS:
                raise NetworkError(
                    f"the libp2p daemon ended {len(ends)} times in {now - ends[0]:.0f} s",
                    fix="find out what ends it (out of memory?), then start again",
                )
            try:
                await self.restart()
            except DaemonEnded:
                continue
            say(f"the libp2p daemon {why}; a new one with the same identity has replaced it")

    async def close(self) -> None:
        """Leaves nothing behind: no daemon, no socket, no lock. Safe to call twice."""
        if hasattr(self, "transport"):
            await self.transport.close()
        await self._life.aclose()
        await self._stack.aclose()


def _daemon_options(host_maddrs: Sequence[str], announce_maddrs: Sequence[str], client_mode: bool) -> dict[str, Any]:
    """Options of hivemind's P2P.create. No `initial_peers`: the daemon would die of the first that fails."""
    options: dict[str, Any] = {
        "dht_mode": "client" if client_mode else "server",
        "use_relay": False,
        "persistent_conn_max_msg_size": MAX_MESSAGE_BYTES,
    }
    if announced := [maddr for maddr in announce_maddrs if not is_listing(maddr)]:
        options["announce_maddrs"] = announced
    if client_mode:
        options |= {"no_listen": True, "host_maddrs": None, "nat_port_map": False}
    else:
        local = _is_local(host_maddrs)
        options |= {"host_maddrs": list(host_maddrs), "nat_port_map": not local, "auto_nat": not local}
    return options


def _is_local(host_maddrs: Sequence[str]) -> bool:
    return all(maddr.startswith(("/ip4/127.", "/ip6/::1/")) for maddr in host_maddrs)


def _where_it_was(host_maddrs: list[str], addresses: Sequence[str]) -> list[str]:
    """`host_maddrs` with port 0 replaced by the actual port, as far as the daemon's `addresses` show it."""
    known = [parse_address(address) for address in addresses]
    local = [address for address in known if address.host in ("127.0.0.1", "::1")] or known
    ports = [address.port for address in local if address.port]
    if not ports or len(host_maddrs) > 1:
        return host_maddrs
    return [
        maddr.removesuffix("/tcp/0") + f"/tcp/{ports[0]}" if maddr.endswith("/tcp/0") else maddr
        for maddr in host_maddrs
    ]


async def _check_identity_free(
    folder: Scratch, identity: IdentityFile, initial_peers: list[str], wall_clock: Callable[[], float]
) -> None:
    """Raises IdentityInUse if our identity is in use in the swarm: two peers that share one would take each other's
    messages. Asks under another identity, before we appear."""
    own = identity.signer.peer_id
    scout = await start_daemon(folder, **_SCOUT)
    try:
        reached = await meet(scout, initial_peers, wall_clock, ask_about=own, quiet=initial_peers)
        known_alive = any(one.met.alive or one.peer == own for one in reached)
        if known_alive or await _is_found(scout, own):
            raise in_use(identity.path, "in this swarm")
    finally:
        await scout.shutdown()


async def _is_found(scout: P2P, peer: PeerId) -> bool:
    """libp2p's own lookup: connects to the peer if anybody knows where it is."""
    try:
        async with asyncio.timeout(_LOOKUP_SECONDS):
            await scout._client.connect(PeerID.from_base58(peer), [])
    except (TimeoutError, P2PDaemonError, *DAEMON_GONE):
        return False
    return True


async def _leave_dht(node: DHTNode, daemon: Daemon) -> None:
    """Without its daemon, the node would wait for ever for the end of its handlers."""
    if not daemon.ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await node.shutdown()
