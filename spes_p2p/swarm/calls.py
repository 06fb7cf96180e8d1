"""The serving side of small calls: the door that all of them pass, and how the answer or a refusal is encoded.

Both backends send answers in this form, so that a handler's reason reaches the caller instead of the text that a
network library makes of an exception. How the bytes are sent is not decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from spes_p2p.errors import LocalProtocolError, PeerClosed, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm.door import Door, DoorLimits, Rate
from spes_p2p.swarm.pacing import Traffic
from spes_p2p.swarm.ports import Handler, anybody

MAX_CALL_BYTES = 2 * 2**20
"""Bound of a request and of an answer; whatever is larger goes through `fetch`."""
CALL_SLACK = 16
"""Bytes that a backend may add to a request."""
MAX_WORDS = 400
_ANSWER, _REFUSAL = b"\0", b"\1"
NOT_SERVING = b"\2"
"""The answer of a peer that is in the network but has no handler yet, or none any more."""

CALLS = DoorLimits(Rate(100.0, 1000.0), Rate(50.0, 200.0), Rate(200.0, 1000.0))
"""Calls; peers of a round of one second make 12 a second."""
CALL_BYTES = DoorLimits(
    Rate(8 * 2.0**20, 64 * 2.0**20), Rate(256 * 2.0**10, 4 * 2.0**20), Rate(2 * 2.0**20, 16 * 2.0**20)
)
"""Of requests, and the same again of answers."""
STRANGERS_UPLOAD = Rate(0.25, 2.0)
"""Of a limited upload, what answers to strangers take at most: this share of it, and so many seconds of it at once."""
Weigh = Callable[[bytes], float]
"""What a request costs beside one call, in calls. Raises RemoteProtocolError for one that nobody can afford."""
logger = logging.getLogger(__name__)


class CallDoor:
    """Every call of another peer passes here, whatever it asks for: of each caller as many as it may make, and as many
    bytes of requests and of answers. Counts them as traffic.
    """

    def __init__(self, traffic: Traffic, is_member: Callable[[PeerId], bool] = anybody) -> None:
        self._traffic = traffic
        self._calls, self._requests = Door(CALLS, is_member), Door(CALL_BYTES, is_member)
        self._answers = Door(answer_limits(traffic.upload.bytes_per_second), is_member)

    async def answered(
        self, caller: PeerId, request: bytes, answer: Callable[[], Awaitable[bytes]], weigh: Weigh | None = None
    ) -> bytes:
        """What `answer()` gives. Raises RemoteProtocolError where the caller may not ask for it now, or ever."""
        self._traffic.count_received(len(request))
        if len(request) > MAX_CALL_BYTES + CALL_SLACK:
            raise RemoteProtocolError(f"the call has {len(request)} bytes, but at most {MAX_CALL_BYTES} are allowed")
        doors = (self._calls, 1.0), (self._requests, float(len(request))), (self._answers, 0.0)
        if not all(door.admits(caller, amount) for door, amount in doors):
            raise RemoteProtocolError("too many calls in too short a time")
        if weigh is not None:
            self._calls.charge(caller, weigh(request))
        reply = await answer()
        self._answers.charge(caller, len(reply))
        self._traffic.count_sent(len(reply))
        return reply


def answer_limits(upload_bytes_per_second: float | None) -> DoorLimits:
    """Of the bytes of answers, where this peer sends at most so much."""
    if upload_bytes_per_second is None:
        return CALL_BYTES
    share, burst = (upload_bytes_per_second * part for part in (STRANGERS_UPLOAD.per_second, STRANGERS_UPLOAD.burst))
    of_strangers = (CALL_BYTES.stranger, CALL_BYTES.strangers)
    stranger, strangers = (Rate(min(one.per_second, share), min(one.burst, burst)) for one in of_strangers)
    return DoorLimits(CALL_BYTES.member, stranger, strangers)


def check_request(request: bytes) -> None:
    """Raises LocalProtocolError for a request that the other side would refuse for its size."""
    if len(request) > MAX_CALL_BYTES:
        raise LocalProtocolError(f"a call has {len(request)} bytes, but at most {MAX_CALL_BYTES} are allowed")


async def answer(handler: Handler, caller: PeerId, request: bytes) -> bytes:
    """What `handler` says to the call, framed. Never raises what the handler raises: a caller always hears back."""
    if len(request) > MAX_CALL_BYTES:
        return refusal(f"the call has {len(request)} bytes, but at most {MAX_CALL_BYTES} are allowed")
    try:
        payload = await handler.on_call(caller, request)
    except RemoteProtocolError as error:
        return refusal(str(error))
    except PeerClosed:
        return NOT_SERVING
    except Exception:  # a bug of ours: the caller must not wait for its time-out because of it
        logger.exception("the handler of a call failed")
        return refusal("the handler failed")
    if len(payload) > MAX_CALL_BYTES:
        logger.error("an answer of %d bytes is larger than the %d allowed", len(payload), MAX_CALL_BYTES)
        return refusal(f"the answer has {len(payload)} bytes, but at most {MAX_CALL_BYTES} are allowed")
    return _ANSWER + payload


def refusal(words: str) -> bytes:
    return _REFUSAL + words.encode()[:MAX_WORDS]


def unwrap(peer: PeerId, reply: bytes) -> bytes:
    """The payload of a framed answer.

    Raises RemoteProtocolError with the other side's words where it refused, PeerClosed where it has no handler.
    """
    kind, payload = reply[:1], reply[1:]
    if kind == _ANSWER and len(payload) <= MAX_CALL_BYTES:
        return payload
    if kind == _REFUSAL:
        raise RemoteProtocolError(f"{short(peer)} refused: {printable(payload)}")
    if reply == NOT_SERVING:
        raise PeerClosed(f"{short(peer)} does not serve requests yet")
    raise RemoteProtocolError(f"{short(peer)} answered a call with {len(reply)} bytes that are not a valid answer")


def printable(words: bytes) -> str:
    """Text from another peer, cut and cleaned so that it can be shown on a terminal."""
    text = words[:MAX_WORDS].decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)
