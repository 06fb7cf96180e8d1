"""A node's place in the network, by what a person chose for it. Whoever only looks at a run needs no more than this."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.limits import allow_open_files
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.stream_server import StreamLimits


async def open_network(options: NetworkOptions, identity: Path) -> HivemindNetwork:
    """Joins the DHT. Raises NetworkError, IdentityInUse or ClockSkewed, each with the fix."""
    allow_open_files()
    return await HivemindNetwork.start(
        options.initial_peers,
        options.identity_path or identity,
        options.host_maddrs,
        options.announce_maddrs,
        options.client_mode,
        StreamLimits(upload_bytes_per_second=options.max_upload, download_bytes_per_second=options.max_download),
    )
