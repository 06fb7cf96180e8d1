"""A port that something listens on is refused, since libp2p would silently share it with another libp2p process."""

from __future__ import annotations

import socket

import pytest

from spes_p2p.errors import NetworkError, PermanentError
from spes_p2p.swarm.hivemind_backend.daemon import check_ports


def test_a_port_in_use_is_refused_even_where_it_may_be_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        maddr = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        with pytest.raises(NetworkError, match=f"port {other.getsockname()[1]} is in use") as caught:
            check_ports(["/ip4/127.0.0.1/tcp/0", maddr])
        assert "--port" in caught.value.fix
    check_ports([maddr])


def test_what_is_no_plain_tcp_address_is_left_to_the_daemon() -> None:
    check_ports(["/ip4/0.0.0.0/udp/1/quic", "/dns4/localhost/tcp/1"])


def test_what_is_no_address_is_refused_for_good() -> None:
    with pytest.raises(PermanentError, match="--host-maddrs rubbish is not a multiaddress"):
        check_ports(["rubbish"])
