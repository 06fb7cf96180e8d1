"""An implementation of the ports inside one event loop: a whole swarm with seeded delays, losses, kills and partitions.

Runs on any asyncio loop, best on a virtual clock. It fails in more ways than TCP: a request may be carried out although
its answer is lost, twice, or after its caller has given up. There are no processes: a test that kills a peer must
cancel that peer's own tasks itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spes_p2p.errors import LocalProtocolError, NetworkError, PeerClosed, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId, sha256, short
from spes_p2p.swarm import calls, envelope
from spes_p2p.swarm.memory_links import DEFAULT_SHAPE, LinkShape, MemoryStream, Roads, stream_pair
from spes_p2p.swarm.ports import Handler, anybody
from spes_p2p.swarm.stream_server import DEFAULT_LIMITS, StreamLimits, StreamServer
from spes_p2p.swarm.streams import Partial, fetch_stream


class MemoryNetwork:
    """All peers of one swarm, and the levers that break them.

    `rng` is a seed or a generator; `shape` is how links behave unless `set_link` says otherwise.
    """

    def __init__(self, rng: int | random.Random = 0, shape: LinkShape = DEFAULT_SHAPE) -> None:
        self.roads = Roads(rng if isinstance(rng, random.Random) else random.Random(rng), shape)
        self.keys = FakeKeys()
        self._peers: dict[PeerId, MemoryPeer] = {}
        self._unreachable: set[PeerId] = set()
        self._private: set[PeerId] = set()
        self._cuts: dict[PeerId, list[int]] = {}

    def peer(self, peer_id: PeerId | str, limits: StreamLimits = DEFAULT_LIMITS) -> MemoryPeer:
        """The peer of that name; made, with these limits, and alive, on first use."""
        name = PeerId(peer_id)
        if name not in self._peers:
            self._peers[name] = MemoryPeer(self, name, limits)
        return self._peers[name]

    def kill(self, peer_id: PeerId | str, silent: bool = False) -> None:
        """SIGKILL: its handlers stop, its streams end, its host refuses whoever dials.

        `silent`: the host is gone too (power cut), so that nobody gets an answer.
        """
        name = PeerId(peer_id)
        self.peer(name).stop()
        if silent:
            self._unreachable.add(name)

    def restart(self, peer_id: PeerId | str) -> MemoryPeer:
        """A new process with the same identity: nothing in memory, nobody served yet."""
        name = PeerId(peer_id)
        self.kill(name)
        self._unreachable.discard(name)
        self.roads.freeze(name, False)
        self._peers[name] = MemoryPeer(self, name)
        return self._peers[name]

    def twin(self, peer_id: PeerId | str) -> MemoryPeer:
        """One more process with the same identity, on another machine: both speak, and whoever dials gets this one."""
        name = PeerId(peer_id)
        self._peers[name] = MemoryPeer(self, name)
        return self._peers[name]

    def freeze(self, peer_id: PeerId | str) -> None:
        """SIGSTOP, as others see it: no byte goes in or out until `thaw`. The peer's own timers run on."""
        self.roads.freeze(PeerId(peer_id), True)

    def thaw(self, peer_id: PeerId | str) -> None:
        self.roads.freeze(PeerId(peer_id), False)

    def partition(self, *groups: Iterable[str]) -> None:
        """Splits the peers; calls across are lost, streams across stall."""
        self.roads.partition([PeerId(peer) for peer in group] for group in groups)

    def heal(self) -> None:
        self.roads.partition(())

    def set_link(self, sender: str | None, receiver: str | None, shape: LinkShape) -> None:
        """Shapes one direction; None stands for everybody."""
        self.roads.set_shape(_name(sender), _name(receiver), shape)

    def hide(self, *names: str) -> None:
        """Puts peers behind NAT, each its own: reached only over connections that they keep open to the others."""
        self._private.update(PeerId(name) for name in names)

    def cut_stream(self, server: str, after_bytes: int, times: int = 1) -> None:
        """The next `times` streams that `server` serves end after so many bytes, frames included."""
        self._cuts.setdefault(PeerId(server), []).extend([after_bytes] * times)

    # ---- what peers ask the network ----

    def next_cut(self, server: PeerId) -> int | None:
        cuts = self._cuts.get(server)
        return cuts.pop(0) if cuts else None

    def refuses(self, peer: PeerId) -> bool:
        """Its host is there and its process is not."""
        known = self._peers.get(peer)
        return (known is None or not known.alive) and peer not in self._unreachable

    async def process(self, asker: PeerId, target: PeerId) -> MemoryPeer:
        """The process that answers at `target`; waits for ever when the way is blocked."""
        await self.roads.passable(asker, target)
        if asker in self._private and target in self._private:
            raise PeerClosed(f"{short(target)} is not connected, and no address of it is known")
        if target in self._unreachable:
            await asyncio.Event().wait()
        if self.refuses(target):
            raise PeerRefused(f"{short(target)} refuses connections")
        return self._peers[target]

    def reachable(self, asker: PeerId) -> list[MemoryPeer]:
        """Living peers on the asker's side of a partition, itself included."""
        return [peer for name, peer in self._peers.items() if peer.alive and not self.roads.parted(asker, name)]


