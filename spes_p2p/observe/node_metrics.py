"""Prometheus metrics of a bootstrap node. It trains nothing and emits no events, so its state is polled.

docs/metrics.md explains each metric. Unknown ones (a DHT node without a run, no archive) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spes_p2p.observe.prometheus import PREFIX

COUNTERS = ("bytes_sent", "bytes_received")


def _number(words: str, default: int | None = None) -> Any:
    """A field that Prometheus is told with these words; left out where it is None: not known."""
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class NodeState:
    """One look at a bootstrap node."""

    bytes_sent: int = _number("Bytes sent to peers since the start.", 0)
    bytes_received: int = _number("Bytes received from peers since the start.", 0)
    round: int | None = _number("Newest round whose certificate this node has.")
    step: int | None = _number("Global step after that round.")
    tokens: int | None = _number("Tokens that all rounds have counted.")
    round_timestamp_seconds: float | None = _number("When that certificate arrived, in seconds since 1970.")
    degraded: bool | None = _number("1 if that certificate was not signed by a quorum.")
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
