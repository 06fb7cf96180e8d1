"""The numbers of a bootstrap node, looked up every second and served to Prometheus where that was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from spes_p2p.consensus.messages import DEGRADED
from spes_p2p.observe.node_metrics import NodeMetrics, NodeState
from spes_p2p.observe.prometheus import MetricsServer
from spes_p2p.ownership.expert_map import orphans
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.tasks import Tasks

LOOK_SECONDS = 1.0


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

    server, tasks = MetricsServer(metrics, port, host), Tasks(failed)
    tasks.spawn(_keep_looking(metrics, look))
    await asyncio.sleep(0)  # the first look: whoever is told may ask at once
    say(f"metrics: http://{host}:{server.port}/metrics")
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
    return NodeState(transport.bytes_sent, transport.bytes_received)


def state_of_run(
    transport: Transport, chain: Chain, announcer: Announcer, organiser: Organiser, data_pieces: int
) -> NodeState:
    """Of the node that began the run."""
    newest, received_at = chain.newest_received or (None, None)
    manifest, archived = newest.manifest if newest else None, organiser.archived
    return NodeState(
        transport.bytes_sent,
        transport.bytes_received,
        round=manifest.round if manifest else None,
        step=manifest.step if manifest else None,
        tokens=manifest.tokens if manifest else None,
        round_timestamp_seconds=received_at,
        degraded=newest.certificate.kind == DEGRADED if newest else None,
        members=len(manifest.members) if manifest else None,
        columns_without_owner=len(orphans(manifest.ownership)) if manifest else None,
        peers_seen=sum(record.role == "peer" for record in announcer.known.values()),
        peers_waiting=len(organiser.waiting),
        archive_round=archived.round if archived else None,
        data_pieces=data_pieces,
    )
