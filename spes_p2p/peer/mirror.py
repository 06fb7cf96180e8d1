"""What makes a bootstrap node a mirror: it serves a run that somebody else began, and has no say in it.

Config, genesis and data come from whoever has them, and are checked by the run's fingerprint. Who follows the chain and
keeps states is the same as on the organiser's node (`sync/organising`); without the organiser's key it signs nothing.
What was fetched is kept, so that a mirror can start when nobody else is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spes_p2p.data.loader import open_dataset
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import ConfigError, NetworkError, StorageFull
from spes_p2p.exchange.piece_fetcher import DataHolders, PieceFetcher, fetch_catalogue
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.peer.data_feed import DATA, PAUSE_SECONDS, PIECES_A_PASS, check_dataset, keep_catalogue, kept_catalogue
from spes_p2p.peer.entrance import ANSWER_SECONDS, check_organiser
from spes_p2p.peer.folder import RUN, claim_folder, kept_run
from spes_p2p.peer.options import JoinTarget
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.sync.announce import Announcer
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.genesis import check_run
from spes_p2p.sync.node import Run
from spes_p2p.sync.organising.organiser import Organiser
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.starting import fetch_genesis, fetch_start
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack

LOOK_SECONDS = 5.0
FULL_SECONDS = 60.0
"""Seconds after which a full disk is tried again."""
WINDOW = 2**16
"""Number of pieces that are checked at a time for missing ones."""
Say = Callable[[str], None]


class Mirror:
    """Made by `Mirror.find`, before anything of the run is opened here."""

    def __init__(self, network: HivemindNetwork, run: Run, folder: Path, say: Say) -> None:
        self.run = run
        self._info = run.info
        self._network = network
        self._folder = folder
        self._say = say
        self._tasks = Tasks(lambda error: None)  # whoever waits for it hears of it
        self._cache: PieceCache | None = None

    @classmethod
    async def find(cls, network: HivemindNetwork, meeting: JoinTarget, folder: Path, say: Say) -> Mirror:
        """The run that is invited to, by what is kept of it in `folder` or by who answers; claims the folder for it.

        Raises NetworkError where nobody serves it, ConfigError where it cannot be mirrored from here.
        """
        info = kept_run(folder, meeting.fingerprint)
        if info is None:
            info, config = await find_and_load(network, meeting.run_id, meeting.fingerprint, ANSWER_SECONDS)
        else:
            config = check_run(info, info.fingerprint)
        check_organiser(meeting.organiser, info)
        if network.signer.peer_id == info.organiser:
            raise ConfigError(
                f"{folder} holds the organiser's key of run {info.run_id}: it cannot be a mirror of this run",
                fix="start it with --config as before, or give the mirror a folder of its own with --output",
            )
        run = Run(info, config, state_layout(config))
        claim_folder(folder / RUN, info, run.layout, network.signer.peer_id)
        say(f"mirroring run {info.run_id}: this node serves what it has, and signs nothing")
        return cls(network, run, folder, say)

    async def sources(self) -> tuple[PeerId, ...]:
        """Who else is in the run now, as far as anybody answers."""
        known = set[PeerId]()
        with contextlib.suppress(NetworkError):
            known.update(await read_peers(self._network, self._info.run_id, ANSWER_SECONDS))
        return tuple(sorted(known - {self._network.signer.peer_id}))

    # ---------------------------------------------------------------- data

    async def open_data(self, path: str | None, max_data_disk: int) -> FolderPieces | PieceCache | None:
        """The run's data: a copy of it at `path`, else what is fetched, at most `max_data_disk` bytes; None for none.

        Raises DataError for another dataset, NetworkError where nobody says what the dataset is.
        """
        config = self.run.config
        if config.data.source == "local" or self._info.dataset == NO_HASH:
            return None
        in_thread, folder = self._tasks.in_thread, self._folder / DATA
        if path is not None:
            config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
            pieces = await in_thread(lambda: FolderPieces.open(open_dataset(config), folder, self._say))
            check_dataset(pieces.dataset_hash, path, self._info)
            return pieces
        catalogue = kept_catalogue(folder, self._info.dataset)
        if catalogue is None:
            catalogue = await fetch_catalogue(
                self._network.transport, self._info.dataset, await self.sources(), ANSWER_SECONDS, self._tell
            )
            keep_catalogue(folder, pack(catalogue))
        grid = PieceGrid(catalogue)
        whole = bytes_text(grid.tokens * grid.item_bytes)
        self._say(
            f"the run's data is copied from other peers: {whole} in total, {bytes_text(max_data_disk)} of it at most"
        )
        self._cache = await in_thread(lambda: PieceCache(folder, grid, max_data_disk))
        return self._cache

    async def copy_data(self, announcer: Announcer) -> None:
        """Fetches what is not here and has room; never returns. What others do wrong is tried again."""
        if (cache := self._cache) is None:
            await asyncio.Event().wait()
            return

        def holders() -> dict[PeerId, int]:
            return {peer: record.data_pieces for peer, record in announcer.known.items()}

        fetcher = PieceFetcher(
            self._network.transport, cache.grid, DataHolders(self._info.organiser, holders), self._tell, DataTraffic(),
            lambda: self.run.stall_seconds, self._tasks.in_thread,
        )  # fmt: skip
        while True:
            absent = await self._tasks.in_thread(lambda: absent_pieces(cache, PIECES_A_PASS))
            try:
                if absent:
                    await fetcher.fetch(absent, lambda pieces: _put(cache, pieces))
                await asyncio.sleep(0 if absent else LOOK_SECONDS)
            except NetworkError:
                await asyncio.sleep(PAUSE_SECONDS)
            except StorageFull as error:
                self._say(f"copying the run's data is paused: {error}")
                await asyncio.sleep(FULL_SECONDS)
                cache.grow_again()

    def _tell(self, peer: PeerId, text: str) -> None:
        self._say(f"{peer}: {text}")

    # ---------------------------------------------------------------- the run

    async def fetch_initial(self, store: StateStore) -> None:
        """Fetches the initial state of a run that does not start from its seed; see `fetch_start`."""
        network, in_thread = self._network, self._tasks.in_thread
        check = EnvelopeChecker(network.verifier).check
        await fetch_start(self.run, store, network.transport, check, self.sources, in_thread, self._say)

    async def await_genesis(self, organiser: Organiser) -> None:
        """Gives it to `organiser` once somebody has it; never returns."""
        if not organiser.chain.length:
            check = EnvelopeChecker(self._network.verifier).check
            organiser.begun(await fetch_genesis(self.run, self._network.transport, check, self.sources))
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._tasks.stop()
        if self._cache is not None:
            self._cache.close()


def absent_pieces(cache: PieceCache, most: int) -> list[int]:
    """The first pieces that are not here, so many at most and no more than there is room for."""
    room, found = min(most, cache.capacity - cache.held), list[int]()
    for first in range(0, cache.grid.total, WINDOW):
        if len(found) >= room:
            break
        window = np.arange(first, min(first + WINDOW, cache.grid.total))
        found += window[~cache.has(window)].tolist()
    return found[: max(0, room)]


def _put(cache: PieceCache, pieces: Sequence[tuple[int, bytes]]) -> None:
    for piece, joined in pieces:
        cache.put(piece, joined)
