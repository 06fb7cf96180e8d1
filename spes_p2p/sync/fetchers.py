"""How one peer fetches: what the running round needs before what it caught up with, and both before repairs."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.exchange.patience import Patience
from spes_p2p.exchange.rates import Rates
from spes_p2p.exchange.transfers import FewStreams, Transfers
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.swarm.ports import Clock, Transport

LEAST_STALL_SECONDS = 2.0


class Fetchers:
    """`urgent`, `later` and `idle` transfers that share what is known of other peers."""

    def __init__(
        self, core: Consensus, transport: Transport, layout: Layout, clock: Clock, tell: Callable[[on.Event], None]
    ) -> None:
        self._core = core
        self._clock = clock

        def fetcher(kind: type[Transfers], patient: bool) -> Transfers:
            return kind(
                transport, layout, self._stall_seconds, lambda: tell(on.BytesMoved()),
                lambda peer: tell(on.HostRefusedDial(peer)), patience, patient, rates,
            )  # fmt: skip

        rates = Rates(clock.now)
        patience = Patience(lambda: 2 * core.state.pace.deadline_seconds(0), self._trained_seconds)
        looks_on = not core.state.own.intent.joining
        self.urgent = fetcher(Transfers, patient=False)
        self.later = fetcher(FewStreams if looks_on else Transfers, patient=True)
        """Transfers that yield to what the running round of other peers needs."""
        self.idle = Transfers(transport, layout, self._stall_seconds, patience=patience, patient=True)
        """Transfers for repairs, whose bytes are not counted as part of a round."""

    def holders(self) -> list[PeerId]:
        """Peers that may have the committed state: those heard from recently, and the seeds."""
        others, now = self._core.state.others, self._clock.now()
        return [*(peer for peer in others.contacts if self._core.alive(peer, now)), *others.seeds]

    def _stall_seconds(self) -> float:
        return max(self._core.state.pace.suspect_seconds, LEAST_STALL_SECONDS)

    def _trained_seconds(self) -> float:
        """How long a round trains, or the running one did."""
        current = self._core.state.round
        this = current.closed_at - current.started_at if current.closed_at is not None else 0.0
        return max(self._core.state.pace.round_seconds, this)
