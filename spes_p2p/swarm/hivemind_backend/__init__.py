"""The ports over libp2p, through hivemind: the only package that imports it.

    thread      the one thread and loop on which all of this runs
    locks       locks on files
    identity    key file, signatures
    daemon      the libp2p daemon and its sockets
    dial        plain TCP dials that tell failures apart
    hello, join the first word between peers: clocks, identities, initial peers
    reach       whether others can dial us
    transport   calls and streams
    directory   the DHT
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
