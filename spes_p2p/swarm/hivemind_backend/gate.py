"""What others may call of this peer: hivemind's table of handlers, in which every handler stands behind the door.

It covers the DHT's own handlers, too, and whatever a library registers. A request is judged as it came, before
anything is parsed of it. Streams pass the StreamServer, which has a door of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hivemind.p2p import P2P, PeerID

from spes_p2p.swarm.calls import CallDoor, Weigh
from spes_p2p.swarm.hivemind_backend.connections import peer_of

Unary = Callable[[bytes, PeerID], Awaitable[bytes]]


class GuardedHandlers(dict[str, Unary]):
    """The handlers of one daemon by name. `weighing`: by name, what a request costs; the others cost one call."""

    def __init__(self, door: CallDoor, weighing: dict[str, Weigh]) -> None:
        super().__init__()
        self._door, self._weighing = door, weighing

    def __setitem__(self, name: str, handler: Unary) -> None:
        async def guarded(request: bytes, remote: PeerID) -> bytes:
            weigh = self._weighing.get(name)
            return await self._door.answered(peer_of(remote), request, lambda: handler(request, remote), weigh)

        super().__setitem__(name, guarded)


def guard(p2p: P2P, door: CallDoor, weighing: dict[str, Weigh]) -> None:
    """From now on, whatever `p2p` registers is behind `door`."""
    control = p2p._client.control
    assert not control.unary_handlers, "a handler was registered before the door was there"
    control.unary_handlers = GuardedHandlers(door, weighing)
