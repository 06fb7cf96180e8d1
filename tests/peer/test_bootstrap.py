"""A bootstrap node whose words nobody can read any more stays up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from spes_p2p.peer.bootstrap import BootstrapOptions, serve_until
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.swarm.hivemind_backend import NetworkThread

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def test_a_full_log_ends_no_node(tmp_path: Path) -> None:
    said, went_on, stop = list[str](), threading.Event(), asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if "metrics" in text:
            went_on.set()
        raise OSError(28, "No space left on device")

    options = BootstrapOptions(NetworkOptions((), (LOOPBACK,), use_relay=False), tmp_path, metrics_port=0)
    with NetworkThread() as thread:
        serving = thread.submit(serve_until(stop, options, say))
        while not went_on.wait(0.05):
            if serving.done():
                serving.result()
        thread.loop.call_soon_threadsafe(stop.set)
        serving.result()
    assert said[0].startswith("DHT node at")