class MemoryPeer:
    """One process of the swarm: `.transport`, `.directory`, `.signer`, `.verifier`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, limits: StreamLimits = DEFAULT_LIMITS) -> None:
        self.peer_id, self.alive = peer_id, True
        self.signer: FakeSigner = network.keys.signer(peer_id)
        self.verifier: FakeKeys = network.keys
        self.transport = MemoryTransport(network, self, limits)
        self.directory = MemoryDirectory(network, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a set would end them in a random order

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as long as this process lives."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def stop(self) -> None:
        self.alive = False
        for task in list(self._tasks):
            task.cancel()
        self.transport.end_serving()


class MemoryTransport:
    """The Transport of one MemoryPeer."""

    def __init__(self, network: MemoryNetwork, owner: MemoryPeer, limits: StreamLimits) -> None:
        self._network, self._owner, self._limits = network, owner, limits
        self._handler: Handler | None = None
        self._server: StreamServer | None = None
        self.traffic = limits.traffic()
        self._streams: dict[MemoryStream, None] = {}

    @property
    def peer_id(self) -> PeerId:
        return self._owner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Everybody is found by name here."""

    async def serve(self, handler: Handler, is_member: Callable[[PeerId], bool] = anybody) -> None:
        self._require_life()
        self._handler, self._door = handler, calls.CallDoor(self.traffic, is_member)
        self._server = StreamServer(handler, self.traffic, self._limits, self.peer_id, is_member)

    async def close(self) -> None:
        self._owner.stop()

    async def check_refused(self, peer: PeerId) -> bool:
        await asyncio.sleep(2 * self._network.roads.latency_seconds(self.peer_id, peer))
        return not self._network.roads.parted(self.peer_id, peer) and self._network.refuses(peer)

    # ---- calls ----

    async def call(self, peer: PeerId, request: bytes, timeout_seconds: float) -> bytes:
        self._require_life()
        calls.check_request(request)
        self.traffic.count_sent(len(request))
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        copies = 1 + (self._network.roads.rng.random() < self._shape_to(peer).duplication)
        for _ in range(copies):
            # of its own, since a request is not called back when its caller gives up
            self._owner.spawn(self._deliver(peer, request, reply))
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await reply
        except TimeoutError as error:
            raise PeerSilent(f"{short(peer)} did not answer within {timeout_seconds:g} s") from error
        self.traffic.count_received(len(answer))
        return calls.unwrap(peer, answer)

    async def _deliver(self, peer: PeerId, request: bytes, reply: asyncio.Future[bytes]) -> None:
        network, me = self._network, self.peer_id
        lost = network.roads.rng.random() < self._shape_to(peer).loss
        if not await network.roads.travel(me, peer, len(request)) or lost:
            return
        try:
            process = await network.process(me, peer)
            answer = await process.transport.handle(me, request)
        except NetworkError as error:
            await network.roads.travel(peer, me, 0)
            _settle(reply, error)
            return
        lost = network.roads.rng.random() < network.roads.shape(peer, me).loss
        if await network.roads.travel(peer, me, len(answer)) and not lost:
            _settle(reply, answer)

    async def handle(self, caller: PeerId, request: bytes) -> bytes:
        """Carries out a call that has arrived here; PeerClosed when this process ends in the middle of it."""
        if self._handler is None:
            return calls.NOT_SERVING
        answers: list[bytes] = []
        handler, door = self._handler, self._door

        async def answer() -> None:
            try:
                answered = door.answered(caller, request, lambda: calls.answer(handler, caller, request))
                answers.append(await answered)
            except RemoteProtocolError as error:
                answers.append(calls.refusal(str(error)))

        await asyncio.wait((self._owner.spawn(answer()),))
        if not answers:
            raise PeerClosed(f"{short(self.peer_id)} ended in the middle of a call")
        return answers[0]

    # ---- streams ----

    async def fetch(
        self,
        peer: PeerId,
        request: bytes,
        timeout_seconds: float,
        max_bytes: int,
        patient: bool = False,
        partial: Partial | None = None,
    ) -> tuple[bytes, memoryview]:
        self._require_life()

        async def open_stream() -> MemoryStream:
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await self._open_stream(peer)
            except TimeoutError as error:
                raise PeerSilent(f"{short(peer)} opened no stream within {timeout_seconds:g} s") from error

        return await fetch_stream(
            open_stream, peer, request, timeout_seconds, max_bytes, self.traffic, patient, partial
        )

    async def _open_stream(self, peer: PeerId) -> MemoryStream:
        network = self._network
        await network.roads.passable(self.peer_id, peer)
        await network.roads.travel(self.peer_id, peer, 0)
        process = await network.process(self.peer_id, peer)
        ours, theirs = stream_pair(network.roads, self.peer_id, peer, network.next_cut(peer))
        process.transport.accept(self.peer_id, theirs)
        self._keep(ours)
        return ours

    def accept(self, caller: PeerId, stream: MemoryStream) -> None:
        if self._server is None:
            raise PeerClosed(f"{short(self.peer_id)} does not serve requests yet")
        self._keep(stream)
        served = self._owner.spawn(self._server.serve(caller, stream))
        served.add_done_callback(lambda _: self._streams.pop(stream, None))

    def _keep(self, stream: MemoryStream) -> None:
        self._streams[stream] = None
        for old in [old for old in self._streams if old.closed]:
            del self._streams[old]

    def end_serving(self) -> None:
        for stream in list(self._streams):
            stream.close()
        self._streams.clear()
        self._handler = self._server = None

    def _shape_to(self, peer: PeerId) -> LinkShape:
        return self._network.roads.shape(self.peer_id, peer)

    def _require_life(self) -> None:
        if not self._owner.alive:
            raise LocalProtocolError(f"{self.peer_id} was stopped and can no longer be used")


