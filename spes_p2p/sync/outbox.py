"""Sends envelopes to other peers: a few at a time to each, cut to what one call may carry, nothing kept for long.

Every message repeats what matters, so what waits too long is dropped and what is lost is not sent again here. A peer
that is silent holds up nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.content import Envelope
from spes_p2p.errors import LocalProtocolError, NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.calls import MAX_CALL_BYTES
from spes_p2p.swarm.door import Door
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack

WAITING = 32
"""Messages waiting for one slow receiver; older ones are dropped."""
IN_FLIGHT = 4
"""Unanswered calls to one receiver: a lost one must not hold up those behind it."""
_ROOM = MAX_CALL_BYTES - 2**10


@dataclass
class _Line:
    waiting: deque[bytes] = field(default_factory=lambda: deque(maxlen=WAITING))
    in_flight: int = 0


@dataclass(eq=False)
class Outbox:
    """All that one peer says of its own accord. `heard` is given the envelopes that come back as answers."""

    _transport: Transport
    _checker: EnvelopeChecker
    _tasks: Tasks
    _timeout_seconds: Callable[[], float]
    _heard: Callable[[Envelope], None]
    _notice: Callable[[Notice], None]
    _door: Door | None = None
    """How many new signatures each peer may send, in calls and in answers."""

    def __post_init__(self) -> None:
        self._lines: dict[PeerId, _Line] = {}
        self._refusals: dict[PeerId, str] = {}
        self.hides_status = False
        """Removes our state from an envelope: peers that hear of a state come to fetch it."""

    def post(self, peer: PeerId, envelope: Envelope) -> None:
        """Queues `envelope` for `peer`; it is sent soon, or dropped if too many are waiting."""
        for part in in_parts(self._said(envelope)):
            self._send(peer, part)

    def open(self, peer: PeerId, data: bytes) -> Envelope:
        """What `peer` sent. Raises RemoteProtocolError where it is not well-formed, or not signed as it should be."""
        return self._checker.open(peer, data, self._door)

    def answer(self, peer: PeerId, envelope: Envelope) -> bytes:
        """The bytes to answer a call of `peer` with; what does not fit follows in calls of our own."""
        first, *rest = in_parts(self._said(envelope))
        for part in rest:
            self._send(peer, part)
        return first

    def _said(self, envelope: Envelope) -> Envelope:
        if not self.hides_status:
            return envelope
        return replace(envelope, statuses=tuple(one for one in envelope.statuses if one.author != envelope.sender))

    def _send(self, peer: PeerId, data: bytes) -> None:
        line = self._lines.setdefault(peer, _Line())
        line.waiting.append(data)
        self._go_on(peer, line)

    def _go_on(self, peer: PeerId, line: _Line) -> None:
        while line.waiting and line.in_flight < IN_FLIGHT and not self._tasks.stopped:
            line.in_flight += 1
            self._tasks.spawn(self._call(peer, line, line.waiting.popleft()))
        if not line.in_flight:
            self._lines.pop(peer, None)

    async def _call(self, peer: PeerId, line: _Line, data: bytes) -> None:
        try:
            await self._ask(peer, data)
        finally:
            line.in_flight -= 1
        self._go_on(peer, line)

    async def _ask(self, peer: PeerId, data: bytes) -> None:
        try:
            answer = await self._transport.call(peer, data, self._timeout_seconds())
            reply = self.open(peer, answer)
        except RemoteProtocolError as error:
            self._refused(peer, str(error))
        except NetworkError:
            return  # silence is judged by the state machine, from what was heard last
        except LocalProtocolError as error:  # too large for a call
            self._refused(peer, str(error))
        else:
            self._refusals.pop(peer, None)
            self._heard(reply)

    def _refused(self, peer: PeerId, words: str) -> None:
        """Told once: the same comes back with every heartbeat."""
        if self._refusals.get(peer) != words:
            self._refusals[peer] = words
            self._notice(Notice("refused", words, peer))


def in_parts(envelope: Envelope, room_bytes: int = _ROOM) -> list[bytes]:
    """The packed envelope, or several that together say the same, each within `room_bytes` where its items are."""
    whole = pack(envelope)
    if len(whole) <= room_bytes:
        return [whole]
    parts: list[Envelope] = []
    size = room_bytes + 1
    for one in _singles(envelope):
        more = len(pack(one))
        if size + more > room_bytes:
            parts.append(Envelope(envelope.sender, answers=envelope.answers))
            size = 0
        parts[-1] = _together(parts[-1], one)
        size += more
    return [pack(part) for part in parts]


def _singles(envelope: Envelope) -> Iterator[Envelope]:
    """One envelope for each thing said. The certificate goes early: it makes the rest unnecessary."""
    order = dict.fromkeys(("statuses", "commit", "ready", "plan", "votes", "contents"))
    order |= dict.fromkeys(item.name for item in fields(Envelope) if item.name not in ("sender", "answers"))
    for name in order:
        value: Any = getattr(envelope, name)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            said: dict[str, Any] = {name: (item,) if isinstance(value, tuple) else item}
            yield Envelope(envelope.sender, **said)


def _together(one: Envelope, other: Envelope) -> Envelope:
    both: dict[str, Any] = {}
    for name in (item.name for item in fields(Envelope)):
        first, second = getattr(one, name), getattr(other, name)
        both[name] = first + second if isinstance(first, tuple) else first or second
    return Envelope(**both)
