"""What peers write into the directory: typed records, their keys, and what may stand in them.

Pure: parsing is strict and bounded, since everybody can write. Leaves out signatures (`envelope`) and where records are
kept. Whoever reads a record knows its publisher from the directory; a record that names another peer is malformed.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from spes_p2p import wire
from spes_p2p.bounds import Bounded, between, length, matching
from spes_p2p.data.held import Held
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import HASH_BYTES, MAX_PEER_ID, RUN_ID, Hash, PeerId
from spes_p2p.swarm.vitals import Round, Vitals

RUNS_KEY = "spes-p2p/runs"
ROLES = ("peer", "bootstrap")
MAX_COUNT = 2**60
"""Bound of steps and tokens: far above any run, far below what overflows when a few are added."""
MAX_SPEED = 1e12
MAX_COLUMNS = 4096
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_HEAD_BYTES = 32
MAX_CERTIFICATE_BYTES = 192 * 2**10
MAX_TOKEN_BYTES = 2**10
MAX_MANIFEST_BYTES = 288 * 2**10
RunId = Annotated[str, matching(RUN_ID)]
PlainPeerId = Annotated[PeerId, matching(rf"[A-Za-z0-9_-]{{1,{MAX_PEER_ID}}}")]
Count = Annotated[int, between(0, MAX_COUNT)]
WallSeconds = Annotated[int, between(0, 2**40)]
"""Seconds since 1970."""
Sha256 = Annotated[Hash, length(HASH_BYTES, HASH_BYTES)]
Addresses = Annotated[
    tuple[Annotated[str, length(1, MAX_ADDRESS_CHARACTERS), matching(r"/[!-~]+")], ...], length(0, MAX_ADDRESSES)
]
"""Multiaddresses."""
LISTING = "/dnsaddr/"
"""A name that begins so stands for a list of addresses, not for one."""


def peers_key(run_id: str) -> str:
    return f"spes-p2p/{run_id}/peers"


def heads_key(run_id: str) -> str:
    return f"spes-p2p/{run_id}/heads"


def words_key(run_id: str) -> str:
    """The directory key for the orders that the run's organiser has signed."""
    return f"spes-p2p/{run_id}/words"


@dataclass(frozen=True)
class KeyBounds:
    """Bounds in bytes for one key of the directory: of a single record, and of all records of strangers together."""

    record_bytes: int
    strangers_bytes: int
    """Peers of which a node or a reader does not know that they are members of the run."""


_RUNS = KeyBounds(6 * 2**10, 2**19)
_OF_A_RUN = {
    "peers": KeyBounds(20 * 2**10, 2**20),
    "heads": KeyBounds(MAX_CERTIFICATE_BYTES + MAX_MANIFEST_BYTES + 2**10, 2**22),
    "words": KeyBounds(20 * 2**10, 2**18),
}
MAX_VALUE_BYTES = max(bounds.record_bytes for bounds in (_RUNS, *_OF_A_RUN.values()))


def bounds_of(key: str) -> KeyBounds | None:
    """None for a key under which this program keeps nothing."""
    if key == RUNS_KEY:
        return _RUNS
    parts = key.split("/")
    if len(parts) != 3 or parts[0] != "spes-p2p" or not re.fullmatch(RUN_ID, parts[1]):
        return None
    return _OF_A_RUN.get(parts[2])


@dataclass(frozen=True)
class RunRecord(Bounded):
    """One run, as anybody in it announces it under RUNS_KEY."""

    run_id: RunId
    fingerprint: Sha256
    organiser: PlainPeerId
    wire_version: Annotated[int, between(0, 2**16)]
    round: Round
    """The newest round that the publisher knows as committed."""
    head: Annotated[bytes, length(0, MAX_HEAD_BYTES)]
    """What the publisher says of that round; b"" before genesis."""
    addresses: Addresses
    """Of the publisher, with /p2p/ id."""


