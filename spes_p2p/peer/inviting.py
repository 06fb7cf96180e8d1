"""A new invitation to a run, by somebody who reaches a live node of it and takes no part.

Leaves out what an invitation looks like (`swarm/invite.py`), and which one a node keeps (`peer/contacts.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from spes_p2p.peer.contacts import invite_of
from spes_p2p.peer.entrance import ANSWER_SECONDS, open_network
from spes_p2p.peer.options import JoinTarget, NetworkOptions
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.invite import invited_to
from spes_p2p.swarm.records import parse_all, parse_peer, peers_key
from spes_p2p.sync.joining import find_and_load


def fresh_invite(meeting: JoinTarget) -> str:
    """One with the addresses of nodes that live now. Raises NetworkError, ConfigError."""
    with NetworkThread() as thread:
        stop = asyncio.Event()
        with leaving_on_signals(lambda: thread.loop.call_soon_threadsafe(stop.set), lambda text: None):
            return thread.run(until_stopped(stop, _make(meeting)))


async def _make(meeting: JoinTarget) -> str:
    with TemporaryDirectory(prefix="spes-p2p-invite-") as folder:
        options = NetworkOptions(meeting.addresses, client_mode=True)
        network = await open_network(options, Path(folder) / "identity.key")
        try:
            return await _read(network, meeting)
        finally:
            await network.close()


async def _read(network: HivemindNetwork, meeting: JoinTarget) -> str:
    info, _ = await find_and_load(network, meeting.run_id, meeting.fingerprint, ANSWER_SECONDS)
    peers, _ = parse_all(parse_peer, await network.directory.read(peers_key(info.run_id), ANSWER_SECONDS))
    return invite_of(info, invited_to(peers.values(), info.organiser, meeting.addresses) or meeting.addresses)
