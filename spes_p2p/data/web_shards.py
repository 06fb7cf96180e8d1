"""The pieces of a dataset whose folder lies on a web server, each with its proof, as others expect it.

The folder is what `spes-p2p tokenize` writes: shards, `manifest.json`, and the file of hash trees. Nothing in it is
believed. Of a tree two parts are fetched: once a shard, the level whose nodes stand for GROUP pieces each, which must
hash to the root in the catalogue; and for a piece the leaves of its group, which must hash to their node. So one piece
costs itself and at most 4 KiB of hashes, and 32 bytes of memory a MiB of the dataset stay. Several servers may have it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

from spes_p2p.data.manifest import MANIFEST, Manifest
from spes_p2p.data.merkle import level_sizes, parents, siblings
from spes_p2p.data.pieces import Catalogue, PieceGrid, PieceLocation
from spes_p2p.data.shards import HEADER_BYTES
from spes_p2p.data.trees import HEAD_START_BYTES, TREES, catalogue_of, first_tree_byte, head_bytes, level_starts
from spes_p2p.data.web_client import WebClient
from spes_p2p.data.web_url import WebFolder
from spes_p2p.errors import DataError, NetworkError, RemoteProtocolError
from spes_p2p.ids import HASH_BYTES

GROUP_LEVELS = 7
GROUP = 2**GROUP_LEVELS
MOST_TOGETHER = 64
"""Pieces of one request, where they lie one behind the other."""
MAX_GROUPS = 2048
"""Whose leaves are kept in memory, 4 KiB each."""
MAX_MANIFEST_BYTES = 32 * 2**20
MAX_MANIFEST_ENTRIES = 2**20
"""Lists and objects: an empty one is three bytes on the wire and seventy in memory."""
_NAME = re.compile(r"[^/\\.][^/\\]*")
_Levels = list[bytes]
"""Joined nodes, from below."""


class WebShards:
    """One dataset at one web server. Belongs to one event loop."""

    def __init__(self, client: WebClient, folder: WebFolder, grid: PieceGrid) -> None:
        self.folder = folder
        self._client = client
        self._grid = grid
        self._starts, _ = level_starts(grid, first_tree_byte(grid.catalogue))
        self._names: tuple[str, ...] | None = None
        self._upper: dict[int, bytes] = {}
        """Of each shard: the nodes that stand for a group of its pieces."""
        self._leaves: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        """Of the groups that were used last, by shard and number."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of what is being fetched: who needs the same waits for it."""

    async def pieces(self, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        """Pieces that lie one behind the other in one shard, each with its proof, joined.

        Raises NetworkError where the server does not give them, RemoteProtocolError where it gives something else.
        """
        places = [self._grid.place(number) for number in numbers]
        first, piece_bytes = places[0], self._grid.catalogue.piece_bytes
        name = (await self._shard_names())[first.shard]
        size = (len(places) - 1) * piece_bytes + places[-1].size
        data = await self._client.read(self.folder, name, HEADER_BYTES + first.index * piece_bytes, size)
        found = []
        for at, (number, place) in enumerate(zip(numbers, places, strict=True)):
            piece = data[at * piece_bytes : at * piece_bytes + place.size]
            proof = await self._proof(place)
            if not self._grid.is_sound(number, piece, proof):
                raise RemoteProtocolError(f"{name} at {self.folder} is not the run's: piece {number} has another hash")
            found.append((number, piece + proof))
        return found

    async def _shard_names(self) -> tuple[str, ...]:
        async with self._lock("names"):
            if self._names is None:
                self._names = await self._read_names()
            return self._names

    async def _read_names(self) -> tuple[str, ...]:
        manifest = await read_manifest(self._client, self.folder)
        tokens = tuple(shard.tokens for shard in manifest.shards)
        if tokens != tuple(shard.tokens for shard in self._grid.catalogue.shards):
            raise RemoteProtocolError(f"{MANIFEST} at {self.folder} lists shards other than the run's")
        names = tuple(shard.file for shard in manifest.shards)
        if not all(isinstance(name, str) and _NAME.fullmatch(name) and name.isprintable() for name in names):
            raise RemoteProtocolError(f"{MANIFEST} at {self.folder} has names that lead out of its folder")
        return names

    async def _proof(self, place: PieceLocation) -> bytes:
        """The hashes that lead from a piece to the root of its shard."""
        group, levels = place.index // GROUP, level_sizes(place.pieces)
        lower = _levels(await self._group_leaves(place, group), GROUP_LEVELS)
        upper = _levels(await self._upper_nodes(place), len(levels)) if place.pieces > GROUP else []
        proof = []
        for level, at in siblings(place.index, place.pieces):
            nodes = lower[level] if level < GROUP_LEVELS else upper[level - GROUP_LEVELS]
            inside = at - ((group * GROUP) >> level) if level < GROUP_LEVELS else at
            proof.append(nodes[inside * HASH_BYTES : (inside + 1) * HASH_BYTES])
        return b"".join(proof)

    async def _upper_nodes(self, place: PieceLocation) -> bytes:
        shard = place.shard
        async with self._lock(f"upper {shard}"):
            if shard not in self._upper:
                nodes = await self._nodes(shard, GROUP_LEVELS, 0, level_sizes(place.pieces)[GROUP_LEVELS])
                if _top(nodes) != self._grid.catalogue.shards[shard].root:
                    raise self._wrong_hashes()
                self._upper[shard] = nodes
            return self._upper[shard]

    async def _group_leaves(self, place: PieceLocation, group: int) -> bytes:
        key = place.shard, group
        if place.pieces > GROUP:
            nodes = await self._upper_nodes(place)
            expected = nodes[group * HASH_BYTES : (group + 1) * HASH_BYTES]
        else:
            expected = bytes(self._grid.catalogue.shards[place.shard].root)
        async with self._lock(f"leaves {key}"):
            if key not in self._leaves:
                count = min(GROUP, place.pieces - group * GROUP)
                leaves = await self._nodes(place.shard, 0, group * GROUP, count)
                if _top(leaves) != expected:
                    raise self._wrong_hashes()
                self._leaves[key] = leaves
                if len(self._leaves) > MAX_GROUPS:
                    self._leaves.popitem(last=False)
            self._leaves.move_to_end(key)
            return self._leaves[key]

    def _lock(self, what: str) -> asyncio.Lock:
        lock = self._locks.get(what) or asyncio.Lock()
        self._locks[what] = lock
        return lock

    async def _nodes(self, shard: int, level: int, first: int, count: int) -> bytes:
        at = self._starts[shard][level] + first * HASH_BYTES
        return await self._client.read(self.folder, TREES, at, count * HASH_BYTES)

    def _wrong_hashes(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"{TREES} at {self.folder} does not belong to the run's data")


def runs_of(grid: PieceGrid, numbers: Sequence[int]) -> list[list[int]]:
    """Pieces that one request brings: neighbours of one shard; in the order of their first need."""
    order = {number: at for at, number in enumerate(numbers)}
    keys = ((number, (number - at, grid.place(number).shard)) for at, number in enumerate(sorted(order)))
    runs = [[number for number, _ in found] for _, found in groupby(keys, key=lambda pair: pair[1])]
    cut = [run[at : at + MOST_TOGETHER] for run in runs for at in range(0, len(run), MOST_TOGETHER)]
    return sorted(cut, key=lambda run: min(order[number] for number in run))


async def read_manifest(client: WebClient, folder: WebFolder) -> Manifest:
    """Raises NetworkError, and RemoteProtocolError for what is no manifest."""
    data = await client.read_whole(folder, MANIFEST, MAX_MANIFEST_BYTES)
    if data.count(b"{") + data.count(b"[") > MAX_MANIFEST_ENTRIES:
        raise RemoteProtocolError(f"{MANIFEST} at {folder} has more than {MAX_MANIFEST_ENTRIES} entries")
    try:
        return await asyncio.to_thread(Manifest.parse, data, f"{MANIFEST} at {folder}")
    except DataError as error:
        raise RemoteProtocolError(str(error), fix=error.fix) from error


async def read_catalogue(client: WebClient, folder: WebFolder) -> Catalogue:
    """What the hash trees in a folder begin with; only who owns the folder may believe it.

    Raises NetworkError, DataError and RemoteProtocolError.
    """
    start = await client.read(folder, TREES, 0, HEAD_START_BYTES)
    return catalogue_of(await client.read(folder, TREES, 0, head_bytes(start)))


def _levels(nodes: bytes, count: int) -> _Levels:
    """These nodes and up to `count` levels in all, each of the parents of the one below."""
    found = [nodes]
    while len(found) < count and len(found[-1]) > HASH_BYTES:
        found.append(parents(found[-1]))
    return found


def _top(nodes: bytes) -> bytes:
    return _levels(nodes, 64)[-1]


REST_SECONDS = (2.0, 120.0)


class WebMirrors:
    """Several web servers with the same shards: who is asked next, who rests, and who is asked no more.

    Pieces come from the first that gives them; one that fails is left alone for a while, twice as long each time, and
    one that gives something else than the run's data is named and dropped. Belongs to one event loop. `tell` gets a
    line about each server that lies.
    """

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
