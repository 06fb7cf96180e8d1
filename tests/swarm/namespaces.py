"""Hosts with addresses of their own on this machine: network namespaces, switches between them, homes behind NAT.

Links can be limited and cables pulled. Needs the right to make namespaces (root, and `ip` and `tc` of iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from spes_p2p.quickstart.processes import Host

_NAT_BOX = Path(__file__).with_name("nat_box.py")


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


class Lab:
    """Switches in a namespace of their own, and hosts on them, each in its own. 11.0.0.0/24 exists only inside."""

    def __init__(self, stack: ExitStack, tag: str = "", switches: Sequence[str] = ("net",)) -> None:
        """`tag` begins the names of all namespaces. Leaving `stack` removes them."""
        self._stack = stack
        self._spaces: set[str] = set()
        self._tag = tag or f"s{os.getpid() % 100000}"
        self._hub = self._namespace("hub")
        for switch in switches:
            _ip("-n", self._hub, "link", "add", switch, "type", "bridge")
            _ip("-n", self._hub, "link", "set", switch, "up")

    def host(self, name: str, switch: str, address: str) -> Host:
        space = self._namespace(name)
        self._join(space, name, switch, address)
        return Host(address, space)

    def home(self, name: str, switch: str, address: str, hosts: Sequence[str], delay_seconds: float = 0.0) -> Host:
        """A host behind a router that has `address` outside. It reaches `hosts` (ADDRESS:PORT), and nobody reaches it.

        What its router carries takes `delay_seconds` longer, each way.
        """
        space, inside, outside = (self._namespace(f"{name}{part}") for part in ("", "-in", "-out"))
        self._join(outside, name, switch, address)
        _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", "lan", "netns", inside)
        for where, device, own in ((space, "eth0", "192.168.1.2/24"), (inside, "lan", "192.168.1.1/24")):
            _ip("-n", where, "addr", "add", own, "dev", device)
            _ip("-n", where, "link", "set", device, "up")
        _ip("-n", space, "route", "add", "default", "via", "192.168.1.1")
        for at in sorted({host.rsplit(":", 1)[0] for host in hosts}):
            _ip("-n", inside, "addr", "add", f"{at}/32", "dev", "lo")
        command = ["ip", "netns", "exec", inside, sys.executable, str(_NAT_BOX)]
        command += ["--outside", outside, "--delay", str(delay_seconds)]
        router = subprocess.Popen(
            [*command, *(word for host in hosts for word in ("--host", host))], stdout=subprocess.PIPE
        )
        self._stack.callback(_end, router)
        assert router.stdout is not None
        if router.stdout.readline() != b"ready\n":
            raise OSError(f"the router of {name} did not start")
        return Host("192.168.1.2", space)

    def limit(self, name: str, kbit_per_second: int, down_kbit_per_second: int = 0) -> None:
        """From now on a host (or the router of a home) sends and receives no faster than this.

        What is queued by then stays queued. `down_kbit_per_second`: where it may receive at another rate.
        """
        space = f"{self._tag}-{name}"
        space = f"{space}-out" if f"{space}-out" in self._spaces else space
        rates = (kbit_per_second, down_kbit_per_second or kbit_per_second)
        for (where, device), rate in zip(((space, "eth0"), (self._hub, name)), rates, strict=True):
            shape = ("tbf", "rate", f"{rate}kbit", "burst", "16kb", "latency", "300ms")
            _run("ip", "netns", "exec", where, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def move(self, name: str, switch: str) -> None:
        """A host hangs on another switch from now on."""
        _ip("-n", self._hub, "link", "set", name, "master", switch)

    def _join(self, space: str, name: str, switch: str, address: str) -> None:
        _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", name, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", name, "master", switch, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")

    def _namespace(self, name: str) -> str:
        space = f"{self._tag}-{name}"
        _ip("netns", "add", space)
        self._stack.callback(_ip, "netns", "del", space)
        _ip("-n", space, "link", "set", "lo", "up")
        self._spaces.add(space)
        return space


class TwoHalves(Lab):
    """Two switches, joined by one cable."""

    def __init__(self, stack: ExitStack, tag: str = "") -> None:
        super().__init__(stack, tag, ("left", "right"))
        _ip("-n", self._hub, "link", "add", "cable", "type", "veth", "peer", "name", "socket")
        for end, switch in (("cable", "left"), ("socket", "right")):
            _ip("-n", self._hub, "link", "set", end, "master", switch, "up")

    def pull(self) -> None:
        _ip("-n", self._hub, "link", "set", "cable", "down")

    def plug(self) -> None:
        _ip("-n", self._hub, "link", "set", "cable", "up")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
