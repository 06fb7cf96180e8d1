"""The directory on hivemind's DHT (ports.Directory): one signed envelope a publisher under each key.

Every node checks what it is asked to keep, and every reader what it is given. hivemind's own signature validator binds
a record to a key that stands in its name; ours binds it to the peer id, and bounds size and life, which hivemind does
not. Its caches are off: anybody may push into them with an end of their choice. Leaves out what records say.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID

from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm import envelope
from spes_p2p.swarm.hivemind_backend.daemon import Daemon
from spes_p2p.swarm.ports import Signer, Verifier
from spes_p2p.swarm.records import bounds_of

T = TypeVar("T")
_PUBLISH_SECONDS = 10.0
_TRIES = 3
_FEW_NODES = 20
"""A routing table with fewer may have lost its swarm."""
_MOST_GREETED = 8
_GREETING_SECONDS = 4.0

DHT_OPTIONS = {
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    "reuse_get_requests": False,
}


class EnvelopeValidator(RecordValidatorBase):
    """Lets into the DHT only envelopes that their publisher signed for this very key and end."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.dropped = 0

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._check(record)
        except RemoteProtocolError:
            self.dropped += 1
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        if len(record.value) > envelope.MAX_ENVELOPE_BYTES + 16 or len(record.subkey) > 256:
            raise RemoteProtocolError("a record is too large")
        peer, data = plain(record.subkey, str), plain(record.value, bytes)
        opened = envelope.open_envelope(self._verifier, data, None, PeerId(peer), time.time())
        if DHTID.generate(source=opened.key).to_bytes() != record.key or opened.expiration != record.expiration_time:
            raise RemoteProtocolError("a record has another key or expiry than its envelope")


def plain(packed: bytes, kind: type[T]) -> T:
    """What `packed` holds, of this kind; raises RemoteProtocolError.

    Without hivemind's extension types: what a stranger packed is never turned into objects."""
    try:
        value = msgpack.unpackb(packed, raw=False, max_ext_len=0)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"a record is not msgpack: {error}") from error
    if type(value) is not kind:
        raise RemoteProtocolError(f"a record has {type(value).__name__} where {kind.__name__} was expected")
    return value


@dataclass(eq=False)
class HivemindDirectory:
    """The Directory of one DHT node.

    `connect` opens a connection to a peer, or raises NetworkError. `is_member`: of our run, as far as known.
    """

    _node: DHTNode
    _signer: Signer
    _verifier: Verifier
    validator: EnvelopeValidator
    _daemon: Daemon
    _connect: Callable[[PeerId], Awaitable[None]]
    _is_member: Callable[[PeerId], bool]

    def __post_init__(self) -> None:
        self._read: dict[str, frozenset[PeerId]] = {}
        """Whose records under a key were read the last time."""
        self._expirations = envelope.Expirations()
        self._wall_clock = time.time
        self._dropped = 0

    def move_to(self, node: DHTNode) -> None:
        """From now on, `node` is this peer's place in the DHT; what the one before kept is published again in time."""
        self._node = node

    @property
    def dropped(self) -> int:
        return self._dropped + self.validator.dropped

    async def publish(self, key: str, value: bytes, ttl_seconds: float) -> None:
        envelope.check_ttl(ttl_seconds)
        self._daemon.require()
        asked = 0
        try:
            async with asyncio.timeout(_PUBLISH_SECONDS):
                for _ in range(_TRIES):
                    answers = await self._publish(key, value, ttl_seconds)
                    asked += len(answers)  # a node that does not answer is not asked again
                    if any(answer and all(answer) for answer in answers):
                        return
                    if not asked and not self._node.protocol.client_mode:
                        return  # there is nobody else, and we keep it
                    await self._find_own_end(key)
        except TimeoutError as error:
            raise PeerSilent(f"no node stored the record {key!r} within {_PUBLISH_SECONDS:g} s") from error
        raise NetworkError(f"no node stored the record {key!r}", fix="check that other peers of the run can be reached")

    async def _publish(self, key: str, value: bytes, ttl_seconds: float) -> list[list[bool] | None]:
        """What the nodes said that should keep the record; None: no answer. `DHTNode.store` tells of one only."""
        expiration = self._expirations.next(key, ttl_seconds, self._wall_clock())
        data = envelope.seal(self._signer, key, value, expiration)
        protocol, key_id, subkey = self._node.protocol, DHTID.generate(source=key), self._signer.peer_id
        packed = protocol.serializer.dumps(data)
        if not protocol.client_mode:
            protocol.storage.forget_later(key_id, subkey, expiration)
            protocol.storage.store(key_id, packed, expiration, subkey=subkey)
        nearest = await self._node.find_nearest_nodes([key_id], k_nearest=self._node.num_replicas, exclude_self=True)
        nodes = nearest[key_id].values()
        stores = (protocol.call_store(node, [key_id], [packed], expiration, [subkey]) for node in nodes)
        return list(await asyncio.gather(*stores))

    async def _find_own_end(self, key: str) -> None:
        """A record of an earlier life of this peer may end later than what we publish; then nobody takes ours."""
        found = await self._node.get(key, latest=True)
        own = found.value.get(self._signer.peer_id) if found is not None and isinstance(found.value, dict) else None
        if own is not None:
            self._expirations.found(key, own.expiration_time, self._wall_clock())

    async def read(self, key: str, timeout_seconds: float = 10.0) -> Mapping[PeerId, bytes]:
        self._daemon.require()
        try:
            async with asyncio.timeout(timeout_seconds):
                found = await self._node.get(key, latest=True)
        except TimeoutError as error:
            raise PeerSilent(f"the directory did not find {key!r} within {timeout_seconds:g} s") from error
        if found is None or not isinstance(found.value, dict):
            return {}
        records = {}
        for peer, data in self._in_bounds(key, {PeerId(subkey): item.value for subkey, item in found.value.items()}):
            try:
                records[peer] = envelope.open_envelope(self._verifier, data, key, peer, time.time()).value
            except RemoteProtocolError:
                self._dropped += 1
        self._read[key] = frozenset(records)
        return records

    def _in_bounds(self, key: str, found: Mapping[PeerId, bytes]) -> Iterator[tuple[PeerId, bytes]]:
        """Records of members, then those of strangers within the bound, starting with peers that were read before."""
        before, bounds = self._read.get(key, frozenset()), bounds_of(key)
        room = bounds.strangers_bytes if bounds is not None else 0
        home = {peer for peer in found if peer == self._signer.peer_id or self._is_member(peer)}
        for peer, data in sorted(found.items(), key=lambda item: (item[0] not in home, item[0] not in before)):
            if peer not in home:
                room -= len(data)
            if peer in home or room >= 0:
                yield peer, data
            else:
                self._dropped += 1

    async def acquaint(self, peers: Collection[PeerId]) -> None:
        table = self._node.protocol.routing_table
        known = {identity.to_base58() for identity in list(table.peer_id_to_uid)}
        strangers = [peer for peer in peers if peer not in known and peer != self._signer.peer_id]
        most = _MOST_GREETED if len(known) < _FEW_NODES else 1
        chosen = random.sample(strangers, min(most, len(strangers)))
        await asyncio.gather(*(self._greet(peer) for peer in chosen))

    async def _greet(self, peer: PeerId) -> None:
        """Makes both sides add each other to their routing tables and exchange the records that belong there."""
        with contextlib.suppress(NetworkError, RemoteProtocolError, TimeoutError):
            async with asyncio.timeout(_GREETING_SECONDS):
                await self._connect(peer)
                await self._node.protocol.call_ping(PeerID.from_base58(peer))  # never raises
