"""A dashboard that is served for real, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.serve import Serving


@contextmanager
def served(history: History) -> Iterator[str]:
    """The address of the page."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = Serving(history, listener)
        thread = threading.Thread(target=lambda: asyncio.run(serving.run()))
        listener.listen()  # so that who comes before the server does waits for it
        thread.start()
        try:
            yield serving.address
        finally:
            serving.stop()
            thread.join()
