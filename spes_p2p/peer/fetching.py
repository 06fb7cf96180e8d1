"""The newest committed state of a live run for somebody who takes no part in it: to export, to evaluate.

The chain of certificates is fetched from genesis on and checked, then the tiles of the newest manifest by hash, from
all who have them; donors keep it until it is here, however many rounds that takes. Takes ports, so that it runs on any
network; the disk that it needs is a folder that the caller removes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from spes_p2p.config.schema import Config
from spes_p2p.consensus.actions import CatchUp as CatchUpAction
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.transfers import fill_state
from spes_p2p.ids import PeerId, short
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.swarm.ports import Network
from spes_p2p.swarm.records import HeadRecord, newest_heads
from spes_p2p.sync.announced import read_heads, read_peers, seen_at
from spes_p2p.sync.catch_up import CatchUp
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.node import Run
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import in_thread

T = TypeVar("T")
ANSWER_SECONDS = 15.0
MOST_TRIES = 5
"""Donors keep a state that is being fetched; where they have no room for that, the next one is tried."""
_FIX = "use a peer's checkpoint, or try again while a peer is up or a bootstrap node runs with --archive"


@dataclass(frozen=True)
class Fetched:
    """A state of a run, whole and checked, in the folder that it was fetched into."""

    info: RunInfo
    config: Config
    commit: Commit
    version: Version
    peers: int
    """How many took part in a round, at most."""


async def fetch_newest(
    network: Network,
    folder: Path,
    run_id: str | None = None,
    fingerprint: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[Config], None] = lambda config: None,
) -> Fetched:
    """Finds the run, follows its chain and fetches its newest state; `report` hears of (bytes done, bytes in all).

    `check` may refuse the run's config before anything is fetched. Raises NetworkError when nobody answers, the run has
    not begun, or it goes on faster than its state comes; ConfigError when several runs are announced; StorageFull.
    """
    info, config = await find_and_load(network, run_id, fingerprint, ANSWER_SECONDS)
    await in_thread(partial(check, config))
    with contextlib.closing(RunFetcher(network, info, config, folder, report)) as fetcher:
        commit, version = await fetcher.run()
        chain = fetcher.chain
        peers = await in_thread(lambda: max(len(chain.commit(one).manifest.roster) for one in range(chain.length)))
    return Fetched(info, config, commit, version, peers)


class RunFetcher:
    """Follows the chain of a live run, and fetches its newest state; both lie in `folder`. To be closed.

    Whatever is cancelled ends when nothing writes there any more: then the folder can be removed.
    """

    def __init__(
        self,
        network: Network,
        info: RunInfo,
        config: Config,
        folder: Path,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        run = Run(info, config, state_layout(config))
        self._network = network
        self._info = info
        self._report = report
        self._store = StateStore(folder / "state", run.layout)
        self.chain = Chain(folder / "chain")
        self._transfers = run.transfers(network.transport)
        self._check = EnvelopeChecker(network.verifier).check
        self._heads: Mapping[PeerId, HeadRecord] = {}
        """The peers of the run at the time when the newest commit was looked up."""
        self._headers = CatchUp(info, run.rules, self._check, self.chain, self._store, self._transfers, in_thread)

    def close(self) -> None:
        self._store.close()

    async def run(self) -> tuple[Commit, Version]:
        """The newest commit whose state came here whole, and that state. Raises as `fetch_newest` does."""
        tried: Commit | None = None
        for _ in range(MOST_TRIES):
            commit, publishers, others = await self.newest()
            try:
                return commit, await self._state(commit, [*publishers, *others])
            except NetworkError as error:
                if commit == tried:
                    raise NetworkError(str(error), fix=_FIX) from error
                tried = commit  # it may have gone on while we fetched
        raise NetworkError(
            f"the state of run {self._info.run_id} was replaced {MOST_TRIES} times before it could be fetched",
            fix=_FIX,
        )

    async def newest(self) -> tuple[Commit, tuple[PeerId, ...], list[PeerId]]:
        """(the newest commit that somebody can prove, the peers that announce it, all other peers that are online)."""
        peers = await read_peers(self._network, self._info.run_id, ANSWER_SECONDS)
        heads = self._heads = await read_heads(self._network, self._info.run_id, ANSWER_SECONDS)
        reasons: list[str] = []
        for head, publishers in newest_heads(heads):
            for holder in publishers:
                try:
                    await self._headers.headers(-1, CatchUpAction(holder, head.round, head.manifest_hash))
                except (NetworkError, RemoteProtocolError) as error:
                    reasons.append(f"{short(holder)}: {error}")
                newest = self.chain.newest
                if newest is not None and newest.manifest.round >= head.round:  # else it said more than it proved
                    return newest, publishers, [peer for peer in peers if peer not in publishers]
        if self.chain.newest is not None:
            return self.chain.newest, (), list(peers)
        raise NetworkError(
            f"no peer gave the certificates of run {self._info.run_id}: {'; '.join(reasons) or 'it has not begun'}",
            fix="try again when the run has begun and one of its peers can be reached (spes-p2p status shows them)",
        )

    def seen_at(self, newest: Commit) -> float:
        """When the commit that `newest` gave first came to a peer, as peers say: Unix seconds, 0 where none does."""
        return seen_at(self._heads, newest)

    async def _state(self, commit: Commit, holders: list[PeerId]) -> Version:
        manifest, store, label = commit.manifest, self._store, commit.manifest.state_root.hex()
        theirs = await self._transfers.hash_list(holders, manifest.state_root, manifest.round)
        staging = store.staged(manifest.round, label) or store.stage(manifest.round, None, label)  # of a try before
        total = store.layout.num_values * VALUE_BYTES
        done = 0

        def here() -> int:
            return VALUE_BYTES * sum(tile.size for tile in store.layout.tiles if staging.has(tile.id))

        def report(size: int) -> None:
            nonlocal done
            done += size
            self._report(done, total)

        wanted = dict(enumerate(theirs))
        while True:
            done = before = here()
            try:
                await fill_state(staging, wanted, store, self._transfers, holders, in_thread, report)
                return await in_thread(partial(_published, staging))
            except NetworkError:  # too long a line at a donor, perhaps
                if here() == before:  # not `done`: what was being written when the try ended is not reported
                    raise


def _published(staging: Staging) -> Version:
    staging.finish()
    return staging.publish()
