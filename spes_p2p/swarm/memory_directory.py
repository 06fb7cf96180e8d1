"""The directory of the in-memory network: each peer keeps a replica of what was published within its hearing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm import envelope

if TYPE_CHECKING:
    from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer


@dataclass(frozen=True)
class _Stored:
    expiration: float
    data: bytes


class MemoryDirectory:
    """The Directory of one MemoryPeer: a replica of what was published within its hearing; readers merge replicas."""

    def __init__(self, network: MemoryNetwork, owner: MemoryPeer) -> None:
        self._network, self._owner = network, owner
        self._replica: dict[str, dict[PeerId, _Stored]] = {}
        self._expirations: dict[str, float] = {}
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    async def publish(self, key: str, value: bytes, ttl_seconds: float) -> None:
        envelope.check_ttl(ttl_seconds)
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        expiration = max(now + ttl_seconds, self._expirations.get(key, 0.0))
        self._expirations[key] = expiration
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
            self._dropped += 1
            return None

    async def _round_trip(self) -> None:
        me = self._owner.peer_id
        await asyncio.sleep(2 * self._network.roads.latency_seconds(me, me))
