"""Commits that peers announce in the DHT: the newest one.

Takes no part in the run and keeps nothing: each certificate is checked against the
manifest before it, not from genesis on. Anybody can announce anything, so heads that cannot be fetched or proved are
ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from spes_p2p.consensus.certificate import CheckSignature, check_certificate
from spes_p2p.consensus.electorate import SealRule
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import GENESIS, Certificate, Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.patience import ask_small, first_good
from spes_p2p.exchange.requests import ChainPart, ChainRequest
from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Network, Transport
from spes_p2p.swarm.records import (
    HeadRecord,
    PeerRecord,
    heads_key,
    newest_heads,
    parse_all,
    peers_key,
)
from spes_p2p.wire import MAX_MESSAGE_BYTES, unpack

ANSWER_SECONDS = 10.0
Accept = Callable[[Commit, tuple[PeerId, ...]], Awaitable[bool]]
"""Whether a commit that these peers announce is believed."""


async def read_peers(network: Network, run_id: str, timeout_seconds: float) -> dict[PeerId, PeerRecord]:
    """What the nodes of a run say of themselves in the DHT; where they are is known from now on. Raises PeerSilent."""
    peers = parse_all(PeerRecord, await network.directory.read(peers_key(run_id), timeout_seconds))
    for peer, record in peers.items():
        network.transport.learn(peer, record.addresses)
    return peers


async def read_heads(network: Network, run_id: str, timeout_seconds: float) -> dict[PeerId, HeadRecord]:
    """The newest commits that are announced, by who has them; nothing is checked. Raises PeerSilent."""
    return parse_all(HeadRecord, await network.directory.read(heads_key(run_id), timeout_seconds))


async def newest_commit(
    transport: Transport, heads: Mapping[PeerId, HeadRecord], accept: Accept | None
) -> tuple[Commit | None, tuple[PeerId, ...]]:
    """The newest commit that can be had whole, and who has it."""
    for head, publishers in newest_heads(heads):
        with contextlib.suppress(RemoteProtocolError, NetworkError):  # a head that proves nothing is nobody's
            commit = await _announced(transport, head, publishers)
            if accept is None or await accept(commit, publishers):
                return commit, publishers
    return None, ()


async def fetch_commits(transport: Transport, holders: Sequence[PeerId], first: int, count: int) -> tuple[Commit, ...]:
    """At least one commit from round `first` on, unchecked, from the first of `holders` that gives any."""

    async def ask(holder: PeerId) -> tuple[Commit, ...]:
        data = await ask_small(transport, holder, ChainRequest(first, count), ANSWER_SECONDS, MAX_MESSAGE_BYTES)
        commits = tuple(unpack(Commit, commit) for commit in unpack(ChainPart, data).commits[:count])
        if not commits:
            raise RemoteProtocolError("it has none")
        return commits

    return await first_good(holders, ask, f"no peer could provide the commits from round {first} on")


async def is_checked(
    transport: Transport, check: CheckSignature, commit: Commit, holders: Sequence[PeerId], rule: SealRule
) -> bool:
    """Whether the electors of its parent have signed it, as far as the parent can be had."""
    if commit.certificate.kind == GENESIS:
        return False
    try:
        (parent,) = await fetch_commits(transport, holders, commit.manifest.round - 1, 1)
        check_certificate(parent.manifest, commit.manifest, commit.certificate, check, rule)
    except (NetworkError, RemoteProtocolError):
        return False
    return True


def seen_at(heads: Mapping[PeerId, HeadRecord], commit: Commit) -> float:
    """Since when it is known by the clock of whoever published it first, Unix seconds; 0 where nobody says."""
    name = manifest_hash(commit.manifest)
    times = (head.seen_at_seconds for head in heads.values() if head.manifest_hash == name)
    return min((at for at in times if at > 0), default=0)


async def _announced(transport: Transport, head: HeadRecord, publishers: tuple[PeerId, ...]) -> Commit:
    """The commit of a head. Raises NetworkError, RemoteProtocolError."""
    if head.manifest and head.certificate:
        commit = Commit(unpack(Certificate, head.certificate), unpack(Manifest, head.manifest))
    else:
        (commit,) = await fetch_commits(transport, publishers, head.round, 1)
    if manifest_hash(commit.manifest) != head.manifest_hash or commit.manifest.round != head.round:
        raise RemoteProtocolError(f"the commit announced as round {head.round} is a different one")
    return commit
