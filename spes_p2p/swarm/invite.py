"""An invitation: one string with everything that a newcomer must know about a run, so that nobody copies addresses.

`spes1` and base58 (letters and digits that cannot be taken for each other, so that a double click selects all) of a
packed record and its checksum; `spes2` where a token for one peer comes with it. It holds no secret. The run's
fingerprint covers config, dataset and organiser; the organiser stands in it beside that, and is compared with what the
run says of itself before genesis is checked with it. Its addresses are those of several nodes, so that it is good as
long as one of them is there. Names outlive machines: `/dns4/` and `/dns6/` that of one node, `/dnsaddr/` that of
whatever nodes its TXT records list.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import base58

from spes_p2p import wire
from spes_p2p.data.web_url import is_public_address
from spes_p2p.errors import ConfigError, RemoteProtocolError
from spes_p2p.ids import RUN_ID, PeerId
from spes_p2p.swarm.records import LISTING, MAX_ADDRESSES, PeerRecord

VERSION, WITH_TOKEN = 1, 2
MARK = "spes"
FINGERPRINT_BYTES = 16
"""Of the run's fingerprint: finding another run with the same would take 2^128 tries."""
MAX_NODES = 3
"""Bootstrap nodes and mirrors."""
MAX_PEERS = 4
MAX_NAMES = 2
"""Most DNS names in an invitation that none of the live nodes announces."""
ADDRESSES_EACH = 2
"""Of one node: IPv4 and IPv6, say."""
MAX_CHARACTERS = 2000
LEAST_CHARACTERS = 40
"""A shorter string is not taken for an invitation: a folder may be named `spes1`."""
LEAST_ID = 46
"""Characters of a peer id: the hash of a key is 34 bytes or more."""
_SHAPE = re.compile(rf"{MARK}(\d)(\w+)", re.IGNORECASE | re.ASCII)
_TCP = re.compile(r"/(ip4|ip6)/([^/]+)/tcp/(\d+)")
_ADDRESS = re.compile(r"/[!-~]{1,256}")
_BASE = re.compile(r"(/[a-z0-9-]+/[^/\s]+)+")
_NAME = re.compile(r"/(dns|dns4|dns6|dnsaddr)/[^/]+(/.*)?")
_FIX = "copy the whole invitation again; whoever runs the bootstrap node can print it with: spes-p2p invite"


@dataclass(frozen=True)
class Invite:
    """`fingerprint`: the first 16 bytes of the run's. `addresses`: multiaddresses, with /p2p/ id but for /dnsaddr/.

    `token`: what the organiser has signed for one peer (`sync/passes.py`); b"" in an invitation for everybody.
    """

    run_id: str
    fingerprint: bytes
    organiser: PeerId
    addresses: tuple[str, ...]
    token: bytes = b""


@dataclass(frozen=True)
class _Node:
    """A peer (b"": the organiser) and where it listens, see `_packed_address`; /dnsaddr/ is anybody's."""

    peer: bytes
    addresses: tuple[bytes, ...]


@dataclass(frozen=True)
class _Record:
    run_id: str
    fingerprint: bytes
    organiser: bytes
    nodes: tuple[_Node, ...]


@dataclass(frozen=True)
class _WithToken:
    record: _Record
    token: bytes


def looks_like_invite(word: str) -> bool:
    """Whether `word` is meant to be an invitation, though it may be damaged."""
    return len(word) >= LEAST_CHARACTERS and _SHAPE.fullmatch("".join(word.split())) is not None


def encode(invite: Invite) -> str:
    """The word for it, about 110 characters with one address; the last addresses are left out where there is no room.

    Raises ConfigError for ids that are not libp2p's.
    """
    while len(word := _word(invite)) > MAX_CHARACTERS and len(invite.addresses) > 1:
        invite = replace(invite, addresses=invite.addresses[:-1])
    return word


def _word(invite: Invite) -> str:
    organiser = _id_bytes(invite.organiser)
    places: dict[bytes, list[bytes]] = {}
    for address in invite.addresses[:MAX_ADDRESSES]:
        base, _, peer = address.rpartition("/p2p/")
        if address.startswith(LISTING):
            base, peer = address, invite.organiser
        places.setdefault(_id_bytes(PeerId(peer)), []).append(_packed_address(base))
    nodes = tuple(_Node(b"" if peer == organiser else peer, tuple(found)) for peer, found in places.items())
    record = _Record(invite.run_id, invite.fingerprint[:FINGERPRINT_BYTES], organiser, nodes)
    version, packed = (WITH_TOKEN, _WithToken(record, invite.token)) if invite.token else (VERSION, record)
    return f"{MARK}{version}" + base58.b58encode_check(wire.pack(packed)).decode()


def decode(word: str) -> Invite:
    """Raises ConfigError where it is mistyped, cut short, of another version, or no invitation at all."""
    found = _SHAPE.fullmatch("".join(word.split()))
    if found is None or len(word) > MAX_CHARACTERS:
        raise ConfigError(
            f"{word[:24]!r} is not an invitation: those are one long word that begins with {MARK}{VERSION} or "
            f"{MARK}{WITH_TOKEN}",
            fix=_FIX,
        )
    version = int(found[1])
    if version not in (VERSION, WITH_TOKEN):
        raise ConfigError(
            f"this invitation has version {version}, but this program reads versions {VERSION} and {WITH_TOKEN}",
            fix="upgrade spes-p2p" if version > WITH_TOKEN else "ask for a new one: spes-p2p invite prints it",
        )
    try:
        data = base58.b58decode_check(found[2])
        if version == VERSION:
            return _invite(wire.unpack(_Record, data, MAX_CHARACTERS))
        both = wire.unpack(_WithToken, data, MAX_CHARACTERS)
        return replace(_invite(both.record), token=both.token)
    except (ValueError, RemoteProtocolError) as error:
        raise ConfigError("the invitation is mistyped or cut short: its checksum is wrong", fix=_FIX) from error


