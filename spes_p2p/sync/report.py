"""What can be said of a run from outside: read from the DHT and from certificates, by somebody who takes no part.

Certificates are checked against the manifest that names their electors where that one can be had; the rest is what
peers say of themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Directory, Transport, Verifier
from spes_p2p.swarm.records import (
    HeadRecord,
    PeerRecord,
    RunGroup,
    heads_key,
    newest_heads,
    parse_all,
    parse_head,
    parse_peer,
    peers_key,
)
from spes_p2p.sync import requests
from spes_p2p.sync.finding import find_run
from spes_p2p.sync.genesis import GENESIS
from spes_p2p.sync.messages import Certificate, Commit, Manifest, manifest_hash
from spes_p2p.sync.requests import ChainPart, Request
from spes_p2p.sync.rules import check_certificate
from spes_p2p.wire import MAX_MESSAGE_BYTES, pack, unpack

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class PeerLine:
    """One node of the run. `seen_at`: Unix seconds of its newest record."""

    peer: PeerId
    role: str
    round: int
    step: int
    tokens: int
    tokens_per_second: float
    owned: tuple[int, ...]
    version: str
    seen_at: float
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class ColumnLine:
    """One expert column. `stale_rounds` counts the rounds since it last got a new version."""

    index: int
    owners: tuple[PeerId, ...]
    stale_rounds: int


@dataclass(frozen=True)
class RunReport:
    """`certificate` is the kind of the newest one (majority, degraded, genesis), empty before genesis.

    `checked` says whether its seals were checked against the electors of its parent.
    """

    run_id: str
    fingerprint: str
    round: int
    step: int
    tokens: int
    certificate: str
    checked: bool
    head_age_seconds: float | None
    model_hash: str
    peers: tuple[PeerLine, ...]
    columns: tuple[ColumnLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return dataclasses.asdict(self)


async def read_report(
    directory: Directory, transport: Transport, verifier: Verifier, run_id: str | None, now: float
) -> RunReport:
    """Reads everything once. `now` is the wall clock, Unix seconds.

    Raises NetworkError when nothing answers or no run is announced, ConfigError when there is a choice.
    """
    group = await find_run(directory, run_id, ANSWER_SECONDS)
    peers, _ = parse_all(parse_peer, await directory.read(peers_key(group.run_id), ANSWER_SECONDS))
    heads, _ = parse_all(parse_head, await directory.read(heads_key(group.run_id), ANSWER_SECONDS))
    for peer, record in peers.items():
        transport.learn(peer, record.addresses)
    commit, holders = await _newest(transport, heads)
    checked = await _is_checked(transport, verifier, commit, holders) if commit else False
    return _report(group, peers, heads, commit, checked, now)


async def _newest(transport: Transport, heads: Mapping[PeerId, HeadRecord]) -> tuple[Commit | None, tuple[PeerId, ...]]:
    """The newest commit that can be had whole, and who has it."""
    for head, publishers in newest_heads(heads):
        try:
            if head.manifest and head.certificate:
                commit = Commit(unpack(Certificate, head.certificate), unpack(Manifest, head.manifest))
            else:
                commit = await _fetch_commit(transport, publishers, head.round)
            if manifest_hash(commit.manifest) == head.manifest_hash:
                return commit, publishers
        except (RemoteProtocolError, NetworkError):
            continue  # the next newest; a head that proves nothing is nobody's
    return None, ()


async def _fetch_commit(transport: Transport, holders: tuple[PeerId, ...], round: int) -> Commit:
    error: NetworkError | RemoteProtocolError = NetworkError("nobody to ask")
    for holder in holders:
        try:
            request = Request(requests.CHAIN, first=round, count=1)
            _, data = await transport.fetch(holder, pack(request), ANSWER_SECONDS, MAX_MESSAGE_BYTES)
            commits = unpack(ChainPart, data).commits
            if commits:
                return unpack(Commit, commits[0])
        except (NetworkError, RemoteProtocolError) as caught:
            error = caught
    raise error


async def _is_checked(transport: Transport, verifier: Verifier, commit: Commit, holders: tuple[PeerId, ...]) -> bool:
    if commit.certificate.kind == GENESIS:
        return False
    try:
        parent = await _fetch_commit(transport, holders, commit.manifest.round - 1)
        check_certificate(parent.manifest, commit.manifest, commit.certificate, verifier.verify)
    except (NetworkError, RemoteProtocolError):
        return False
    return True


def _report(
    group: RunGroup,
    peers: Mapping[PeerId, PeerRecord],
    heads: Mapping[PeerId, HeadRecord],
    commit: Commit | None,
    checked: bool,
    now: float,
) -> RunReport:
    manifest = commit.manifest if commit else None
    return RunReport(
        run_id=group.run_id,
        fingerprint=group.fingerprint.hex(),
        round=manifest.round if manifest else 0,
        step=manifest.step if manifest else 0,
        tokens=manifest.tokens if manifest else 0,
        certificate=commit.certificate.kind if commit else "",
        checked=checked,
        head_age_seconds=_head_age(heads, manifest, now),
        model_hash=manifest.state_root.hex() if manifest else "",
        peers=tuple(
            _peer_line(record) for _, record in sorted(peers.items(), key=lambda item: (item[1].role, item[0]))
        ),
        columns=_columns(manifest) if manifest else (),
    )


def _head_age(heads: Mapping[PeerId, HeadRecord], manifest: Manifest | None, now: float) -> float | None:
    """Since when the newest certificate is known, by the clock of whoever published it first."""
    times = [head.seen_at_seconds for head in heads.values() if manifest and head.round == manifest.round]
    known = [at for at in times if at > 0]
    return max(0.0, now - min(known)) if known else None


def _peer_line(record: PeerRecord) -> PeerLine:
    return PeerLine(
        record.peer,
        record.role,
        record.round,
        record.step,
        record.tokens,
        record.tokens_per_second,
        record.owned,
        record.version,
        record.written_at_seconds,
        record.addresses,
    )


def _columns(manifest: Manifest) -> tuple[ColumnLine, ...]:
    return tuple(
        ColumnLine(index, owners, manifest.round - manifest.column_rounds[index])
        for index, owners in enumerate(manifest.ownership)
    )
