"""Encodes the answer to a small call: a payload, or a refusal with its reason.

Both backends send answers in this form, so that a handler's reason reaches the caller instead of the text that a
network library makes of an exception. How the bytes are sent is not decided here.
"""

from __future__ import annotations

import logging

from spes_p2p.errors import LocalProtocolError, PeerClosed, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm.ports import Handler

MAX_CALL_BYTES = 2 * 2**20
"""Bound of a request and of an answer; whatever is larger goes through `fetch`."""
MAX_WORDS = 400
_ANSWER, _REFUSAL = b"\0", b"\1"
NOT_SERVING = b"\2"
"""The answer of a peer that is in the network but has no handler yet."""

logger = logging.getLogger(__name__)


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

    Raises RemoteProtocolError with the other side's words where it refused, PeerClosed where it has no handler yet.
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