def _invite(record: _Record) -> Invite:
    """The invitation in `record`. Raises ValueError for one that should never have been made."""
    if len(record.fingerprint) != FINGERPRINT_BYTES or not record.nodes or not re.fullmatch(RUN_ID, record.run_id):
        raise ValueError("the fingerprint, the addresses or the name of the run are missing")
    addresses = tuple(
        _with_id(_address(packed), node.peer or record.organiser) for node in record.nodes for packed in node.addresses
    )
    if not all(map(_ADDRESS.fullmatch, addresses)):  # they are shown on terminals
        raise ValueError("an address is invalid")
    organiser = PeerId(base58.b58encode(record.organiser).decode())
    return Invite(record.run_id, record.fingerprint, organiser, addresses[:MAX_ADDRESSES])


def _with_id(address: str, peer: bytes) -> str:
    return address if address.startswith(LISTING) else f"{address}/p2p/{base58.b58encode(peer).decode()}"


def _packed_address(text: str) -> bytes:
    """A kind (`t`: TCP over IP, 4 or 16 bytes and a port; `m`: any other multiaddress, its text), then what it says."""
    found = _TCP.fullmatch(text)
    if found is None:
        return b"m" + text.encode()
    return b"t" + ipaddress.ip_address(found[2]).packed + int(found[3]).to_bytes(2, "big")


def _address(packed: bytes) -> str:
    if packed[:1] == b"m":
        return packed[1:].decode()
    ip, port = ipaddress.ip_address(packed[1:-2]), int.from_bytes(packed[-2:], "big")
    return f"/ip{ip.version}/{ip}/tcp/{port}"


def _id_bytes(peer: PeerId) -> bytes:
    try:
        return base58.b58decode(peer)
    except ValueError as error:
        raise ConfigError(
            f"{peer!r} is not a libp2p peer id", fix="give an address that ends in /p2p/ and a peer id"
        ) from error


def to_be_shown(addresses: Iterable[str]) -> Sequence[str]:
    """Those that others can use, the best first: names, then public ones; loopback only where there are no others."""
    known = sorted(addresses, key=_rank)
    return [address for address in known if _rank(address) < _LOOPBACK] or known


def invited_to(records: Iterable[PeerRecord], organiser: PeerId, known: Iterable[str] = ()) -> tuple[str, ...]:
    """The addresses for a run's invitation: bootstrap nodes, names, and the dialable peers that have been up longest.

    `records`: the current records of the run's nodes. `known`: other addresses, of which only names are used, since the
    successor of a lost node may take over its name.
    """
    there = sorted((one for one in records if one.addresses), key=lambda one: (one.joined_at_seconds, one.peer))
    nodes = sorted((one for one in there if one.role == "bootstrap"), key=lambda one: one.peer != organiser)
    peers = [one for one in there if one.role == "peer" and not one.client_mode]
    found = _of_each(nodes[:MAX_NODES])
    names = [address for address in known if is_name(address) and address not in found][:MAX_NAMES]
    return tuple(dict.fromkeys([*found, *names, *_of_each(peers[:MAX_PEERS])]))[:MAX_ADDRESSES]


def is_public(address: str) -> bool:
    """Whether it can be meant for machines on the internet: a name, or an address that is not private."""
    return _rank(address) < _PRIVATE


def is_name(address: str) -> bool:
    """Whether it is a name that can come to stand for another machine."""
    return _NAME.fullmatch(address) is not None


def leads_to_a_node(address: str) -> bool:
    """Whether it ends in /p2p/ and a peer id, or is /dnsaddr/."""
    base, _, peer = address.rpartition("/p2p/")
    if address.startswith(LISTING):
        return True
    return _BASE.fullmatch(base) is not None and len(peer) >= LEAST_ID and _is_sound(address, PeerId(peer))


def _of_each(records: Iterable[PeerRecord]) -> list[str]:
    return [
        address
        for one in records
        for address in to_be_shown([text for text in one.addresses if _is_sound(text, one.peer)])[:ADDRESSES_EACH]
    ]


def _is_sound(address: str, peer: PeerId) -> bool:
    """Whether it is an address of this peer that can be written down: anybody may say anything of themselves."""
    base, _, named = address.rpartition("/p2p/")
    try:
        base58.b58decode(peer)
        _packed_address(base)
    except (ValueError, OverflowError):
        return False
    return named == peer or address.startswith(LISTING)


_PRIVATE, _LOOPBACK = 2, 3


def _rank(address: str) -> int:
    found = _TCP.match(address)
    if found is None:
        return 0 if is_name(address) else _PRIVATE
    try:
        ip = ipaddress.ip_address(found[2])
    except ValueError:
        return _PRIVATE
    return _LOOPBACK if ip.is_loopback else 1 if is_public_address(found[2]) else _PRIVATE
