"""What Prometheus reads from a peer, over a real socket; the Grafana dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spes_p2p.errors import ConfigError
from spes_p2p.observe.events import Columns, Error, Eval, EventBus, Pause, Peer, Warning
from spes_p2p.observe.prometheus import Metrics, MetricsServer
from spes_p2p.peer.node_metrics import COUNTERS, NodeMetrics, NodeState
from tests.observe.test_events import LOAD, ROUND, STEP

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "bootstrap" / "grafana.json"


NAMES = [field.name for field in fields(NodeState)]


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels of the sample without the peer's own) to value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (sample.labels.pop("run_id"), sample.labels.pop("peer")) == ("tiny", "anna")
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"spes_p2p_{name}", frozenset(labels.items())


def test_events_become_metrics() -> None:
    metrics = Metrics("tiny", "anna")
    bus = EventBus(metrics)
    with closing(MetricsServer(metrics.registry, 0)) as server:
        for event in (
            STEP, STEP, ROUND, LOAD, Eval(2, 40, 1.25, 4096), Peer("lost", "ben", 2),
            Columns(2, (1, 2)), Pause(True, "key"), Warning("x"), Error("y"),
        ):  # fmt: skip
            bus.emit(event)
        found = scraped(server.port)
    assert found[key("loss")] == 2.5
    assert found[key("step_tokens_total")] == 2048
    assert found[key("round")] == 2
    assert found[key("rounds_total", commit="committed")] == 1
    assert found[key("bytes_total", direction="sent", what="state")] == 10
    assert found[key("phase_seconds_sum", phase="reduce")] == 0.5
    assert found[key("stale_columns")] == 2
    assert (found[key("expert_load", expert="0")], found[key("expert_load", expert="1")]) == (1.5, 0.5)
    assert (found[key("expert_load_highest")], found[key("expert_load_lowest")]) == (2.5, 0.2)
    assert found[key("held_out_loss")] == 1.25
    assert found[key("peer_changes_total", change="lost")] == 1
    assert (found[key("adopted_columns_total")], found[key("paused")]) == (2, 1)
    assert (found[key("warnings_total")], found[key("errors_total")]) == (1, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_is_told_is_one_that_can_be_asked(host: str) -> None:
    try:
        opened = MetricsServer(Metrics("tiny", "me").registry, 0, host)
    except ConfigError:
        pytest.skip(f"this machine has no address {host}")
    with closing(opened) as server:
        assert urllib.request.urlopen(server.url).status == 200


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    metrics = Metrics("tiny", "anna")
    with closing(MetricsServer(metrics.registry, 0)) as server:
        with pytest.raises(ConfigError, match=f"--metrics-port {server.port} is taken"):
            MetricsServer(metrics.registry, server.port)
        with pytest.raises(ConfigError, match=r"--metrics-port 0 cannot be opened at 192\.0\.2\.1"):
            MetricsServer(metrics.registry, 0, "192.0.2.1")


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [*dashboard["panels"], *(inner for panel in dashboard["panels"] for inner in panel.get("panels", []))]


def series_of(metrics: Metrics) -> Iterator[str]:
    """All that Prometheus may see, with the suffixes that it adds."""
    for metric in metrics.registry.collect():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
        yield from (metric.name + ending for ending in endings)


def test_the_grafana_dashboard_names_only_metrics_that_exist() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    expressions = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]
    expressions += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    named = {name for text in expressions for name in re.findall(r"spes_p2p_\w+", text)}
    assert len(expressions) > 10
    assert named <= set(series_of(Metrics("tiny", "anna")))
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    explained = set(re.findall(r"^\| `(spes_p2p_\w+)`", page, re.MULTILINE))
    metrics = Metrics("tiny", "anna")
    made = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    node = {f"spes_p2p_bootstrap_{name}" + ("_total" if name in COUNTERS else "") for name in NAMES}
    assert explained == made | node


def test_what_a_bootstrap_node_knows_is_served_and_nothing_else() -> None:
    metrics = NodeMetrics("tiny", "anna")
    with closing(MetricsServer(metrics.registry, 0)) as server:
        assert scraped(server.port) == {}
        metrics.show(NodeState(10, 20))
        assert scraped(server.port) == {
            key("bootstrap_bytes_sent_total"): 10.0, key("bootstrap_bytes_received_total"): 20.0,
        }  # fmt: skip
        metrics.show(NodeState(7, 7, 7, 7, 7, 7.0, True, 7, 7, 7, 7, 7, 7))
        assert len(scraped(server.port)) == len(NAMES)
        metrics.show(None)
        assert scraped(server.port) == {}
