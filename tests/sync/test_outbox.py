"""Messages to others: cut to what a call carries, a few at a time, none kept for long."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.messages import (
    Ballots,
    Intent,
    Prevote,
    Report,
    Status,
    Votes,
    Work,
)
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.outbox import WAITING, Outbox, in_parts
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack, unpack
from tests.simulation.virtual_time import virtual

A, B = PeerId("a"), PeerId("b")
PIECE = Slice(0, 0, 4, A, (A,))


def envelope(sealer: KeySealer, sequence: int, reports: int = 0) -> Envelope:
    status = Status(NO_HASH, A, 1, sequence, 0, NO_HASH, Work(), Intent(), Ballots())
    said = tuple(sealer.seal(Report(NO_HASH, NO_HASH, at, PIECE, (NO_HASH,) * 4)) for at in range(reports))
    prevote = sealer.seal(Prevote(NO_HASH, NO_HASH, 0, NO_HASH))
    return Envelope(
        A,
        (sealer.seal(status),),
        reports=said,
        votes=(Votes(prevote),),
        answers=7,
    )


class Listener:
    """The other side: keeps what it is sent."""

    def __init__(self, sealer: KeySealer, answer: Callable[[], Awaitable[None]] | None = None) -> None:
        self.heard: list[Envelope] = []
        self._sealer = sealer
        self._answer = answer

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        self.heard.append(unpack(Envelope, request))
        if self._answer is not None:
            await self._answer()
        return pack(Envelope(B))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        raise RemoteProtocolError("nothing here")


class Desk:
    """An outbox of peer a, with peer b listening."""

    def __init__(self, answer: Callable[[], Awaitable[None]] | None = None) -> None:
        self.network = MemoryNetwork(1)
        net = self.network.peer(A)
        self.sealer = KeySealer(net.signer)
        self.listener = Listener(self.sealer, answer)
        self.answers: list[Envelope] = []
        self.notices: list[Notice] = []
        self.tasks = Tasks(lambda error: self.notices.append(Notice("failed", repr(error))))
        self.outbox = Outbox(
            net.transport,
            EnvelopeChecker(net.verifier),
            self.tasks,
            lambda: 4.0,
            self.answers.append,
            self.notices.append,
        )

    async def open(self) -> Desk:
        await self.network.peer(B).transport.serve(self.listener)
        return self


def together(parts: list[Envelope]) -> Envelope:
    """What all parts say; each answers."""
    joined: dict[str, Any] = {}
    for name in (item.name for item in dataclasses.fields(Envelope)):
        values = [getattr(part, name) for part in parts]
        joined[name] = sum(values, ()) if isinstance(values[0], tuple) else next(filter(None, values), None)
    assert {part.answers for part in parts} == {joined["answers"]}
    return Envelope(**joined)


def test_a_large_envelope_is_cut_into_parts_that_say_the_same() -> None:
    whole = envelope(KeySealer(MemoryNetwork().peer(A).signer), 1, reports=50)
    assert in_parts(whole) == [pack(whole)]
    parts = in_parts(whole, room_bytes=2000)
    assert len(parts) > 5
    assert all(len(part) <= 2000 for part in parts)
    assert together([unpack(Envelope, part) for part in parts]) == whole


@virtual
async def test_what_is_posted_arrives_and_answers_come_back() -> None:
    desk = await Desk().open()
    for sequence in range(3):
        desk.outbox.post(B, envelope(desk.sealer, sequence))
    await asyncio.sleep(1)
    assert sorted(said.statuses[0].value.sequence for said in desk.listener.heard) == [0, 1, 2]
    assert desk.answers == [Envelope(B)] * 3
    await desk.tasks.stop()


@virtual
async def test_a_lost_message_does_not_hold_up_the_next() -> None:
    desk = await Desk().open()
    desk.network.set_link(A, B, LinkShape(loss=1.0))
    desk.outbox.post(B, envelope(desk.sealer, 0))
    await asyncio.sleep(0.1)
    desk.network.set_link(A, B, LinkShape())
    desk.outbox.post(B, envelope(desk.sealer, 1))
    await asyncio.sleep(0.1)
    assert len(desk.listener.heard) == 1
    await desk.tasks.stop()


@virtual
async def test_a_silent_peer_gets_the_newest_when_it_comes_back() -> None:
    desk = await Desk().open()
    desk.network.freeze(B)
    for sequence in range(3 * WAITING):
        desk.outbox.post(B, envelope(desk.sealer, sequence))
    assert len(desk.outbox._lines[B].waiting) == WAITING
    await asyncio.sleep(3)
    desk.network.thaw(B)
    await asyncio.sleep(5)
    assert max(said.statuses[0].value.sequence for said in desk.listener.heard) == 3 * WAITING - 1
    assert not desk.outbox._lines  # nothing is kept of a peer to which nothing is said
    await desk.tasks.stop()


@virtual
async def test_a_refusal_is_noticed_once() -> None:
    async def refuse() -> None:
        raise RemoteProtocolError("not you")

    desk = await Desk(refuse).open()
    for sequence in range(5):
        desk.outbox.post(B, envelope(desk.sealer, sequence))
        await asyncio.sleep(1)
    assert [(notice.kind, notice.peer) for notice in desk.notices] == [("refused", B)]
    assert "not you" in desk.notices[0].text
    await desk.tasks.stop()


@virtual
async def test_what_no_call_can_carry_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    desk = await Desk().open()
    huge = desk.sealer.seal(Report(NO_HASH, NO_HASH, 0, PIECE, (), ((A, "x" * 3 * 2**20),)))
    desk.outbox.post(B, Envelope(A, reports=(huge,)))
    await asyncio.sleep(1)
    assert [notice.kind for notice in desk.notices] == ["refused"]
    await desk.tasks.stop()


@virtual
async def test_nothing_is_sent_after_stop() -> None:
    desk = await Desk().open()
    for sequence in range(9):
        desk.outbox.post(B, envelope(desk.sealer, sequence))
    await desk.tasks.stop()
    desk.outbox.post(B, envelope(desk.sealer, 99))
    await asyncio.sleep(1)
    assert not desk.answers
