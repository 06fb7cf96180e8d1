"""How long one fetch may take as a whole, so that nobody can hold others up for ever.

The transport gives up a stream that pauses. What is given up here never pauses and never ends: it sends a byte now and
then, or keeps promising a free slot. Links may be slow, so an honest fetch may take half a round, or as long as it
takes at 32 KiB per second. A peer that exceeds its time gets half of it for the next fetch, and so on until it
completes one; so a liar can cost us at most twice the first wait.

Who can wait gets that time for waiting in line, and once more for being sent the blob. That many others ask the same
peer is not its fault, and does not halve anything; who lets us wait for nothing is asked after all others. Who falls
silent is so for lists; for tiles its rate counts, since it would never be asked again while others give them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError
from spes_p2p.exchange.requests import Request, pack_request
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm.ports import Transport
from spes_p2p.swarm.streams import Partial

T = TypeVar("T")
LEAST_BYTES_PER_SECOND = 32 * 2**10
LONGEST_STALLS = 6
"""Longest time for a small fetch, as a multiple of the time that a stream may pause."""
_LOOK_SECONDS = 1.0
_ROUNDING_SECONDS = 1e-3


class NeverEnding(PeerSilent):
    """A fetch that went on, but for too long. `only_waited`: it could wait, and it was not its turn."""

    def __init__(self, words: str, only_waited: bool) -> None:
        super().__init__(words)
        self.only_waited = only_waited


class Patience:
    """`least_seconds()`: what any fetch may take; `round_seconds()`: how long a round trains, 0 while unknown."""

    def __init__(self, least_seconds: Callable[[], float], round_seconds: Callable[[], float]) -> None:
        self._least_seconds = least_seconds
        self._round_seconds = round_seconds
        self._strikes: Counter[PeerId] = Counter()
        self._silent: set[PeerId] = set()

    def seconds(self, peer: PeerId, size: int) -> float:
        """How long `peer` may take for at most `size` bytes."""
        usual = max(0.5 * self._round_seconds(), size / LEAST_BYTES_PER_SECOND)
        return max(self._least_seconds(), usual / 2.0 ** min(self._strikes[peer], 16))

    def short_seconds(self, size: int) -> float:
        """How long anybody may take for `size` bytes that tell whether there is more to fetch."""
        return max(self._least_seconds(), size / LEAST_BYTES_PER_SECOND)

    def was_given_up(self, peer: PeerId) -> bool:
        """Whether it was given up lately: others are asked first."""
        return peer in self._strikes

    def gave_nothing(self, peer: PeerId) -> bool:
        """The same, or it fell silent."""
        return peer in self._strikes or peer in self._silent

    def note_timeout(self, peer: PeerId, end: PeerSilent) -> None:
        """It did not come to an end in its time."""
        if isinstance(end, NeverEnding):
            self._strikes[peer] += not end.only_waited
        else:
            self._silent.add(peer)

    def note_success(self, peer: PeerId) -> None:
        """It came to an end."""
        self._strikes.pop(peer, None)
        self._silent.discard(peer)


async def fetch_within(  # noqa: PLR0913 (as a transport has them, and its limit)
    transport: Transport,
    peer: PeerId,
    request: bytes,
    stall_seconds: float,
    max_bytes: int,
    limit_seconds: Callable[[], float],
    patient: bool = False,
    partial: Partial | None = None,
) -> tuple[bytes, memoryview]:
    """`Transport.fetch` that raises NeverEnding when it takes longer than `limit_seconds()`, asked now and then.

    Where it is `patient`, that is the most for waiting, and for being sent the blob.
    """
    loop, partial = asyncio.get_running_loop(), partial or Partial()
    started = looked = loop.time()
    waited = 0.0
    fetch = loop.create_task(transport.fetch(peer, request, stall_seconds, max_bytes, patient, partial))
    try:
        while True:
            waits = patient and not partial.is_sent
            spent = waited if waits else looked - started - waited
            if (left := limit_seconds() - spent) < _ROUNDING_SECONDS:
                break
            if (await asyncio.wait((fetch,), timeout=min(left, _LOOK_SECONDS)))[0]:
                return fetch.result()
            waited += loop.time() - looked if waits else 0.0
            looked = loop.time()
    finally:
        fetch.cancel()
        await asyncio.wait((fetch,))
    raise NeverEnding(f"{short(peer)} did not finish within {loop.time() - started:.3g} s", only_waited=waits)


async def ask_small(
    transport: Transport, holder: PeerId, request: Request, stall_seconds: float, max_bytes: int
) -> bytes:
    """What a peer gives at once, in the time of a few stalls. Raises NetworkError, RemoteProtocolError."""
    packed, limit = pack_request(request), LONGEST_STALLS * stall_seconds
    _, data = await fetch_within(transport, holder, packed, stall_seconds, max_bytes, lambda: limit)
    return bytes(data)


async def first_good(
    holders: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[T]], failure: str, fix: str = ""
) -> T:
    """What `ask` makes of the first holder's answer that is good; it raises NetworkError or RemoteProtocolError if not.

    Raises NetworkError with `failure` and each holder's reason when nobody's is.
    """
    reasons: list[str] = []
    for holder in holders:
        try:
            return await ask(holder)
        except (NetworkError, RemoteProtocolError) as error:
            reasons.append(f"{short(holder)}: {error}")
    raise NetworkError(f"{failure} ({'; '.join(reasons) or 'nobody to ask'})", fix=fix)
