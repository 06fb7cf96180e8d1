"""The ports over libp2p, through hivemind: the only package that imports it.

    thread      the one thread and loop on which all of this runs
    identity    key file, signatures
    daemon      the libp2p daemon, its sockets, and the one that takes its place
    dial        plain TCP dials that tell failures apart
    connections who is connected, how others are reached, why they are not
    hello, join the first word between peers: clocks, identities, initial peers
    reach       whether others can dial us
    transport   calls and streams; pipe: their bytes through the daemon's socket
    gate        the door in front of all that others may call
    directory   the DHT; storage: what a node of it keeps
    network     puts them together

Importing it loads no torch (see `without_torch`), but takes a part of a second: do so inside commands.
"""

from spes_p2p.swarm.hivemind_backend.without_torch import postpone

postpone()  # before anything of hivemind is imported

from spes_p2p.swarm.hivemind_backend.identity import RsaSigner  # noqa: E402
from spes_p2p.swarm.hivemind_backend.network import HivemindNetwork  # noqa: E402
from spes_p2p.swarm.hivemind_backend.reach import Reach  # noqa: E402
from spes_p2p.swarm.hivemind_backend.thread import NetworkThread  # noqa: E402

__all__ = ["HivemindNetwork", "NetworkThread", "Reach", "RsaSigner"]
