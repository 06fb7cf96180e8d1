"""What can be said of a run from outside: read from the DHT and from certificates, by somebody who takes no part.

Certificates are checked against the manifest that names their electors where that one can be had; the rest is what
peers say of themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.config.schema import Config
from spes_p2p.consensus.electorate import Electorate, Faults, SealRule
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Admission, electors
from spes_p2p.consensus.messages import RENEWAL, Commit
from spes_p2p.data.held import Coverage, coverage
from spes_p2p.errors import ConfigError, NetworkError, RemoteProtocolError
from spes_p2p.ids import NO_HASH, NOBODY, PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.swarm.invite import Invite, encode, invited_to
from spes_p2p.swarm.ports import Network, Transport
from spes_p2p.swarm.records import HeadRecord, PeerRecord, RunGroup
from spes_p2p.swarm.vitals import LEAVING, LEFT, Vitals
from spes_p2p.sync.announce import EVERY_SECONDS
from spes_p2p.sync.announced import (
    ANSWER_SECONDS,
    Accept,
    is_checked,
    newest_commit,
    read_heads,
    read_peers,
    seen_at,
)
from spes_p2p.sync.finding import find_run, load_run
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import known_words

FRESH_SECONDS = 4 * EVERY_SECONDS
"""A node whose record is older has missed several turns: it is gone, or cannot reach anybody."""
LIVE_SECONDS = 2.5 * EVERY_SECONDS
"""A node whose record is older has missed two turns: it may be gone, or its network slow."""
STATES = ("bootstrap", "member", "waiting", "joining", "silent", "left")


@dataclass(frozen=True)
class PeerLine:
    """One node of the run.

    `state`: "bootstrap", "member" of the newest manifest, "silent" (a member without a fresh record), "joining" (no
    member yet), "waiting" (for the run to begin) or "left". `seen_at`: Unix seconds of its newest record, 0 for none.
    """

    peer: PeerId
    state: str
    round: int
    step: int
    tokens: int
    tokens_per_second: float
    owned: tuple[int, ...]
    version: str
    seen_at: float
    addresses: tuple[str, ...]
    client_mode: bool = False
    """Nobody can dial it."""
    joined_at: float = 0.0
    vitals: Vitals = Vitals()  # noqa: RUF009 (frozen)
    heard: bool = True
    """Whether it has said something within its last two turns (LIVE_SECONDS)."""
    share: float | None = None
    """Of a stranger: how much of what it gave counted, from 0 to 1, in the newest round that had something of it."""
    average_share: float | None = None
    """The same over its rounds, of which newer ones weigh more."""


@dataclass(frozen=True)
class ColumnLine:
    """One expert column. `stale_rounds` counts the rounds since it last got a new version."""

    index: int
    owners: tuple[PeerId, ...]
    stale_rounds: int


@dataclass(frozen=True)
class MixedDataset:
    """One dataset of a mixture: its name, its hash (hexadecimal), and its sequences that peers were given so far."""

    name: str
    hash: str
    sequences: int


@dataclass(frozen=True)
class RunReport:
    """`certificate` is the kind of the newest one (quorum, renewal, genesis), empty before genesis.

    `checked` says whether its seals were checked against the electors of its parent; `electors` are the seals that it
    has, and all that may vote on the next round. `head_age_seconds`: since when it is known, None where nobody says.
    """

    run_id: str
    fingerprint: str
    round: int
    step: int
    tokens: int
    certificate: str
    renewal: bool
    checked: bool
    seals: int
    electors: int
    head_age_seconds: float | None
    model_hash: str
    peers: tuple[PeerLine, ...]
    columns: tuple[ColumnLine, ...]
    expert_rounds: int = 1
    """By the run's config, where somebody gave it."""
    data: Coverage | None = None
    """Of the run's data, by who was heard lately; None where nobody hands out any."""
    mix: tuple[MixedDataset, ...] = ()
    """Datasets that the run mixes."""
    invitation: str = ""
    """By who is there now; empty where nobody says an address."""
    banned: tuple[PeerId, ...] = ()
    """By the organiser or by electors, sorted."""
    needed: int = 0
    """Electors that the next round needs."""
    missing: tuple[PeerId, ...] = ()
    """Electors that were not heard lately, where too few others were: the run waits for them, or for a renewal."""
    last_round: int | None = None
    """With which the organiser ends the run; None where nobody says so."""
    brings_data: bool = False
    """Whether each peer trains on data of its own."""
    decay_steps: int = 0
    """Over which the learning rate falls; 0 until the organiser lets it."""
    more_trusted: int = 0
    """Trusted peers that it takes to own the columns that nobody does, where only those own columns alone."""

    @property
    def is_over(self) -> bool:
        """Whether the last round is committed."""
        return self.last_round is not None and self.round >= self.last_round

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Columns that nobody owns."""
        return tuple(column.index for column in self.columns if not column.owners)

    @property
    def stale(self) -> tuple[int, ...]:
        """Columns that missed their turn, in rounds that brought anything: see `sync.expert_rounds`."""
        newest = min((column.stale_rounds for column in self.columns), default=0)
        return tuple(column.index for column in self.columns if column.stale_rounds >= newest + self.expert_rounds)

    @property
    def live(self) -> tuple[PeerLine, ...]:
        """Members that were heard just now."""
        return tuple(peer for peer in self.peers if peer.state == "member" and peer.heard)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        lists = {"uncovered": self.uncovered, "stale": self.stale}
        return {**dataclasses.asdict(self), **lists, "live_peers": len(self.live), "is_over": self.is_over}


async def read_report(
    network: Network, run_id: str | None, now: float, fingerprint: str | None = None, known: Iterable[str] = ()
) -> RunReport:
    """Reads everything once. `now` is the wall clock, Unix seconds; `known` are addresses by which the run was found.

    Raises NetworkError when nothing answers or no run is announced, ConfigError when there is a choice.
    """
    report, _ = await read_run(network, run_id, now, fingerprint, known=known)
    return report


async def read_run(
    network: Network,
    run_id: str | None,
    now: float,
    fingerprint: str | None = None,
    accept: Accept | None = None,
    known: Iterable[str] = (),
) -> tuple[RunReport, Commit | None]:
    """The same, with the newest commit that `accept` believes."""
    transport, check = network.transport, network.verifier.verify
    group = await find_run(network.directory, run_id, ANSWER_SECONDS, fingerprint)
    peers = await read_peers(network, group.run_id, ANSWER_SECONDS)
    heads = await read_heads(network, group.run_id, ANSWER_SECONDS)
    commit, holders = await newest_commit(transport, heads, accept)
    organiser = group.organisers[0] if len(group.organisers) == 1 else NOBODY
    info, config = await _run_of(transport, group) or (None, None)
    rule = SealRule(organiser, Faults(config.swarm.faults) if config else Faults.CRASH)
    checked = await is_checked(transport, check, commit, holders, rule) if commit else False
    report = _report(group, peers, heads, commit, checked, now)
    if commit is not None:
        report = dataclasses.replace(report, **_quorum(commit.manifest, peers, rule.faults, now))
    if info is not None:
        report = dataclasses.replace(report, brings_data=info.dataset == NO_HASH)
        with contextlib.suppress(NetworkError):
            report = dataclasses.replace(report, last_round=(await known_words(network, info)).last_round)
    if config is not None:
        mix = _mix(config, commit) if commit else ()
        report = dataclasses.replace(report, expert_rounds=config.sync.expert_rounds, mix=mix)
        if config.swarm.trusted == "vouched":
            more = math.ceil(len(report.uncovered) / config.swarm.experts_per_peer)
            report = dataclasses.replace(report, more_trusted=more)
    addresses = invited_to(peers.values(), organiser, known)
    if addresses and organiser != NOBODY:
        word = encode(Invite(group.run_id, group.fingerprint, organiser, addresses))
        report = dataclasses.replace(report, invitation=word)
    return report, commit


def _quorum(manifest: Manifest, peers: Mapping[PeerId, PeerRecord], faults: Faults, now: float) -> dict[str, Any]:
    voters = tuple(member.peer for member in electors(manifest.members))
    needed = Electorate(voters, faults).quorum
    gone = tuple(peer for peer in sorted(voters) if peer not in peers or not _is_fresh(peers[peer], now))
    return {"needed": needed, "missing": gone if len(voters) - len(gone) < needed else ()}


def _mix(config: Config, commit: Commit) -> tuple[MixedDataset, ...]:
    if not config.data.datasets:
        return ()
    from spes_p2p.data.order import handed_out  # loads numpy

    given = handed_out(config.data, commit.manifest.leases.cursor)
    return tuple(MixedDataset(name, dataset, given[name]) for name, _, dataset in config.data.datasets)


async def _run_of(transport: Transport, group: RunGroup) -> tuple[RunInfo, Config] | None:
    """None where nobody gives it."""
    try:
        return await load_run(transport, group, ANSWER_SECONDS)
    except (NetworkError, RemoteProtocolError, ConfigError):
        return None


def _report(
    group: RunGroup,
    peers: Mapping[PeerId, PeerRecord],
    heads: Mapping[PeerId, HeadRecord],
    commit: Commit | None,
    checked: bool,
    now: float,
) -> RunReport:
    manifest = commit.manifest if commit else None
    certificate = commit.certificate if commit else None
    known_since = seen_at(heads, commit) if commit else 0
    return RunReport(
        run_id=group.run_id,
        fingerprint=group.fingerprint.hex(),
        round=manifest.round if manifest else 0,
        step=manifest.step if manifest else 0,
        tokens=manifest.tokens if manifest else 0,
        certificate=certificate.kind if certificate else "",
        renewal=certificate is not None and certificate.kind == RENEWAL,
        checked=checked,
        seals=len(certificate.seals) if certificate else 0,
        electors=len(electors(manifest.members)) if manifest else 0,
        head_age_seconds=max(0.0, now - known_since) if known_since else None,
        model_hash=manifest.state_root.hex() if manifest else "",
        peers=_peer_lines(peers, manifest, now),
        columns=_columns(manifest) if manifest else (),
        banned=Admission(manifest.roll).banned if manifest else (),
        decay_steps=manifest.decay.steps if manifest and manifest.decay else 0,
        data=coverage({peer: one.held for peer, one in peers.items() if _is_fresh(one, now)}),
    )


def _peer_lines(peers: Mapping[PeerId, PeerRecord], manifest: Manifest | None, now: float) -> tuple[PeerLine, ...]:
    """Bootstrap nodes first, then by state and name; members without a record are there too."""
    members = {member.peer for member in manifest.members} if manifest else set()
    lines = [_peer_line(record, _state(record, members, manifest, now), members, now) for record in peers.values()]
    owned = {peer: columns_of(manifest.ownership, peer) for peer in members - set(peers)} if manifest else {}
    lines += [
        PeerLine(peer, "silent", 0, 0, 0, 0.0, columns, "", 0.0, (), heard=False) for peer, columns in owned.items()
    ]
    if manifest:
        lines = [_with_credit(line, manifest.credit_of(line.peer)) for line in lines]
    return tuple(sorted(lines, key=lambda line: (STATES.index(line.state), line.peer)))


def _with_credit(line: PeerLine, credit: tuple[float, float] | None) -> PeerLine:
    return line if credit is None else dataclasses.replace(line, share=credit[0], average_share=credit[1])


def _state(record: PeerRecord, members: Collection[PeerId], manifest: Manifest | None, now: float) -> str:
    fresh = _is_fresh(record, now)
    if record.role == "bootstrap":
        return "bootstrap"
    if record.vitals.phase == LEFT:
        return "left"
    if record.peer in members:
        return "member" if fresh else "silent"
    if not fresh or record.vitals.phase == LEAVING:
        return "left"
    return "joining" if manifest else "waiting"


def _is_fresh(record: PeerRecord, now: float) -> bool:
    return record.vitals.phase != LEFT and now - record.written_at_seconds <= FRESH_SECONDS


def _peer_line(record: PeerRecord, state: str, members: Collection[PeerId], now: float) -> PeerLine:
    return PeerLine(
        record.peer,
        state,
        record.round,
        record.step,
        record.tokens,
        0.0 if state == "left" else record.tokens_per_second,
        record.owned if record.peer in members else (),
        record.version,
        record.written_at_seconds,
        record.addresses,
        record.client_mode,
        record.joined_at_seconds,
        record.vitals,
        now - record.written_at_seconds <= LIVE_SECONDS,
    )


def _columns(manifest: Manifest) -> tuple[ColumnLine, ...]:
    return tuple(
        ColumnLine(index, owners, manifest.round - manifest.column_rounds[index])
        for index, owners in enumerate(manifest.ownership)
    )
