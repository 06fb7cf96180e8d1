"""The roads of the in-memory network: who can reach whom, how long bytes travel, and streams that can break.

Draws every chance from one generator and reads the running loop's clock, so that a run is repeated exactly by its seed.
Leaves out what is said on the roads.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.errors import PeerClosed
from spes_p2p.ids import PeerId

_WINDOW_PIECES = 4


@dataclass(frozen=True)
class LinkShape:
    """How one direction between two peers behaves."""

    latency_seconds: tuple[float, float] = (0.005, 0.02)
    """Drawn evenly from this range for each message."""
    bytes_per_second: float = float("inf")
    loss: float = 0.0
    """Share of messages of calls (requests and answers) that vanish; streams are reliable, like TCP."""
    duplication: float = 0.0
    """Share of calls whose request arrives twice."""


DEFAULT_SHAPE = LinkShape()


class Roads:
    """Reachability and link shapes of all peers."""

    def __init__(self, rng: random.Random, shape: LinkShape) -> None:
        self.rng, self._shape = rng, shape
        self._shapes: dict[tuple[PeerId | None, PeerId | None], LinkShape] = {}
        self._busy_until: dict[tuple[PeerId, PeerId], float] = {}
        self._groups: dict[PeerId, int] = {}
        self._frozen: set[PeerId] = set()
        self._changed = asyncio.Event()

    def set_shape(self, sender: PeerId | None, receiver: PeerId | None, shape: LinkShape) -> None:
        """`None` stands for everybody; the most exact rule wins, a sender's before a receiver's."""
        self._shapes[sender, receiver] = shape

    def shape(self, sender: PeerId, receiver: PeerId) -> LinkShape:
        rules: tuple[tuple[PeerId | None, PeerId | None], ...] = ((sender, receiver), (sender, None), (None, receiver))
        return next((self._shapes[rule] for rule in rules if rule in self._shapes), self._shape)

    def partition(self, groups: Iterable[Iterable[PeerId]]) -> None:
        """Peers of different groups cannot reach each other; peers that are named nowhere form one more group."""
        self._groups = {peer: index for index, group in enumerate(groups, start=1) for peer in group}
        self._wake()

    def freeze(self, peer: PeerId, frozen: bool) -> None:
        if frozen:
            self._frozen.add(peer)
        else:
            self._frozen.discard(peer)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def parted(self, one: PeerId, other: PeerId) -> bool:
        return self._groups.get(one, 0) != self._groups.get(other, 0)

    async def travel(self, sender: PeerId, receiver: PeerId, size: int) -> bool:
        """Waits while `size` bytes go from one peer to the other; False when a partition swallowed them."""
        await asyncio.sleep(self.transmission_seconds(sender, receiver, size) + self.latency_seconds(sender, receiver))
        await self.awake(sender, receiver)
        return not self.parted(sender, receiver)

    async def awake(self, *peers: PeerId) -> None:
        """A frozen process holds up what is sent to it and by it; nothing is lost."""
        while self._frozen.intersection(peers):
            await self._changed.wait()

    async def passable(self, one: PeerId, other: PeerId) -> None:
        """Waits until bytes of a stream can pass, as TCP does by sending again."""
        while self.parted(one, other) or self._frozen.intersection((one, other)):
            await self._changed.wait()

    def latency_seconds(self, sender: PeerId, receiver: PeerId) -> float:
        return self.rng.uniform(*self.shape(sender, receiver).latency_seconds)

    def transmission_seconds(self, sender: PeerId, receiver: PeerId, size: int) -> float:
        """Until the last byte has left, behind what is on this link already."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._busy_until.get((sender, receiver), now))
        end = start + size / self.shape(sender, receiver).bytes_per_second
        self._busy_until[sender, receiver] = end
        return end - now


class Pipe:
    """One direction of a stream."""

    def __init__(self, roads: Roads, sender: PeerId, receiver: PeerId, cut_after_bytes: int | None = None) -> None:
        self._roads, self._sender, self._receiver = roads, sender, receiver
        self._cut_after_bytes = cut_after_bytes
        self._pieces: deque[bytes] = deque()
        self._coming: deque[tuple[bytes, bool]] = deque()
        self._last_arrival = 0.0
        self._sent = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def write(self, data: bytes | memoryview) -> None:
        await self._roads.passable(self._sender, self._receiver)
        while len(self._coming) + len(self._pieces) >= _WINDOW_PIECES and not self._ended:
            await self._changed.wait()
        if self._ended:
            raise PeerClosed(f"the stream to {self._receiver} was cut")
        piece = bytes(data)
        cut = self._cut_after_bytes is not None and self._sent + len(piece) > self._cut_after_bytes
        if cut:
            assert self._cut_after_bytes is not None
            piece = piece[: self._cut_after_bytes - self._sent]
        await asyncio.sleep(self._roads.transmission_seconds(self._sender, self._receiver, len(piece)))
        self._deliver(piece, cut)

    def _deliver(self, piece: bytes, last: bool) -> None:
        loop = asyncio.get_running_loop()
        self._sent += len(piece)
        self._coming.append((piece, last))
        arrival = loop.time() + self._roads.latency_seconds(self._sender, self._receiver)
        self._last_arrival = max(arrival, self._last_arrival)
        loop.call_at(self._last_arrival, self._arrive)  # timers of one moment fire in any order

    def _arrive(self) -> None:
        piece, last = self._coming.popleft()
        if piece and not self._ended:
            self._pieces.append(piece)
        if last:
            self.end()
        self._wake()

    async def read(self, max_bytes: int) -> bytes:
        await self._roads.passable(self._sender, self._receiver)
        while not self._pieces and not self._ended:
            await self._changed.wait()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > max_bytes:
            self._pieces.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        self._wake()
        return piece

    def end(self) -> None:
        """Nothing more arrives; what has arrived can still be read."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryStream:
    """One end of a stream (streams.ByteStream); closing an end ends both directions."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.closed = False

    async def read(self, max_bytes: int) -> bytes:
        return await self._incoming.read(max_bytes)

    async def read_into(self, room: memoryview) -> int:
        piece = await self._incoming.read(len(room))
        room[: len(piece)] = piece
        return len(piece)

    async def write(self, data: bytes | memoryview) -> None:
        await self._outgoing.write(data)

    def close(self) -> None:
        self.closed = True
        self._incoming.end()
        self._outgoing.end()


def stream_pair(
    roads: Roads, asker: PeerId, server: PeerId, cut_after_bytes: int | None
) -> tuple[MemoryStream, MemoryStream]:
    """(asker's end, server's end); `cut_after_bytes` from server to asker both directions end."""
    up = Pipe(roads, asker, server)
    down = Pipe(roads, server, asker, cut_after_bytes)
    return MemoryStream(down, up), MemoryStream(up, down)
