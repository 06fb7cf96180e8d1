"""Hosts with addresses of their own on this machine: network namespaces, switches between them, links that get worse.

Needs the right to make them (root, and `ip` and `tc` of iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack

from spes_p2p.testing.processes import Host


def may_make_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and not _ip("netns", "list", check=False)


def may_limit_links() -> bool:
    """Whether the kernel has token buckets for links; tried on a namespace of its own."""
    if not may_make_namespaces() or shutil.which("tc") is None:
        return False
    with ExitStack() as stack:
        try:
            halves = TwoHalves(stack, tag=f"t{os.getpid() % 100000}")
            halves.host("try", "left", "11.0.0.2")
            halves.limit("try", 1000)
        except subprocess.CalledProcessError:
            return False
    return True


def _ip(*arguments: str, check: bool = True) -> int:
    return _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, check=check, capture_output=True).returncode


class TwoHalves:
    """Two switches in a namespace of their own, joined by one cable; every host in a namespace on one of them.

    11.0.0.0/24 exists inside the namespaces only.
    """

    def __init__(self, stack: ExitStack, tag: str = "") -> None:
        """`tag` begins the names of all namespaces."""
        self._stack = stack
        self._tag = tag or f"s{os.getpid() % 100000}"
        self._hub = self._namespace("hub")
        for switch in ("left", "right"):
            _ip("-n", self._hub, "link", "add", switch, "type", "bridge")
            _ip("-n", self._hub, "link", "set", switch, "up")
        _ip("-n", self._hub, "link", "add", "cable", "type", "veth", "peer", "name", "socket")
        for end, switch in (("cable", "left"), ("socket", "right")):
            _ip("-n", self._hub, "link", "set", end, "master", switch, "up")

    def host(self, name: str, switch: str, address: str) -> Host:
        space = self._namespace(name)
        _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", name, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", name, "master", switch, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        return Host(address, ("ip", "netns", "exec", space))

    def pull(self) -> None:
        _ip("-n", self._hub, "link", "set", "cable", "down")

    def plug(self) -> None:
        _ip("-n", self._hub, "link", "set", "cable", "up")

    def limit(self, name: str, kbit_per_second: int) -> None:
        """From now on a host sends and receives no faster than this; what is queued by then stays queued."""
        for space, device in ((f"{self._tag}-{name}", "eth0"), (self._hub, name)):
            shape = ("tbf", "rate", f"{kbit_per_second}kbit", "burst", "16kb", "latency", "300ms")
            _run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def _namespace(self, name: str) -> str:
        space = f"{self._tag}-{name}"
        _ip("netns", "add", space)
        self._stack.callback(_ip, "netns", "del", space)
        _ip("-n", space, "link", "set", "lo", "up")
        return space
