"""Addresses of peers, and plain TCP dials that tell a host that refuses connections from one that is silent.

libp2p reports most failures in the same words, and refuses to redial for seconds after one. A TCP connection of our own
shows the cause at once. Knows nothing above TCP.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.data.web_url import is_public_address
from spes_p2p.ids import PeerId
from spes_p2p.swarm.records import LISTING, MAX_ADDRESSES

T = TypeVar("T")
PROBE_SECONDS = 2.0
MOST_PEERS = 4096
"""Whose addresses are remembered; those not heard of for longest are forgotten first, since ids cost nothing."""
_THROUGH_OTHERS = {"p2p", "p2p-circuit"}
"""Parts of an address that leads over another peer: a relay, which this network has none of."""


class Dialled(enum.Enum):
    """What a fresh TCP dial found."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    """No route, no such name: our own network may be the reason."""


@dataclass(frozen=True)
class Address:
    """A multiaddress, taken apart."""

    text: str
    """Without the /p2p/ id at its end."""
    peer: PeerId | None
    host: str = ""
    """IP address or DNS name; empty when it is not plain TCP (relayed, QUIC)."""
    port: int = 0

    @property
    def maddr(self) -> Multiaddr:
        return Multiaddr(self.text)


def parse_address(text: str) -> Address:
    """Raises ValueError, saying what is wrong."""
    try:
        whole = Multiaddr(text)
        names = [protocol.name for protocol in whole.protocols()]
        values = [whole.value_for_protocol(name) for name in names] if "p2p-circuit" not in names else []
    except Exception as error:  # the parser raises errors of many kinds
        raise ValueError(f"not a multiaddress ({_problem(error)})") from error
    base, _, peer = text.rpartition("/p2p/") if names[-1] == "p2p" else (text, "", "")
    identity = PeerId(peer.strip("/")) if peer else None
    if not values or len(names) < 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
        return Address(base, identity)
    return Address(base, identity, values[0], int(values[1]))


def _problem(error: Exception) -> str:
    """What the parser found wrong, without the address, which is said before."""
    words, part = str(getattr(error, "message", error)), getattr(error, "protocol", None)
    return f"{part}: {words}" if part else f"{words[:1].lower()}{words[1:]}"


def is_listing(text: str) -> bool:
    """Whether `text` is a /dnsaddr/ name, which stands for a list of addresses (`listed` in `join`), not for one."""
    return text.startswith(LISTING)


async def dial(address: Address, timeout_seconds: float = PROBE_SECONDS) -> Dialled:
    """Opens a TCP connection to a plain address, and closes it."""
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return Dialled.REFUSED
    except TimeoutError:
        return Dialled.SILENT
    except OSError:
        return Dialled.UNREACHABLE
    ours, theirs = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    writer.close()
    # a dial to a free port of this machine may, once in thousands, meet itself
    return Dialled.REFUSED if ours == theirs else Dialled.ACCEPTED


async def dial_all(addresses: Iterable[Address]) -> list[Dialled]:
    """Of all plain TCP addresses at once."""
    return await asyncio.gather(*(dial(address) for address in addresses if address.host))


class AddressBook:
    """What we know of where peers are: told addresses, and where connections to them were open."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[Address, ...]] = {}
        self._met: dict[PeerId, frozenset[tuple[str, int]]] = {}

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Replaces what was known of `peer`; what is no address, another peer's or at a relay is left out.

        The daemon would refuse a whole dial for an address with another peer's id inside, as hivemind writes it.
        """
        parsed = (_parsed(text) for text in list(addresses)[:MAX_ADDRESSES] if not is_listing(text))
        known = tuple(address for address in parsed if address is not None and address.peer in (None, peer))
        if known:
            _remember(self._known, peer, known)

    def met(self, peer: PeerId, places: Iterable[tuple[str, int]]) -> None:
        """An authenticated connection to `peer` was open at these hosts and ports."""
        _remember(self._met, peer, self._met.get(peer, frozenset()) | frozenset(places))

    def known(self, peer: PeerId) -> tuple[Address, ...]:
        return self._known.get(peer, ())

    def texts(self, goes_first: Callable[[PeerId], bool]) -> list[str]:
        """All known addresses, whole: of peers that go first, then of those heard of last."""
        peers = list(reversed(self._known))
        peers.sort(key=lambda peer: not goes_first(peer))
        return [f"{address.text}/p2p/{peer}" for peer in peers for address in self._known[peer]]

    def plain(self, peer: PeerId) -> tuple[Address, ...]:
        return tuple(address for address in self.known(peer) if address.host)

    def evidence(self, peer: PeerId) -> tuple[Address, ...]:
        """Addresses at which a refused connection means that the peer's process is gone.

        A private address from another network may belong to an unrelated machine in ours, and a router may refuse a
        port that it does not forward. So only addresses at which we were connected to the peer count. If there is none:
        its public addresses, or its loopback addresses if it has no others.
        """
        plain, met = self.plain(peer), self._met.get(peer)
        if met:
            return tuple(address for address in plain if (address.host, address.port) in met)
        public = tuple(address for address in plain if _is_public(address.host))
        return public or (plain if all(_is_loopback(address.host) for address in plain) else ())


def _remember(found: dict[PeerId, T], peer: PeerId, what: T) -> None:
    found.pop(peer, None)
    found[peer] = what  # the newest last
    if len(found) > MOST_PEERS:
        del found[next(iter(found))]


def said_of(address: Address, words: str) -> str:
    """The daemon's words about one address: it lists a peer's addresses with a line for each."""
    for line in words.splitlines():
        if f"[{address.text}]" in line:
            return line.partition("]")[2].strip()
    return words.replace("\n", " ")


def _parsed(text: str) -> Address | None:
    try:
        address = parse_address(text)
    except ValueError:
        return None
    parts = {protocol.name for protocol in address.maddr.protocols()}
    return None if parts & _THROUGH_OTHERS else address


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(host: str) -> bool:
    return _ip(host) is None or is_public_address(host)


def _is_loopback(host: str) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_loopback
