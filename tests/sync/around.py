"""What `Connection` and the bootstrap node have around their drivers, for a swarm in memory."""

from __future__ import annotations

from collections.abc import Mapping

from spes_p2p.consensus.messages import Commit
from spes_p2p.ids import PeerId
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organiser_words import WORDS_FILE, OrganiserWatch
from spes_p2p.sync.sealing import EnvelopeChecker
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


class Surroundings:
    """What `Connection` and the bootstrap node have around their drivers: records, and the organiser's words."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm = swarm
        self._parts: dict[str, tuple[OrganiserWatch, Announcer]] = {}

    async def add(self, name: str) -> None:
        swarm, net = self._swarm, self._swarm.network.peer(name)
        if name == ORGANISER:
            obey, failed, chain = swarm.seat.obey, swarm.server_failures.append, swarm.organiser.chain
        else:
            life = peer(swarm, name)
            obey, failed, chain = life.driver.obey, life.failures.append, life.chain
        check = EnvelopeChecker(net.verifier).check
        watch = OrganiserWatch(swarm.info, net.directory, check, obey, failed, swarm.folder / name / WORDS_FILE)
        announcer = Announcer(_Node(swarm, name, chain), swarm.info, net, failed)
        self._parts[name] = watch, announcer
        await watch.start()
        await announcer.start()

    async def remove(self, name: str) -> None:
        for part in self._parts.pop(name):
            await part.stop()

    async def stop(self) -> None:
        for name in list(self._parts):
            await self.remove(name)


class _Node:
    """One of the swarm, as its announcer speaks for it."""

    def __init__(self, swarm: MemorySwarm, name: str, chain: Chain) -> None:
        self._swarm, self._name, self._chain = swarm, name, chain

    def describe(self) -> PeerRecord:
        return _record(self._swarm, self._name, self._chain)

    def newest(self) -> tuple[Commit, float] | None:
        return self._chain.newest_received

    def acquaintances(self) -> tuple[PeerId, ...]:
        return ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        if self._name != ORGANISER:
            peer(self._swarm, self._name).driver.greet(one for one in known if one != self._name)


def _record(swarm: MemorySwarm, name: str, chain: Chain) -> PeerRecord:
    return PeerRecord(
        run_id=swarm.info.run_id, peer=PeerId(name), addresses=swarm.network.peer(name).transport.addresses,
        version="0", round=max(0, chain.length - 1), step=0, tokens=0, tokens_per_second=0.0, owned=(),
        role="bootstrap" if name == ORGANISER else "peer", client_mode=False, joined_at_seconds=0,
    )  # fmt: skip
