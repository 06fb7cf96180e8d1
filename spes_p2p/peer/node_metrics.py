"""The numbers of a bootstrap node, looked up every second and served to Prometheus where that was asked for.

It trains nothing and emits no events, so its state is polled. docs/metrics.md explains each metric.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spes_p2p.consensus.messages import RENEWAL
from spes_p2p.observe.prometheus import PREFIX, MetricsServer
from spes_p2p.ownership.assign import orphans
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.tasks import Tasks

LOOK_SECONDS = 1.0
COUNTERS = ("bytes_sent", "bytes_received")


def _number(words: str, default: int | None = None) -> Any:
    """A field that Prometheus is told with these words; left out where it is None: not known."""
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class NodeState:
    """One look at a bootstrap node. What is unknown (a DHT node without a run, no archive) is left out."""

    bytes_sent: int = _number("Bytes sent to peers since the start.", 0)
    bytes_received: int = _number("Bytes received from peers since the start.", 0)
    round: int | None = _number("Newest round whose certificate this node has.")
    step: int | None = _number("Global step after that round.")
    tokens: int | None = _number("Tokens that all rounds have counted.")
    round_timestamp_seconds: float | None = _number("When that certificate arrived, in seconds since 1970.")
    renewal: bool | None = _number("1 if that certificate is a renewal, by the organiser's key alone.")
    members: int | None = _number("Members that the newest manifest names.")
    columns_without_owner: int | None = _number("Expert columns that nobody trains.")
    peers_seen: int | None = _number("Peers whose records are in the DHT, members or not.")
    peers_waiting: int | None = _number("Peers waiting for the run to start.")
    archive_round: int | None = _number("Round whose state is in the archive.")
    data_pieces: int | None = _number("Pieces of the run's dataset that this node holds.")


class NodeMetrics(Collector):
    """Gives the newest look to whoever asks, from any thread."""

    def __init__(self, run_id: str, peer: str) -> None:
        self._labels = {"run_id": run_id, "peer": peer}
        self._state: NodeState | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def show(self, state: NodeState | None) -> None:
        """Makes `state` what is served from now on; None serves nothing."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for known in fields(state) if state is not None else ():
            value = getattr(state, known.name)
            if value is None:
                continue
            kind = CounterMetricFamily if known.name in COUNTERS else GaugeMetricFamily
            family = kind(f"{PREFIX}_bootstrap_{known.name}", known.metadata["words"], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), float(value))
            yield family


@contextlib.asynccontextmanager
async def measuring(
    port: int | None, host: str, run_id: str, peer: str, look: Callable[[], NodeState], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serves what `look` returns, called on this loop, while the block runs; does nothing if `port` is None.

    Raises ConfigError if the port is taken. If `look` fails, the metrics end and nothing else does.
    """
    if port is None:
        yield
        return
    metrics = NodeMetrics(run_id, peer)

    def failed(error: BaseException) -> None:
        metrics.show(None)
        say(f"the metrics have stopped: {error!r}")

    server, tasks = MetricsServer(metrics.registry, port, host), Tasks(failed)
    tasks.spawn(_keep_looking(metrics, look))
    await asyncio.sleep(0)  # the first look: whoever is told may ask at once
    say(f"metrics: {server.url}")
    try:
        yield
    finally:
        await tasks.stop()
        await asyncio.to_thread(server.close)


async def _keep_looking(metrics: NodeMetrics, look: Callable[[], NodeState]) -> None:
    while True:
        metrics.show(look())
        await asyncio.sleep(LOOK_SECONDS)


def state_of_node(transport: Transport) -> NodeState:
    """Of a node of the DHT alone."""
    return NodeState(transport.traffic.sent, transport.traffic.received)


def state_of_run(
    transport: Transport, chain: Chain, announcer: Announcer, organiser: Organiser, data_pieces: int
) -> NodeState:
    """Of the node that began the run."""
    newest, received_at = chain.newest_received or (None, None)
    manifest, archived = newest.manifest if newest else None, organiser.seat.kept
    return NodeState(
        transport.traffic.sent,
        transport.traffic.received,
        round=manifest.round if manifest else None,
        step=manifest.step if manifest else None,
        tokens=manifest.tokens if manifest else None,
        round_timestamp_seconds=received_at,
        renewal=newest.certificate.kind == RENEWAL if newest else None,
        members=len(manifest.members) if manifest else None,
        columns_without_owner=len(orphans(manifest.ownership)) if manifest else None,
        peers_seen=sum(record.role == "peer" for record in announcer.known.values()),
        peers_waiting=len(organiser.waiting),
        archive_round=archived.round if archived else None,
        data_pieces=data_pieces,
    )
