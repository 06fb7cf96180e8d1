"""Who is asked to dial us, and how many a helper serves at once. Real dials: tests/swarm/test_nat.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from spes_p2p import wire
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import reach
from spes_p2p.swarm.hivemind_backend.dial import Dialled
from spes_p2p.swarm.hivemind_backend.reach import DialBackHandler, DialBackReply, DialBackRequest, Reach, find_reach

NAMES = [PeerId(f"Qm{letter * 44}") for letter in "abcde"]
HERE = "/ip4/11.0.0.1/tcp/4001"
REACHED, FAILED, BUSY, BLIND = (
    DialBackReply(True, HERE),
    DialBackReply(True),
    DialBackReply(False, busy=True),
    DialBackReply(False),
)

Answers = dict[PeerId, list[DialBackReply | None]]


class Helpers:
    """A P2P whose helpers answer what is written; None: nobody is there. The last answer is repeated."""

    def __init__(self, *answers: list[DialBackReply | None]) -> None:
        self.answers = dict(zip(NAMES, answers, strict=False))
        self.asked: Counter[PeerId] = Counter()

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, kind: Any) -> BytesValue:
        helper = PeerId(peer.to_base58())
        turn = self.asked[helper]
        self.asked[helper] += 1
        answer = self.answers[helper][min(turn, len(self.answers[helper]) - 1)]
        if answer is None:
            raise P2PHandlerError("no such handler")
        return BytesValue(value=wire.pack(answer))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_BUSY_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def plain_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our names need not be hashes of keys."""
    named = SimpleNamespace(from_base58=lambda name: SimpleNamespace(to_base58=lambda: name))
    monkeypatch.setattr(reach, "PeerID", named)


def _found(helpers: Helpers) -> tuple[Reach, str]:
    return asyncio.run(find_reach(cast(Any, helpers), list(helpers.answers), [4001]))


def test_one_that_reached_us_is_enough() -> None:
    assert _found(Helpers([FAILED], [REACHED], [FAILED])) == (Reach.PUBLIC, HERE)


def test_private_only_where_all_that_tried_failed() -> None:
    assert _found(Helpers([FAILED], [BLIND], [None])) == (Reach.PRIVATE, "")


def test_a_busy_helper_is_asked_again() -> None:
    helpers = Helpers([BUSY, BUSY, FAILED])
    assert _found(helpers) == (Reach.PRIVATE, "")
    assert helpers.asked[NAMES[0]] == 3


def test_others_are_asked_where_none_of_the_first_tried() -> None:
    assert _found(Helpers([BLIND], [None], [BLIND], [FAILED])) == (Reach.PRIVATE, "")


def test_nobody_could_try() -> None:
    assert _found(Helpers([BLIND], [None])) == (Reach.UNKNOWN, "")


async def _connected() -> list[Any]:
    infos = [(PeerId(f"asker{n}"), f"/ip4/11.0.0.{n}/tcp/5000") for n in range(12)]
    return [SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda p=p: p), addrs=[a]) for p, a in infos]


async def _no_daemon() -> Any:
    raise AssertionError("a daemon was started")


def _desk(
    monkeypatch: pytest.MonkeyPatch,
    dialled: Callable[[Any], Awaitable[Dialled]],
    start_scout: Callable[[], Awaitable[Any]] = _no_daemon,
) -> DialBackHandler:
    monkeypatch.setattr(reach, "dial", dialled)
    return DialBackHandler(cast(Any, SimpleNamespace(list_peers=_connected)), start_scout)


async def _answer(desk: DialBackHandler, n: int) -> DialBackReply:
    return wire.unpack(DialBackReply, await desk.answer(PeerId(f"asker{n}"), wire.pack(DialBackRequest((4001,)))))


def test_many_are_dialled_at_once_and_too_many_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        let_go = asyncio.Event()

        async def dialled(address: Any) -> Dialled:
            await let_go.wait()
            return Dialled.SILENT

        desk = _desk(monkeypatch, dialled)
        tries = [asyncio.create_task(_answer(desk, n)) for n in range(reach.MOST_TRIES)]
        await asyncio.sleep(0)
        assert await _answer(desk, reach.MOST_TRIES) == BUSY
        assert await _answer(desk, 0) == BUSY, "one try at a time for each"
        let_go.set()
        assert await asyncio.gather(*tries) == [FAILED] * reach.MOST_TRIES
        assert await _answer(desk, 0) == FAILED

    asyncio.run(main())


def test_nobody_has_a_helper_make_handshakes_all_day(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tried = Counter[Any]()

        async def dialled(address: Any) -> Dialled:
            tried[address.text] += 1
            return Dialled.SILENT

        desk = _desk(monkeypatch, dialled)
        answers = [await _answer(desk, n % 12) for n in range(1200)]
        assert max(tried.values()) <= reach.TRIES.stranger.burst + 1
        assert sum(tried.values()) <= reach.TRIES.strangers.burst + 30 * reach.TRIES.strangers.per_second
        assert answers.count(BUSY) == 1200 - sum(tried.values())

    asyncio.run(main())


class Scout:
    """A daemon of the helper that takes its time to start, and reaches whom it dials."""

    def __init__(self) -> None:
        self.let_go, self.running = asyncio.Event(), 0
        self._client = SimpleNamespace(connect=self._connect)

    async def start(self) -> Scout:
        self.running += 1
        assert self.running == 1, "one after the other"
        await self.let_go.wait()
        return self

    async def _connect(self, peer: Any, addresses: list[Any]) -> None:
        assert str(addresses[0]).endswith("/tcp/4001")

    async def shutdown(self) -> None:
        self.running -= 1


def test_who_has_to_wait_too_long_for_a_daemon_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def accepted(address: Any) -> Dialled:
            return Dialled.ACCEPTED

        scout = Scout()
        desk = _desk(monkeypatch, accepted, cast(Any, scout.start))
        served = asyncio.create_task(_answer(desk, 1))
        await asyncio.sleep(0)
        monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.01)
        assert await _answer(desk, 2) == BUSY
        scout.let_go.set()
        assert (await served).address == HERE
        assert (await _answer(desk, 2)).address == "/ip4/11.0.0.2/tcp/4001"

    asyncio.run(main())
