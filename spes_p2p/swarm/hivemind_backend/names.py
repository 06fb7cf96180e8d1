"""What a `/dnsaddr/NAME` stands for: the addresses in the TXT records of `_dnsaddr.NAME`, as libp2p has it.

So whoever keeps a name can move a run's first nodes, under other identities too. An entry is
`dnsaddr=/ip4/203.0.113.7/tcp/31337/p2p/Qm...`. Nothing of it is trusted: a run is known by its fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_p2p.swarm.hivemind_backend.dial import LISTING, is_listing, parse_address

LOOKUP_SECONDS = 3.0
MOST_LISTED = 8
_ENTRY = "dnsaddr="

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver


async def listed(address: str, resolver: Resolver | None = None) -> tuple[str, ...]:
    """The node addresses that a /dnsaddr/ name lists; only those of one peer if it ends in a /p2p/ id.

    `resolver`: the DNS resolver (None: this machine's default). Raises ValueError, with a message that is meant to
    follow the address, if there are none.
    """
    from dns.asyncresolver import Resolver  # here, since most addresses are no names
    from dns.exception import DNSException
    from dns.rdtypes.ANY.TXT import TXT

    name, _, rest = address.removeprefix(LISTING).partition("/")
    try:
        answer = await (resolver or Resolver()).resolve(f"_dnsaddr.{name}", "TXT", lifetime=LOOKUP_SECONDS)
    except DNSException as error:
        raise ValueError(f"could not be looked up: {error}") from error
    found = [b"".join(record.strings).decode(errors="replace") for record in answer if isinstance(record, TXT)]
    wanted = f"/{rest}" if rest else ""
    texts = sorted(text.removeprefix(_ENTRY) for text in found if text.startswith(_ENTRY) and text.endswith(wanted))
    nodes = tuple(text for text in texts if not is_listing(text) and _names_a_peer(text))
    if not nodes:
        raise ValueError(f"names no node: _dnsaddr.{name} has no TXT record of the form {_ENTRY}/.../p2p/ID")
    return nodes[:MOST_LISTED]


def _names_a_peer(text: str) -> bool:
    try:
        return parse_address(text).peer is not None
    except ValueError:
        return False
