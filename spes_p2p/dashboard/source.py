"""Where the dashboard looks: a `Source` gives what a run is like now, and the commits that are new since the last look.

`SwarmSource` reads the DHT and the chain through the ports of `swarm`, so that it runs on any network. History is
fetched backwards-provable: each manifest names the hash of the one before it, up to the newest, whose certificate is
checked where that can be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId
from spes_p2p.swarm.ports import Directory, Transport, Verifier
from spes_p2p.sync.core.messages import Commit, Manifest, manifest_hash
from spes_p2p.sync.report import RunReport, fetch_commits, read_run
from spes_p2p.sync.requests import MAX_COMMITS_AT_ONCE

MOST_ROUNDS = 20_000
"""Older rounds than the newest so many are not fetched."""

NameOf = Callable[[int], Hash | None]
"""The hash of the manifest that is known of a round."""


@dataclass(frozen=True)
class Look:
    """What was found at one moment. `commits` follow one another and end with the newest; none if nothing is new."""

    report: RunReport
    commits: tuple[Commit, ...]


class Source(Protocol):
    """Looks at a run. Raises NetworkError or RemoteProtocolError where nobody answers or nothing can be proved."""

    async def look(self, now: float, name_of: NameOf) -> Look: ...

    async def close(self) -> None: ...


class SwarmSource:
    """Takes no part in the run: reads records and fetches commits."""

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        verifier: Verifier,
        run_id: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._directory, self._transport, self._verifier = directory, transport, verifier
        self._run_id, self._fingerprint = run_id, fingerprint

    async def look(self, now: float, name_of: NameOf) -> Look:
        report, newest, holders = await read_run(
            self._directory, self._transport, self._verifier, self._run_id, now, self._fingerprint
        )
        self._run_id, self._fingerprint = report.run_id, report.fingerprint
        return Look(report, () if newest is None else await self._new(newest, holders, name_of))

    async def close(self) -> None:
        """Whoever gave the ports closes them."""

    async def _new(self, newest: Commit, holders: tuple[PeerId, ...], name_of: NameOf) -> tuple[Commit, ...]:
        """All that lead from what is known to `newest`, back to where another history was left."""
        if name_of(newest.manifest.round) == manifest_hash(newest.manifest):
            return ()
        found = [newest]
        while not self._is_joined(found[0].manifest, newest, name_of):
            found = [*await self._before(found[0].manifest, holders), *found]
        return tuple(_unknown(found, name_of))

    def _is_joined(self, oldest: Manifest, newest: Commit, name_of: NameOf) -> bool:
        if oldest.round == 0 or newest.manifest.round - oldest.round >= MOST_ROUNDS:
            return True
        return name_of(oldest.round - 1) == oldest.parent

    async def _before(self, oldest: Manifest, holders: tuple[PeerId, ...]) -> list[Commit]:
        """Commits that end with the parent of `oldest`; raises RemoteProtocolError where they do not lead to it."""
        first = max(0, oldest.round - MAX_COMMITS_AT_ONCE)
        given: list[Commit] = []
        while len(given) < oldest.round - first:  # an answer is bounded in bytes, too
            given += await fetch_commits(
                self._transport, holders, first + len(given), oldest.round - first - len(given)
            )
        expected = oldest.parent
        for commit in reversed(given):
            if manifest_hash(commit.manifest) != expected:
                raise RemoteProtocolError(f"the commits before round {oldest.round} do not lead to it")
            expected = commit.manifest.parent
        return given


def _unknown(commits: Sequence[Commit], name_of: NameOf) -> list[Commit]:
    return [commit for commit in commits if name_of(commit.manifest.round) != manifest_hash(commit.manifest)]
