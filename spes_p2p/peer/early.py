"""What keeps a peer from starting on this machine, as far as that is known before PyTorch is loaded, which takes long.

All of it is checked again where it is used. Loads nothing large.
"""

from __future__ import annotations

from spes_p2p.peer.folder import make_folder
from spes_p2p.peer.options import PeerOptions
from spes_p2p.swarm.hivemind_backend.daemon import check_ports
from spes_p2p.swarm.hivemind_backend.identity import check_free


def check_start(options: PeerOptions) -> None:
    """Raises ConfigError for a folder that cannot be used, IdentityInUse where a peer runs in it, NetworkError for a
    port on which something listens."""
    make_folder(options.folder)
    check_free(options.network.identity_path or options.folder / "identity.key")
    if not options.network.client_mode:
        check_ports(options.network.host_maddrs)
