"""An invitation for one peer: it gives that peer a vote, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p import __version__
from spes_p2p.ids import PeerId
from spes_p2p.peer.network import open_network
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.swarm.invite import decode
from spes_p2p.swarm.records import PeerRecord, peers_key
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.organiser_words import read_words, together
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.wire import pack
from tests.cli.conftest import LOOPBACK, Organiser, serve, spes_p2p
from tests.cli.test_errors import refused


@pytest.fixture(scope="module")
def vouching(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Iterator[Organiser]:
    """Of a run that never begins."""
    yield from serve(tmp_path_factory.mktemp("vouching"), tokens, "swarm.min_peers=9", "swarm.trusted=vouched")


def new_peer(folder: Path) -> PeerId:
    """The id of a peer whose key lies in `folder`."""
    identity = IdentityFile(folder / "identity.key")
    identity.release()
    return identity.signer.peer_id


async def vouched_by_then(network: HivemindNetwork, peer: PeerId, token: bytes) -> tuple[PeerId, ...]:
    """Whom the roll names, once it names anybody, while `peer` shows its token."""
    info, _ = await find_and_load(network, None, None, 10.0)
    record = PeerRecord(
        info.run_id, peer, (), __version__, 0, 0, 0, 0.0, (), "peer", True, int(time.time()), token=token
    )
    await network.directory.publish(peers_key(info.run_id), pack(record), 600.0)
    async with asyncio.timeout(120.0):
        while True:
            words = together(
                (await read_words(network.directory, info, EnvelopeChecker(network.verifier).check)).values()
            )
            if words.roll is not None:
                return words.roll.value.vouched
            await asyncio.sleep(0.5)


def test_the_organisers_node_vouches_for_the_peer_that_brings_it(tmp_path: Path, vouching: Organiser) -> None:
    me = new_peer(tmp_path)
    word = spes_p2p("invite", "--folder", str(vouching.folder), "--for", me).output.strip()
    options = NetworkOptions((vouching.address,), (LOOPBACK,), client_mode=True)

    async def show() -> tuple[PeerId, ...]:
        network = await open_network(options, tmp_path / "identity.key")
        try:
            return await vouched_by_then(network, me, decode(word).token)
        finally:
            await network.close()

    with NetworkThread() as thread:
        assert thread.run(show()) == (me,)


def doctored(node: Organiser, output: Path) -> Any:
    said = spes_p2p("doctor", "--initial-peers", node.address, "--output", str(output), "--json").output
    return json.loads(said)["checks"]


def test_the_doctor_says_what_the_organiser_must_know(
    tmp_path: Path, vouching: Organiser, organiser: Organiser
) -> None:
    checks = doctored(vouching, tmp_path / "peer")
    [votes] = [check for check in checks if check["name"] == "votes"]
    assert votes["text"].endswith(f"spes-p2p invite --for {new_peer(tmp_path / 'peer')}")
    found = {check["name"]: check["text"] for check in doctored(organiser, tmp_path / "b")}
    assert "votes" not in found
    assert found["peer"] == f"this peer will be {new_peer(tmp_path / 'b')}"


def test_another_peer_is_told_that_it_is_not_for_it(tmp_path: Path, vouching: Organiser) -> None:
    me = new_peer(tmp_path / "invited")
    word = spes_p2p("invite", "--folder", str(vouching.folder), "--for", me).output.strip()
    refused(
        spes_p2p("join", word, "-o", str(tmp_path / "other"), "--host-maddrs", LOOPBACK), "is for peer", me, "alone"
    )


def test_only_the_organiser_makes_one(tmp_path: Path, vouching: Organiser) -> None:
    new_peer(tmp_path)
    (tmp_path / "invite.txt").write_text(spes_p2p("invite", "--folder", str(vouching.folder)).output)
    wanted = ("--for", "QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn")
    refused(spes_p2p("invite", "--folder", str(tmp_path), *wanted), "but the organiser of run tiny is")
    refused(spes_p2p("invite", "--folder", str(vouching.folder), "--for", "me"), "is not the id of a peer")
