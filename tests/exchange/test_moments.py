"""Optimizer moments on offer: who asks gets exactly those, and nothing that is not on offer any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange import requests
from spes_p2p.exchange.moments import MomentsHead, MomentStore
from spes_p2p.exchange.requests import PackedRequest, unpack_request
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.moments import NO_MOMENTS, Moments
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.donor import Serving
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual
from tests.state.small import file_size_limit
from tests.sync.chains import A, B, MadeRun

MADE = MadeRun()
P, Q = sha256(b"p"), sha256(b"q")
SIZE = MADE.layout.blocks[2].size


def moments(seed: int, steps: int = 7) -> Moments:
    rng = np.random.default_rng(seed)
    return Moments(steps, rng.standard_normal(SIZE, np.float32), rng.random(SIZE, np.float32))


def same(left: Moments | None, right: Moments) -> bool:
    assert left is not None
    return (
        left.steps == right.steps
        and np.array_equal(left.mean, right.mean)
        and np.array_equal(left.square, right.square)
    )


class Giver:
    """Serves what is on a shelf."""

    def __init__(self, folder: Path) -> None:
        self.shelf = MomentStore(folder / "moments", MADE.layout)
        chain = Chain(folder / "chain")
        chain.append(MADE.chain(1)[0])
        self._serving = Serving(MADE.info, chain, None, lambda *request: None, self.shelf)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        return self._serving.answer(unpack_request(request), caller)


class Liar(Giver):
    """Answers with the bytes of a true answer, changed."""

    def __init__(self, folder: Path, header: bytes | None, cut: int) -> None:
        super().__init__(folder)
        self._header, self._cut = header, cut

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        blob = await super().on_fetch(caller, request)
        return Blob(
            bytes(blob.data)[: len(blob.data) - self._cut], blob.header if self._header is None else self._header
        )


def ask(giver: Giver, head: Hash, column: int, me: PeerId = A) -> Moments | None:
    async def main() -> Moments | None:
        network = MemoryNetwork(1)
        await network.peer(B).transport.serve(giver)
        transfers = Transfers(network.peer(me).transport, MADE.layout, lambda: 5.0)
        moments = await transfers.moments(B, head, column)
        await transfers.moments_taken(B, head, column)
        return moments

    return run_virtual(main())


def test_what_is_offered_arrives_as_it_was(tmp_path: Path) -> None:
    giver = Giver(tmp_path)
    giver.shelf.offer(P, [(1, moments(1)), (2, moments(2, steps=3)), (3, NO_MOMENTS)])
    assert same(ask(giver, P, 1), moments(1))
    assert same(ask(giver, P, 2), moments(2, steps=3))
    assert ask(giver, P, 3) is None
    assert [giver.shelf.taken(column) for column in range(4)] == [set(), {A}, {A}, {A}]


def test_that_they_are_taken_is_the_word_of_a_member(tmp_path: Path) -> None:
    """Who leaves would not wait for its heirs, where a stranger has said so."""
    giver = Giver(tmp_path)
    giver.shelf.offer(P, [(1, moments(1))])
    assert same(ask(giver, P, 1, B), moments(1))
    assert not giver.shelf.taken(1)


def test_other_columns_and_other_manifests_are_refused(tmp_path: Path) -> None:
    giver = Giver(tmp_path)
    giver.shelf.offer(P, [(1, moments(1))])
    for head, column in ((P, 2), (Q, 1)):
        with pytest.raises(RemoteProtocolError, match="no moments on top of"):
            ask(giver, head, column)
    giver.shelf.stands(Q)
    assert same(ask(giver, Q, 1), moments(1))
    assert same(ask(giver, P, 1), moments(1))


def test_only_the_last_offer_stands(tmp_path: Path) -> None:
    giver = Giver(tmp_path)
    giver.shelf.offer(P, [(1, moments(1))])
    giver.shelf.offer(Q, [(2, moments(2))])
    with pytest.raises(RemoteProtocolError):
        ask(giver, P, 1)
    assert len(list((tmp_path / "moments").iterdir())) == 1
    giver.shelf.clear()
    assert list((tmp_path / "moments").iterdir()) == []
    with pytest.raises(RemoteProtocolError):
        ask(giver, Q, 2)


def test_those_of_one_answer_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, tiles = Giver(tmp_path), MADE.layout.tiles_of(2)
    giver.shelf.offer(P, [(1, moments(1))])
    monkeypatch.setattr(requests, "MAX_JOINED_BYTES", 2 * 4 * tiles[0].size - 1)  # a single one is given all the same
    assert giver.shelf.serve(P, tiles[0].id, 1) is not None
    assert giver.shelf.serve(P, tiles[0].id, 2) is None
    assert same(ask(giver, P, 1), moments(1))


def test_a_full_disk_offers_from_memory(tmp_path: Path) -> None:
    giver = Giver(tmp_path)
    with file_size_limit(64):
        giver.shelf.offer(P, [(1, moments(1))])
    assert same(ask(giver, P, 1), moments(1))


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, -1), (0, 10**6), (2**62, 1), (0, 65), (0, 1)])
def test_requests_that_make_no_sense_are_refused(tmp_path: Path, first: int, count: int) -> None:
    giver = Giver(tmp_path)
    giver.shelf.offer(P, [(1, moments(1))])
    with pytest.raises(RemoteProtocolError):
        giver._serving.answer(unpack_request(pack(PackedRequest("moments", pack((P, first, count))))), A)


@pytest.mark.parametrize(
    ("header", "cut"), [(None, 4), (pack(MomentsHead(0)), 0), (b"", 0), (b"x" * 100, 0), (pack((7, 7)), 0)]
)
def test_answers_of_the_wrong_size_or_shape_are_refused(tmp_path: Path, header: bytes | None, cut: int) -> None:
    giver = Liar(tmp_path, header, cut)
    giver.shelf.offer(P, [(1, moments(1))])
    with pytest.raises((RemoteProtocolError, NetworkError)):
        ask(giver, P, 1)
