"""Real peers beside a stranger that speaks for many keys, whose statuses are as large as can be: rounds go on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.membership import LINK_PRIVATE
from spes_p2p.consensus.messages import Intent, Signed, Status, Work
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import MAX_PEER_ID, PeerId, sha256
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.identity import RsaSigner
from spes_p2p.swarm.keys import RSA_BITS, RsaVerifier
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer
from spes_p2p.wire import pack
from tests.fork_server import ForkedSwarm
from tests.swarm.micro import LOCAL, MICRO, identity_of, nothing_left

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
HONEST = ("p0", "p1", "p2")
ROOMY = ("swarm.heartbeat_seconds=1",)
"""So that nobody falls silent for a busy machine."""
ROUNDS = 4
"""Beside the whole crowd."""
KEYS = 12
"""Of each kind: with statuses as large as they may be, and with larger ones."""
LONGEST = tuple(PeerId(f"{at:04}".ljust(MAX_PEER_ID, "Q")) for at in range(1024))
TILES = 60
"""Fewer than the run has."""
EVERY_SECONDS = 1.0
"""Each key of the one kind speaks, and one of the other: more bytes than that are refused before anybody reads them."""


class Crowd:
    """The stranger. What it says stands on the head of whom it says it to."""

    def __init__(self, network: HivemindNetwork) -> None:
        made = (rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS) for _ in range(2 * KEYS))
        signers = [RsaSigner(key) for key in made]
        self._network, self._me = network, network.signer.peer_id
        self._large, self._larger = signers[:KEYS], itertools.cycle(signers[KEYS:])
        self._sequence, self._checker = itertools.count(1), EnvelopeChecker(RsaVerifier())

    async def speak_for_ever(self, to: Iterable[PeerId]) -> None:
        await asyncio.gather(*(self._speak_to(peer) for peer in to))

    async def _speak_to(self, peer: PeerId) -> None:
        while True:
            with suppress(RemoteProtocolError, NetworkError):
                theirs = await self._ask(peer)
                await self._ask(peer, *(self._said(signer, theirs) for signer in self._large))
                await self._ask(peer, self._said(next(self._larger), theirs, LONGEST))
            await asyncio.sleep(EVERY_SECONDS)

    async def _ask(self, peer: PeerId, *said: Signed[Status]) -> Status:
        data = await self._network.transport.call(peer, pack(Envelope(self._me, said)), timeout_seconds=5.0)
        statuses = self._checker.open(peer, data).statuses
        return next(signed.value for signed in statuses if signed.author == peer)

    def _said(self, signer: RsaSigner, theirs: Status, unheard: tuple[PeerId, ...] = ()) -> Signed[Status]:
        intent = Intent(joining=True, max_columns=-1, claims=tuple(range(8)), link_class=LINK_PRIVATE)
        status = replace(
            theirs, peer=signer.peer_id, incarnation=1, sequence=next(self._sequence), work=Work(), intent=intent,
            plan=sha256(b"another"), reports=bytes(TILES), staged=bytes(TILES), unheard=unheard,
            lacks=tuple(sha256(bytes([at])) for at in range(8)),
        )  # fmt: skip
        return KeySealer(signer).seal(status)


def members_of(folder: Path) -> list[int]:
    """How many each manifest of a peer's chain names."""
    chain = Chain(folder / "run" / "chain")
    return [len(chain.commit(round).manifest.members) for round in range(chain.length)]


def test_rounds_go_on_beside_a_crowd_with_the_largest_statuses(tmp_path: Path, tokens: Path) -> None:
    with nothing_left() as mark, NetworkThread() as thread, ForkedSwarm(tmp_path, environment=mark) as swarm:
        node = swarm.bootstrap(
            "tiny", tokens, [*MICRO, *ROOMY, "swarm.trusted=vouched", f"swarm.min_peers={len(HONEST)}"]
        )
        named = [identity_of(tmp_path / name) for name in HONEST]
        swarm.ask("run", "vouch", *named, "--folder", str(node.folder))
        for name in HONEST:
            swarm.peer(name, tokens, LOCAL)
        swarm.wait_for_round(1, HONEST)
        listed = [(tmp_path / name / "addresses.txt").read_text().split() for name in HONEST]
        addresses = sorted({one for lines in listed for one in lines if "/p2p/" in one})
        network = thread.run(HivemindNetwork.start(addresses, host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
        try:
            talking = thread.submit(Crowd(network).speak_for_ever(named))
            swarm.wait_until(lambda: members_of(tmp_path / "p0")[-1] >= len(HONEST) + KEYS, "the crowd is in", HONEST)
            swarm.wait_for_round(len(members_of(tmp_path / "p0")) + ROUNDS, HONEST)
            assert not talking.done()
            talking.cancel()
        finally:
            thread.run(network.close())
        for process in swarm.processes.values():
            process.end()
    crowded = [count >= len(HONEST) + KEYS for count in members_of(tmp_path / "p0")]
    assert sum(crowded) >= ROUNDS // 2, "they were there"
