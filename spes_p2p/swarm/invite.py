"""An invitation: one word that holds all that a newcomer must know of a run, so that nobody copies addresses.

`spes1` and base58 (letters and digits that cannot be taken for each other, so that a double click selects all) of a
packed record and its checksum. It holds no secret. The run's fingerprint covers config, dataset and organiser; the
organiser stands in it beside that, and is compared with what the run says of itself before genesis is checked with it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import base58

from spes_p2p import wire
from spes_p2p.errors import ConfigError, RemoteProtocolError
from spes_p2p.ids import PeerId

VERSION = 1
MARK = "spes"
FINGERPRINT_BYTES = 16
"""Of the run's fingerprint: finding another run with the same would take 2^128 tries."""
MAX_ADDRESSES = 6
MAX_CHARACTERS = 2000
LEAST_CHARACTERS = 40
"""No shorter word is taken for an invitation: a folder may be named `spes1`."""
_SHAPE = re.compile(rf"{MARK}(\d)(\w+)", re.IGNORECASE | re.ASCII)
_TCP = re.compile(r"/(ip4|ip6)/([^/]+)/tcp/(\d+)")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"/[!-~]{1,256}")
_FIX = "copy it again as a whole; whoever runs the bootstrap node prints it with: spes-p2p invite"


@dataclass(frozen=True)
class Invite:
    """`fingerprint`: the first 16 bytes of the run's. `addresses`: multiaddresses of live nodes, with /p2p/ id."""

    run_id: str
    fingerprint: bytes
    organiser: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class _Node:
    """A peer (b"": the organiser) and where it listens, see `_packed_address`."""

    peer: bytes
    addresses: tuple[bytes, ...]


@dataclass(frozen=True)
class _Record:
    run_id: str
    fingerprint: bytes
    organiser: bytes
    nodes: tuple[_Node, ...]


def looks_like_invite(word: str) -> bool:
    """Whether somebody who typed this meant an invitation, be it a damaged one."""
    return len(word) >= LEAST_CHARACTERS and _SHAPE.fullmatch("".join(word.split())) is not None


def encode(invite: Invite) -> str:
    """The word for it, about 110 characters with one address. Raises ConfigError for ids that are not libp2p's."""
    organiser = _id_bytes(invite.organiser)
    places: dict[bytes, list[bytes]] = {}
    for address in invite.addresses[:MAX_ADDRESSES]:
        base, _, peer = address.rpartition("/p2p/")
        places.setdefault(_id_bytes(PeerId(peer)), []).append(_packed_address(base))
    nodes = tuple(_Node(b"" if peer == organiser else peer, tuple(found)) for peer, found in places.items())
    record = _Record(invite.run_id, invite.fingerprint[:FINGERPRINT_BYTES], organiser, nodes)
    return f"{MARK}{VERSION}" + base58.b58encode_check(wire.pack(record)).decode()


def decode(word: str) -> Invite:
    """Raises ConfigError where it is mistyped, cut short, of another version, or no invitation at all."""
    found = _SHAPE.fullmatch("".join(word.split()))
    if found is None or len(word) > MAX_CHARACTERS:
        raise ConfigError(f"{word[:24]!r} is no invitation: one begins with {MARK}{VERSION}", fix=_FIX)
    if int(found[1]) != VERSION:
        raise ConfigError(
            f"this invitation is of version {found[1]}, this program reads {VERSION}", fix=_upgrade(found)
        )
    try:
        record = wire.unpack(_Record, base58.b58decode_check(found[2]), MAX_CHARACTERS)
        return _invite(record)
    except (ValueError, RemoteProtocolError) as error:
        raise ConfigError("the invitation is mistyped or cut short: its checksum is wrong", fix=_FIX) from error


def _upgrade(found: re.Match[str]) -> str:
    return "upgrade spes-p2p" if int(found[1]) > VERSION else "ask for a new one: spes-p2p invite prints it"


def _invite(record: _Record) -> Invite:
    """Raises ValueError for a record that whoever made it had better not."""
    if len(record.fingerprint) != FINGERPRINT_BYTES or not record.nodes or not _RUN_ID.fullmatch(record.run_id):
        raise ValueError("no fingerprint, no address, or no name of a run")
    addresses = tuple(
        f"{_address(packed)}/p2p/{base58.b58encode(node.peer or record.organiser).decode()}"
        for node in record.nodes
        for packed in node.addresses
    )
    if not all(map(_ADDRESS.fullmatch, addresses)):  # they are shown on terminals
        raise ValueError("an address that is none")
    organiser = PeerId(base58.b58encode(record.organiser).decode())
    return Invite(record.run_id, record.fingerprint, organiser, addresses[:MAX_ADDRESSES])


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
        raise ConfigError(f"{peer!r} is no libp2p peer id", fix="an address ends in /p2p/ and a peer id") from error


def to_be_shown(addresses: Iterable[str]) -> Sequence[str]:
    """Those that others can use: loopback addresses only where there are no others."""
    known = tuple(addresses)
    return [address for address in known if "/127.0.0.1/" not in address and "/::1/" not in address] or known
