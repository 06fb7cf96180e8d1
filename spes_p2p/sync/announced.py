"""Commits that peers announce in the DHT: the newest one, and the forks between announced histories.

A head names a round and the hash of its manifest; only the commit of that round shows whether the head is behind the
newest commit or on another history. Takes no part in the run and keeps nothing: each certificate is checked against the
manifest before it, not from genesis on. Anybody can announce anything, so heads that cannot be fetched or proved are
ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from spes_p2p.consensus.certificate import CheckSignature, check_certificate
from spes_p2p.consensus.electorate import SealRule
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Certificate, Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.patience import ask_small, first_good
from spes_p2p.exchange.requests import ChainPart, ChainRequest
from spes_p2p.ids import Hash, PeerId
from spes_p2p.swarm.ports import Network, Transport
from spes_p2p.swarm.records import (
    HeadRecord,
    PeerRecord,
    heads_key,
    newest_heads,
    parse_all,
    peers_key,
)
from spes_p2p.sync.genesis import GENESIS
from spes_p2p.sync.histories import Fork, side_of
from spes_p2p.wire import MAX_MESSAGE_BYTES, unpack

ANSWER_SECONDS = 10.0
FORKS_SECONDS = 20.0
"""So long heads are compared at most: what was found by then counts."""
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


async def find_forks(
    transport: Transport,
    check: CheckSignature,
    heads: Mapping[PeerId, HeadRecord],
    newest: Commit,
    holders: Sequence[PeerId],
    rule: SealRule,
) -> tuple[Fork, ...]:
    """Where histories that are announced part from that of `newest`, which `holders` have.

    Shown is what the electors of the last common manifest have signed; an elector that lies can make up a degraded one,
    so each side names who announces it.
    """
    forks: dict[Hash, Fork] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORKS_SECONDS):
            histories = [_History(transport, newest, holders)]
            for head, publishers in newest_heads(heads):
                if head.round <= newest.manifest.round:
                    await _place(transport, histories, head, publishers)
            for theirs in histories[1:]:
                await _compare(histories[0], theirs, check, rule, heads, forks)
    return tuple(forks.values())


class _History:
    """What those who announce `tip`, or a commit before it, have; fetched a commit at a time."""

    def __init__(self, transport: Transport, tip: Commit, peers: Sequence[PeerId]) -> None:
        self._transport = transport
        self._commits = {tip.manifest.round: tip}
        self.tip = tip
        self.peers = list(peers)

    async def at(self, round: int) -> Commit:
        """Raises NetworkError, RemoteProtocolError."""
        if round not in self._commits:
            (commit,) = await fetch_commits(self._transport, self.peers, round, 1)
            if commit.manifest.round != round:
                raise RemoteProtocolError(f"asked for round {round}, got {commit.manifest.round}")
            self._commits[round] = commit
        return self._commits[round]

    async def has(self, name: Hash, round: int) -> bool:
        """Raises NetworkError, RemoteProtocolError."""
        return manifest_hash((await self.at(round)).manifest) == name

    async def is_checked(self, rule: SealRule, check: CheckSignature) -> bool:
        return await is_checked(self._transport, check, self.tip, self.peers, rule)


async def _place(
    transport: Transport, histories: list[_History], head: HeadRecord, publishers: tuple[PeerId, ...]
) -> None:
    """Adds them to the history that has this head, else begins one. Heads come the newest first."""
    for history in histories:
        with contextlib.suppress(NetworkError, RemoteProtocolError):
            if await history.has(head.manifest_hash, head.round):
                history.peers += (peer for peer in publishers if peer not in history.peers)
                return
    with contextlib.suppress(NetworkError, RemoteProtocolError):
        histories.append(_History(transport, await _announced(transport, head, publishers), publishers))


async def _compare(
    ours: _History,
    theirs: _History,
    check: CheckSignature,
    rule: SealRule,
    heads: Mapping[PeerId, HeadRecord],
    forks: dict[Hash, Fork],
) -> None:
    with contextlib.suppress(NetworkError, RemoteProtocolError):
        last = await _last_common(ours, theirs)
        common = (await ours.at(last)).manifest
        sides = [(one, await one.at(last + 1)) for one in (ours, theirs)]
        for _, first in sides:
            check_certificate(common, first.manifest, first.certificate, check, rule)
        if theirs.tip != sides[1][1] and not await theirs.is_checked(rule, check):
            return
        fork = forks.setdefault(manifest_hash(common), Fork.after(common))
        for one, first in sides:
            fork.add(side_of(common, first, one.tip, one.peers, seen_at(heads, one.tip)))


async def _last_common(ours: _History, theirs: _History) -> int:
    """The last round of which both have the same manifest, looking back in growing strides.

    They have not at the round of `theirs.tip`. Raises RemoteProtocolError where they have none.
    """
    high, stride = theirs.tip.manifest.round, 1
    while not await _is_same(ours, theirs, low := max(0, high - stride)):
        if low == 0:
            raise RemoteProtocolError("it has a different genesis")
        high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await _is_same(ours, theirs, middle) else (low, middle)
    return low


async def _is_same(ours: _History, theirs: _History, round: int) -> bool:
    return await theirs.has(manifest_hash((await ours.at(round)).manifest), round)


async def _announced(transport: Transport, head: HeadRecord, publishers: tuple[PeerId, ...]) -> Commit:
    """The commit of a head. Raises NetworkError, RemoteProtocolError."""
    if head.manifest and head.certificate:
        commit = Commit(unpack(Certificate, head.certificate), unpack(Manifest, head.manifest))
    else:
        (commit,) = await fetch_commits(transport, publishers, head.round, 1)
    if manifest_hash(commit.manifest) != head.manifest_hash or commit.manifest.round != head.round:
        raise RemoteProtocolError(f"the commit announced as round {head.round} is a different one")
    return commit
