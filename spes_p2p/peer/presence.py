"""What a peer says of itself in the DHT, beside what it says to the others: its record, and its newest certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spes_p2p import __version__
from spes_p2p.consensus.messages import Commit
from spes_p2p.data.held import Held
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import columns_of
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.data_supply import DataSupply
from spes_p2p.peer.phases import phase_of
from spes_p2p.peer.vitals import VitalsKeeper
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.records import MAX_ADDRESSES, MAX_SPEED, PeerRecord
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.driver import Driver


@dataclass
class Progress:
    """What the peer's own record says of its training; written by the training thread."""

    step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0


class Presence:
    """What the Announcer speaks for, on the network's loop."""

    def __init__(
        self,
        run_id: str,
        network: HivemindNetwork,
        contacts: Contacts,
        data: DataSupply,
        is_paused: Callable[[], bool],
        token: bytes = b"",
    ) -> None:
        self._token = token
        self.progress = Progress()
        self.vitals = VitalsKeeper()
        self._run_id = run_id
        self._network = network
        self._contacts = contacts
        self._data = data
        self._is_paused = is_paused
        self._joined_at = int(time.time())
        self._driver: Driver | None = None
        self._chain: Chain | None = None
        self._tip: tuple[Commit, float] | None = None

    def begin(self, driver: Driver, chain: Chain) -> None:
        """The peer takes part from now on."""
        self._driver, self._chain = driver, chain

    def newest(self) -> tuple[Commit, float] | None:
        """The newest commit here, and when it came."""
        if self._driver is None or self._chain is None or (commit := self._driver.core.state.own.commit) is None:
            return None
        if self._tip is None or self._tip[0] is not commit:  # its file goes before it does, where another history won
            self._tip = commit, self._chain.received_of(commit.manifest) or time.time()
        return self._tip

    def acquaintances(self) -> tuple[PeerId, ...]:
        """Whom this peer knows apart from the DHT."""
        return tuple(self._driver.core.state.others.contacts) if self._driver is not None else ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        """Who is in the DHT and no member of ours hears from us: it may stand on another history of the run."""
        if self._driver is not None:
            self._driver.greet(peer for peer in known if peer != self._network.signer.peer_id)
        self._contacts.learnt(known.values())

    def describe(self) -> PeerRecord:
        """The record of now."""
        me, core = self._network.signer.peer_id, self._driver.core if self._driver else None
        is_member = core is not None and core.state.is_member()
        return PeerRecord(
            run_id=self._run_id,
            peer=me,
            addresses=() if self._network.client_mode else self._network.transport.addresses[:MAX_ADDRESSES],
            version=__version__,
            round=core.tip.round if core else 0,
            step=self.progress.step,
            tokens=self.progress.tokens,
            tokens_per_second=min(self.progress.tokens_per_second, MAX_SPEED),
            owned=columns_of(core.tip.ownership, me) if core and is_member else (),
            role="peer",
            client_mode=self._network.client_mode,
            joined_at_seconds=self._joined_at,
            data_pieces=self._data.pieces if core else 0,
            held=self._data.held() if core else Held(),
            vitals=self.vitals.now(self._phase()),
            token=self._token,
        )

    def _phase(self) -> str:
        if self._is_paused():
            return "paused"
        core = self._driver.core if self._driver is not None else None
        return phase_of(core.state.round) if core is not None and core.state.is_member() else "waiting"
