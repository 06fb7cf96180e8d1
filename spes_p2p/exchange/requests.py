"""What can be asked of a peer as a stream: contributions, tiles, hash lists, the chain, the run itself, its data.

A record for each kind. Leaves out who answers (`sync/donor.py`, `pieces.py`) and how the bytes travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from spes_p2p.bounds import Bounded, between, length
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash
from spes_p2p.wire import pack, unpack

MAX_TILES_AT_ONCE = 64
MAX_JOINED_BYTES = 4 * 2**20
"""Of several tiles in one answer: they are copied together, for each stream that is served."""
MAX_COMMITS_AT_ONCE = 64
MAX_CHAIN_BYTES = 2**20
"""Of commits in one answer, where they are more than one: who asks waits for so much and no longer."""
MAX_PIECES_AT_ONCE = 1024


@dataclass(frozen=True)
class RunRequest:
    """The run's record."""


@dataclass(frozen=True)
class ChainRequest:
    """Commits, from that of round `first` on."""

    first: int
    count: int


@dataclass(frozen=True)
class ValuesRequest:
    """What the asked peer trained on top of manifest `parent`, of consecutive tiles.

    `work`: the packed `Contribution` by which a plan counts it.
    """

    parent: Hash
    first_tile: int
    count: int
    work: bytes


@dataclass(frozen=True)
class TilesRequest(Bounded):
    """Tiles by their hashes."""

    hashes: Annotated[tuple[Hash, ...], length(1, MAX_TILES_AT_ONCE)]


@dataclass(frozen=True)
class HashesRequest:
    """The hash of each tile of a state."""

    root: Hash
    round: int


@dataclass(frozen=True)
class WiresRequest:
    """The hash of each tile as a round handed it out; the asker has the state of `base_round`."""

    round: int
    base_round: int


@dataclass(frozen=True)
class CatalogueRequest:
    """What the hash of a dataset stands for."""

    dataset: Hash


@dataclass(frozen=True)
class SourcesRequest:
    """Where a dataset lies on the web."""

    dataset: Hash


@dataclass(frozen=True)
class PiecesRequest(Bounded):
    """Pieces of a dataset by their numbers."""

    dataset: Hash
    numbers: Annotated[tuple[Annotated[int, between(0, 2**63 - 1)], ...], length(1, MAX_PIECES_AT_ONCE)]


DataRequest = CatalogueRequest | SourcesRequest | PiecesRequest
Request = RunRequest | ChainRequest | ValuesRequest | TilesRequest | HashesRequest | WiresRequest | DataRequest
RUN, CHAIN, VALUES, TILES, HASHES = "run", "chain", "values", "tiles", "hashes"
_NAMES = (RUN, CHAIN, VALUES, TILES, HASHES, "wires", "catalogue", "sources", "pieces")
_TYPES = dict(zip(_NAMES, get_args(Request), strict=True))
_NAME_OF = {kind: name for name, kind in _TYPES.items()}


@dataclass(frozen=True)
class PackedRequest:
    """As it travels: `kind` says what the bytes of `body` are."""

    kind: str
    body: bytes


def pack_request(request: Request) -> bytes:
    return pack(PackedRequest(kind_of(request), pack(request)))


def unpack_request(data: bytes) -> Request:
    """Raises RemoteProtocolError for what is no request that we know."""
    packed = unpack(PackedRequest, data)
    kind = _TYPES.get(packed.kind)
    if kind is None:
        raise RemoteProtocolError(f"unknown kind of request {packed.kind[:20]!r}")
    request: Request = unpack(kind, packed.body)
    return request


def kind_of(request: Request) -> str:
    """What it is called on the wire."""
    return _NAME_OF[type(request)]


@dataclass(frozen=True)
class ChainPart:
    """The answer to ChainRequest: commits, each packed."""

    commits: tuple[bytes, ...]
