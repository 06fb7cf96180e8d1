"""What a bootstrap node knows of its run, for Prometheus: it trains nothing and has no events, so it is looked at.

docs/metrics.md explains each metric. What is not known (a DHT node without a run, no archive) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spes_p2p.observe.prometheus import PREFIX

WORDS = {
    "round": "Newest round whose certificate is here.",
    "step": "Global step after that round.",
    "tokens": "Tokens that all rounds have counted.",
    "round_timestamp_seconds": "When that certificate came, seconds since 1970.",
    "degraded": "1 where that certificate is without a majority.",
    "members": "Members that it names.",
    "columns_without_owner": "Expert columns that nobody trains.",
    "peers_seen": "Peers whose records are in the DHT, members or not.",
    "peers_waiting": "Peers that wait for the run to begin.",
    "archive_round": "Round whose state is in the archive.",
    "data_pieces": "Pieces of the run's dataset that are held here.",
    "bytes_sent": "Bytes sent to peers since the start.",
    "bytes_received": "Bytes received from peers since the start.",
}
COUNTERS = ("bytes_sent", "bytes_received")


@dataclass(frozen=True)
class NodeState:
    """One look at a bootstrap node; WORDS says what the numbers are."""

    bytes_sent: int
    bytes_received: int
    round: int | None = None
    step: int | None = None
    tokens: int | None = None
    round_timestamp_seconds: float | None = None
    degraded: bool | None = None
    members: int | None = None
    columns_without_owner: int | None = None
    peers_seen: int | None = None
    peers_waiting: int | None = None
    archive_round: int | None = None
    data_pieces: int | None = None


class NodeMetrics(Collector):
    """Gives the newest look to whoever asks, from any thread."""

    def __init__(self, run_id: str, peer: str) -> None:
        self._labels = {"run_id": run_id, "peer": peer}
        self._state: NodeState | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def show(self, state: NodeState | None) -> None:
        """`state` is what is answered from now on; None: nothing."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for field in fields(state) if state is not None else ():
            value = getattr(state, field.name)
            if value is None:
                continue
            kind = CounterMetricFamily if field.name in COUNTERS else GaugeMetricFamily
            family = kind(f"{PREFIX}_bootstrap_{field.name}", WORDS[field.name], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), float(value))
            yield family
