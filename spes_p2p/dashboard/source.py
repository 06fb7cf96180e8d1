"""Where the dashboard looks: a `Source` gives what a run is like now, and the commits that are new since the last look.

`SwarmSource` reads the DHT and the chain through the ports of `swarm`, so that it runs on any network. It accepts a
commit if a chain of valid signatures leads to it from genesis, and ignores peers that announce any other. Whether the
content of a commit follows the rules of the run is left to those who signed it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError
from spes_p2p.exchange.requests import MAX_COMMITS_AT_ONCE
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.swarm.ports import Network
from spes_p2p.sync.announced import ANSWER_SECONDS, fetch_commits
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.genesis import RunInfo, check_genesis
from spes_p2p.sync.report import RunReport, read_run
from spes_p2p.sync.sealing import EnvelopeChecker

DOUBT_SECONDS = 60.0
"""A peer that could not prove what it announced is not asked again for this long."""


@dataclass(frozen=True)
class Known:
    """What is known already: all rounds up to `newest` (-1: none), with the hashes of their manifests."""

    newest: int
    name_of: Callable[[int], Hash | None]


NOTHING = Known(-1, lambda round: None)


@dataclass(frozen=True)
class Look:
    """What was found at one moment. `commits` follow one another and end with the newest; none if nothing is new."""

    report: RunReport
    commits: tuple[Commit, ...]


class Source(Protocol):
    """Looks at a run. Raises NetworkError or RemoteProtocolError where nobody answers or nothing can be proved."""

    async def look(self, now: float, known: Known) -> Look: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class SwarmSource:
    """Takes no part in the run: reads records and fetches commits. `close` ends what the network needs."""

    _network: Network
    _run_id: str | None = None
    _fingerprint: str | None = None
    _close: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._check = EnvelopeChecker(self._network.verifier).check
        self._info: RunInfo | None = None
        self._doubted: dict[PeerId, float] = {}

    async def look(self, now: float, known: Known) -> Look:
        if self._info is None:
            self._info, _ = await find_and_load(self._network, self._run_id, self._fingerprint, ANSWER_SECONDS)
        info = self._info
        found: list[Commit] = []
        refused: list[str] = []

        async def accept(newest: Commit, holders: tuple[PeerId, ...]) -> bool:
            for holder in holders:
                if now < self._doubted.get(holder, 0.0):
                    refused.append(f"{short(holder)}: skipped, since it proved nothing lately")
                    continue
                try:
                    found[:] = await self._leading_to(newest, holder, known, info)
                    return True
                except (NetworkError, RemoteProtocolError) as error:
                    refused.append(f"{short(holder)}, round {newest.manifest.round}: {error}")
                    if isinstance(error, RemoteProtocolError | PeerSilent):
                        self._doubted[holder] = now + DOUBT_SECONDS
            return False

        self._doubted = {peer: until for peer, until in self._doubted.items() if now < until}
        report, newest = await read_run(self._network, info.run_id, now, info.fingerprint.hex(), accept)
        if newest is None and refused:
            raise RemoteProtocolError(
                f"no peer could prove the certificate that it announces: {'; '.join(refused[:3])}"
            )
        return Look(report, tuple(found))

    async def close(self) -> None:
        if self._close is not None:
            await self._close()

    async def _leading_to(self, newest: Commit, holder: PeerId, known: Known, info: RunInfo) -> list[Commit]:
        """What is unknown of the commits up to `newest`, each checked against the one before it."""
        name, last = manifest_hash(newest.manifest), newest.manifest.round
        if known.name_of(last) == name:
            return []
        commits = [await self._branch(last, holder, known, info)]
        while commits[-1].manifest.round < last:
            after = commits[-1].manifest.round + 1
            for commit in await self._part(holder, after, min(MAX_COMMITS_AT_ONCE, last + 1 - after)):
                self._check_next(commits[-1], commit, info)
                commits.append(commit)
        if manifest_hash(commits[-1].manifest) != name:
            raise RemoteProtocolError("its commits do not lead to the one it announced")
        return [one for one in commits if known.name_of(one.manifest.round) != manifest_hash(one.manifest)]

    async def _branch(self, last: int, holder: PeerId, known: Known, info: RunInfo) -> Commit:
        """The newest commit below `last` that `holder` has and we know; genesis, checked, where there is none."""
        at, step = max(0, min(last - 1, known.newest)), 1
        while at > 0:
            (commit,) = await self._part(holder, at, 1)
            if manifest_hash(commit.manifest) == known.name_of(at):
                return commit
            at, step = max(0, at - step), 2 * step
        (genesis,) = await self._part(holder, 0, 1)
        check_genesis(genesis, info, self._check)
        return genesis

    async def _part(self, holder: PeerId, first: int, count: int) -> tuple[Commit, ...]:
        commits = await fetch_commits(self._network.transport, (holder,), first, count)
        if any(commit.manifest.round != first + at for at, commit in enumerate(commits)):
            raise RemoteProtocolError(f"it sent rounds other than those from {first} on")
        return commits

    def _check_next(self, before: Commit, commit: Commit, info: RunInfo) -> None:
        if commit.manifest.parent != manifest_hash(before.manifest):
            raise RemoteProtocolError(f"its round {commit.manifest.round} does not follow the one before")
        check_certificate(before.manifest, commit.manifest, commit.certificate, self._check, info.seals)