@dataclass(frozen=True)
class PeerRecord(Bounded):
    """One peer of a run, as it describes itself under `peers_key`."""

    run_id: RunId
    peer: PlainPeerId
    addresses: Addresses
    """Where it may be dialled; none in client mode."""
    version: Annotated[str, matching(r"[!-~]{1,64}")]
    round: Round
    step: Count
    tokens: Count
    """Trained by this peer since it joined."""
    tokens_per_second: Annotated[float, between(0, MAX_SPEED)]
    owned: Annotated[tuple[Annotated[int, between(0, 2**16)], ...], length(0, MAX_COLUMNS)]
    """Columns, ascending."""
    role: Annotated[str, matching("|".join(ROLES))]
    client_mode: bool
    joined_at_seconds: WallSeconds
    """By the peer's clock; for people, nothing is decided by it."""
    written_at_seconds: WallSeconds = 0
    """When this record was written, by the same clock."""
    data_pieces: Count = 0
    """How many pieces of the run's dataset it gives to others."""
    held: Held = Held()  # noqa: RUF009 (frozen)
    """Which pieces of the dataset it holds, as spans of the data that is trained on next."""
    vitals: Vitals = Vitals()  # noqa: RUF009 (frozen)
    token: Annotated[bytes, length(0, MAX_TOKEN_BYTES)] = b""
    """Of its invitation, for the organiser (`sync/passes.py`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(left >= right for left, right in itertools.pairwise(self.owned)):
            raise ValueError("owned columns are not ascending")


@dataclass(frozen=True)
class HeadRecord(Bounded):
    """The newest certificate that a peer has, under `heads_key`. Only a hint: certificates prove themselves."""

    round: Round
    manifest_hash: Sha256
    certificate: Annotated[bytes, length(0, MAX_CERTIFICATE_BYTES)]
    manifest: Annotated[bytes, length(0, MAX_MANIFEST_BYTES)]
    """b"" when it is too large for the directory; then it is fetched from the publisher by its hash."""
    seen_at_seconds: WallSeconds = 0
    """When the publisher first had it, by its wall clock; for people."""


AnyRecord = TypeVar("AnyRecord", RunRecord, PeerRecord, HeadRecord)


def fitting(record: PeerRecord) -> PeerRecord:
    """Without the load of its experts where they are too many for the directory."""
    if len(wire.pack(record)) <= _OF_A_RUN["peers"].record_bytes:
        return record
    vitals = replace(record.vitals, load_percent=(), highest_load_percent=(), lowest_load_percent=())
    return replace(record, vitals=vitals)


def parse(kind: type[AnyRecord], publisher: PeerId, data: bytes) -> AnyRecord:
    """Raises RemoteProtocolError, also where a peer describes another one. Anybody in a run may announce it."""
    record = wire.unpack(kind, data, max_bytes=MAX_VALUE_BYTES)
    if isinstance(record, PeerRecord) and record.peer != publisher:
        raise RemoteProtocolError(f"{publisher} published a record in the name of {record.peer}")
    return record


def parse_all(kind: type[AnyRecord], published: Mapping[PeerId, bytes]) -> dict[PeerId, AnyRecord]:
    """The records that are in order, by publisher."""
    records = {}
    for publisher, data in published.items():
        with contextlib.suppress(RemoteProtocolError):
            records[publisher] = parse(kind, publisher, data)
    return records


@dataclass(frozen=True)
class RunGroup:
    """All that is announced of one run: same id and same fingerprint."""

    run_id: str
    fingerprint: Hash
    records: Mapping[PeerId, RunRecord]
    """By publisher."""

    @property
    def organisers(self) -> tuple[PeerId, ...]:
        """One, unless somebody lies; whoever joins checks genesis against it."""
        return tuple(sorted({record.organiser for record in self.records.values()}))

    @property
    def round(self) -> int:
        return max(record.round for record in self.records.values())

    @property
    def wire_versions(self) -> tuple[int, ...]:
        return tuple(sorted({record.wire_version for record in self.records.values()}))

    def addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Where its publishers may be dialled, those with the newest round first."""
        newest_first = sorted(self.records.items(), key=lambda item: (-item[1].round, item[0]))
        return {peer: record.addresses for peer, record in newest_first if record.addresses}


def group_runs(records: Mapping[PeerId, RunRecord]) -> list[RunGroup]:
    """The runs of a directory, those with most publishers first, then by id."""
    groups: dict[tuple[str, Hash], dict[PeerId, RunRecord]] = {}
    for publisher, record in sorted(records.items()):
        groups.setdefault((record.run_id, record.fingerprint), {})[publisher] = record
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [RunGroup(run_id, fingerprint, members) for (run_id, fingerprint), members in ordered]


def newest_heads(records: Mapping[PeerId, HeadRecord]) -> list[tuple[HeadRecord, tuple[PeerId, ...]]]:
    """Different heads with their publishers, highest round first; of equal ones the one that brings most bytes."""
    publishers: dict[tuple[int, Hash], list[PeerId]] = {}
    best: dict[tuple[int, Hash], HeadRecord] = {}
    for publisher, record in sorted(records.items()):
        name = (record.round, record.manifest_hash)
        publishers.setdefault(name, []).append(publisher)
        if name not in best or _weight(record) > _weight(best[name]):
            best[name] = record
    return [(best[name], tuple(publishers[name])) for name in sorted(best, key=lambda name: (-name[0], name[1]))]


def _weight(record: HeadRecord) -> int:
    return len(record.certificate) + len(record.manifest)
