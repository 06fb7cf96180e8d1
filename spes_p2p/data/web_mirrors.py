"""Several web servers with the same shards: who is asked next, who rests, and who is asked no more.

Pieces come from the first that gives them; one that fails is left alone for a while, twice as long each time, and one
that gives something else than the run's data is named and dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.web_client import WebClient
from spes_p2p.data.web_shards import WebShards, runs_of
from spes_p2p.data.web_url import WebFolder
from spes_p2p.errors import NetworkError, RemoteProtocolError

REST_SECONDS = (2.0, 120.0)


class WebMirrors:
    """Belongs to one event loop. `tell` gets a line about each server that lies."""

    def __init__(self, client: WebClient, grid: PieceGrid, tell: Callable[[str], None]) -> None:
        self._client = client
        self._grid = grid
        self._tell = tell
        self._mirrors: dict[WebFolder, WebShards] = {}
        self._liars: set[WebFolder] = set()
        self._failures: Counter[WebFolder] = Counter()
        self._rests_until: dict[WebFolder, float] = {}
        self.trouble = ""
        """Why no server gave anything at the last time."""

    def use(self, folders: Sequence[WebFolder]) -> None:
        """From now on these, the first ones first. A liar comes back when it was left out, and is named again."""
        self._liars &= set(folders)
        self._mirrors = {
            folder: self._mirrors.get(folder) or WebShards(self._client, folder, self._grid) for folder in folders
        }

    @property
    def can_be_asked(self) -> bool:
        """Whether there is one that neither rests nor lies."""
        return bool(self._able())

    async def pieces(self, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        """What the servers give of these, checked. Raises NetworkError where they give none."""
        reasons: list[str] = []
        runs = runs_of(self._grid, numbers)
        found = await asyncio.gather(*(self._run(run, reasons) for run in runs))
        pieces = [piece for part in found for piece in part]
        self.trouble = "" if pieces else "; ".join(dict.fromkeys(reasons)) or self.trouble
        if not pieces:
            raise NetworkError(self.trouble or "no web server is available now")
        return pieces

    async def _run(self, numbers: Sequence[int], reasons: list[str]) -> list[tuple[int, bytes]]:
        for folder in self._able():
            try:
                found = await self._mirrors[folder].pieces(numbers)
                self._failures.pop(folder, None)
                return found
            except RemoteProtocolError as error:
                if folder not in self._liars:
                    self._liars.add(folder)
                    self._tell(f"{error}; this server is not asked for data again")
                reasons.append(str(error))
            except NetworkError as error:
                self._rest(folder)
                reasons.append(f"{error} ({error.fix})" if error.fix else str(error))
        return []

    def _able(self) -> list[WebFolder]:
        now = asyncio.get_running_loop().time()
        return [
            folder
            for folder in self._mirrors
            if folder not in self._liars and self._rests_until.get(folder, now) <= now
        ]

    def _rest(self, folder: WebFolder) -> None:
        """Requests that were under way together count as one failure."""
        now = asyncio.get_running_loop().time()
        if self._rests_until.get(folder, now) > now:
            return
        least, most = REST_SECONDS
        self._failures[folder] += 1
        self._rests_until[folder] = now + min(most, least * 2.0 ** min(self._failures[folder] - 1, 16))

    async def close(self) -> None:
        await self._client.close()
