"""Where the data lies on the web: the organiser's word alone, the newest of it, and passed on by everybody."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.data.pieces import PieceGrid
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.pieces import DataTraffic, EmptyShelf, PieceServing
from spes_p2p.exchange.requests import SourcesRequest, unpack_request
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_backend import FakeKeys, MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.sync.web_sources import SOURCES_FILE, SourceKeeper, check_sources, sign_sources
from spes_p2p.wire import pack
from tests.data.piece_makers import make_pieces
from tests.simulation.virtual_time import virtual
from tests.sync.chains import ORGANISER
from tests.sync.swarm_cases import small_config

ME, B = PeerId("me"), PeerId("b")
FIRST, SECOND = ("https://a.example.org/x",), ("https://b.example.org/x", "hf://datasets/me/mine")


class Run:
    """A run with a dataset, and keepers of its nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, FakeKeys()
        self.grid: PieceGrid = make_pieces(folder / "data").grid
        self.info: RunInfo = describe_run(small_config(), self.grid.catalogue.dataset_hash, ORGANISER)
        self.check = EnvelopeChecker(self.keys).check

    def keeper(self, name: str) -> SourceKeeper:
        return SourceKeeper(self.info, self.check, self.folder / name)

    def publish(self, keeper: SourceKeeper, urls: tuple[str, ...], sequence: int = 1) -> None:
        keeper.publish(urls, sequence, KeySealer(self.keys.signer(ORGANISER)))


class Node:
    """Answers as nodes do."""

    def __init__(self, run: Run, keeper: SourceKeeper) -> None:
        self._serving = PieceServing(EmptyShelf(run.grid), DataTraffic(), lambda: keeper.packed)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        asked = unpack_request(request)
        assert isinstance(asked, SourcesRequest)
        return self._serving.answer(asked)


@virtual
async def test_a_list_goes_from_the_organiser_over_a_peer_to_a_third(tmp_path: Path) -> None:
    run, network = Run(tmp_path), MemoryNetwork(1)
    organiser, peer, late = run.keeper("organiser"), run.keeper("peer"), run.keeper("late")
    await network.peer(ORGANISER).transport.serve(Node(run, organiser))
    transport = network.peer(B).transport
    with pytest.raises(RemoteProtocolError, match="no web server is known here"):
        await peer.look(transport, ORGANISER, 5.0)
    run.publish(organiser, FIRST)
    await peer.look(transport, ORGANISER, 5.0)
    assert peer.urls == FIRST
    await transport.serve(Node(run, peer))
    network.kill(ORGANISER)
    changes: list[tuple[str, ...]] = []
    late.changed = lambda: changes.append(late.urls)
    looking = asyncio.ensure_future(late.look_on(network.peer(ME).transport, lambda: (ORGANISER, B), lambda: 5.0))
    await asyncio.sleep(60)
    assert changes == [FIRST]
    run.publish(organiser, SECOND)
    await network.restart(ORGANISER).transport.serve(Node(run, organiser))
    await asyncio.sleep(100)
    looking.cancel()
    assert changes == [FIRST, SECOND]
    assert run.keeper("late").urls == SECOND  # kept for a later life


def test_the_newest_word_counts_whoever_repeats_an_older_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    organiser, old, peer = run.keeper("organiser"), run.keeper("old"), run.keeper("peer")
    run.publish(organiser, FIRST)
    old._take(check_sources(organiser.packed or b"", run.info, run.check))
    run.publish(organiser, SECOND, sequence=0)  # a clock that went back
    for keeper in (organiser, old):
        peer._take(check_sources(keeper.packed or b"", run.info, run.check))
    assert peer.urls == SECOND
    before = organiser.packed
    run.publish(organiser, SECOND, sequence=99)
    assert organiser.packed == before  # nothing new
    run.publish(organiser, ())
    assert organiser.urls == ()
    assert organiser.packed is not None
    silent = run.keeper("silent")
    run.publish(silent, ())
    assert silent.packed is None


def test_what_the_organiser_has_not_signed_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    good = sign_sources(run.info, 1, FIRST, KeySealer(run.keys.signer(ORGANISER)))
    assert check_sources(pack(good), run.info, run.check).value.urls == FIRST
    changed = replace(good, value=replace(good.value, urls=SECOND))
    other_run = replace(good, value=replace(good.value, fingerprint=run.info.dataset))
    by_another = sign_sources(run.info, 1, FIRST, KeySealer(run.keys.signer(B)))
    for bad in (changed, other_run, by_another, replace(by_another, author=ORGANISER)):
        with pytest.raises(RemoteProtocolError):
            check_sources(pack(bad), run.info, run.check)
    with pytest.raises(ValueError, match="contains a user name or a password"):
        sign_sources(run.info, 1, ("https://me:secret@example.org",), KeySealer(run.keys.signer(ORGANISER)))


def test_a_damaged_list_on_disk_is_fetched_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    organiser = run.keeper("organiser")
    run.publish(organiser, FIRST)
    (tmp_path / "organiser" / SOURCES_FILE).write_bytes(b"damaged")
    assert run.keeper("organiser").urls == ()


@virtual
async def test_nobody_to_ask_is_no_end(tmp_path: Path) -> None:
    run, network = Run(tmp_path), MemoryNetwork(1)
    with pytest.raises(NetworkError):
        await run.keeper("peer").look(network.peer(ME).transport, ORGANISER, 5.0)