def _name(peer: str | None) -> PeerId | None:
    return None if peer is None else PeerId(peer)


def _settle(reply: asyncio.Future[bytes], outcome: bytes | NetworkError) -> None:
    if reply.done():  # the caller has given up, or a copy of the request was answered first
        return
    if isinstance(outcome, bytes):
        reply.set_result(outcome)
    else:
        reply.set_exception(outcome)


@dataclass(frozen=True)
class FakeSigner:
    """Signs for one peer with a key that others cannot compute without the secret."""

    peer_id: PeerId
    _key: bytes = field(repr=False)

    @property
    def public_key(self) -> bytes:
        return sha256(b"public", self._key)

    def sign(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)


class FakeKeys:
    """All keys of one swarm: gives each peer its signer, and is the Verifier of everybody."""

    def __init__(self, secret: bytes = b"one swarm") -> None:
        self._secret = secret

    def signer(self, peer: PeerId) -> FakeSigner:
        return FakeSigner(peer, sha256(self._secret, peer.encode()))

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        signer = self.signer(peer)
        return public_key == signer.public_key and hmac.compare_digest(signer.sign(data), signature)


@dataclass(frozen=True)
class _Stored:
    expiration: float
    data: bytes


class MemoryDirectory:
    """The Directory of one MemoryPeer: a replica of what was published within its hearing; readers merge replicas."""

    def __init__(self, network: MemoryNetwork, owner: MemoryPeer) -> None:
        self._network, self._owner = network, owner
        self._replica: dict[str, dict[PeerId, _Stored]] = {}
        self._expirations = envelope.Expirations()
        self.dropped = 0

    async def publish(self, key: str, value: bytes, ttl_seconds: float) -> None:
        envelope.check_ttl(ttl_seconds)
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        expiration = self._expirations.next(key, ttl_seconds, now)
        data = envelope.seal(self._owner.signer, key, value, expiration)
        for peer in self._network.reachable(self._owner.peer_id):
            peer.directory.store(key, self._owner.peer_id, data, expiration)

    def store(self, key: str, subkey: PeerId, data: bytes, expiration: float) -> None:
        """Takes a record as every honest node does: only when it is valid and no older than the one kept."""
        kept = self._replica.setdefault(key, {}).get(subkey)
        if self._open(key, subkey, data) is not None and (kept is None or expiration >= kept.expiration):
            self._replica[key][subkey] = _Stored(expiration, data)

    def plant(self, key: str, subkey: PeerId, data: bytes) -> None:
        """What a dishonest node does: keeps and hands out a record unchecked."""
        self._replica.setdefault(key, {})[subkey] = _Stored(float("inf"), data)

    async def read(self, key: str, timeout_seconds: float = 10.0) -> Mapping[PeerId, bytes]:
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        found: dict[PeerId, tuple[float, bytes]] = {}
        for peer in self._network.reachable(self._owner.peer_id):
            for subkey, stored in peer.directory._replica.get(key, {}).items():
                value = self._open(key, subkey, stored.data) if stored.expiration > now else None
                if value is not None and stored.expiration >= found.get(subkey, (now,))[0]:
                    found[subkey] = stored.expiration, value
        return {subkey: value for subkey, (_, value) in found.items()}

    async def acquaint(self, peers: Collection[PeerId]) -> None:
        """Everybody within hearing is in it already."""

    def _open(self, key: str, subkey: PeerId, data: bytes) -> bytes | None:
        now = asyncio.get_running_loop().time()
        try:
            return envelope.open_envelope(self._owner.verifier, data, key, subkey, now).value
        except RemoteProtocolError:
            self.dropped += 1
            return None

    async def _round_trip(self) -> None:
        me = self._owner.peer_id
        await asyncio.sleep(2 * self._network.roads.latency_seconds(me, me))
