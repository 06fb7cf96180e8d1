"""What can be fetched from a peer as a stream: contributions, tiles, hash lists, the chain, the run itself, its data.

One small record names what is asked for; `Serving` answers it from what is on disk. Nothing is computed for others, and
a request for what is not here is refused, so that the asker tries another holder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.ids import NO_HASH, Hash, short
from spes_p2p.state.hashes import HASH_BYTES, split_hashes
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.bench import whole_state
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.moments import MomentShelf
from spes_p2p.wire import pack

VALUES = "values"
TILES = "tiles"
HASHES = "hashes"
WIRES = "wires"
MOMENTS = "moments"
CHAIN = "chain"
RUN = "run"
CATALOGUE = "catalogue"
PIECES = "pieces"
SOURCES = "sources"
MAX_TILES_AT_ONCE = 64
MAX_JOINED_BYTES = 4 * 2**20
"""Of several tiles in one answer: they are copied together, for each stream that is served."""
MAX_COMMITS_AT_ONCE = 64
MAX_CHAIN_BYTES = 2**20
"""Of commits in one answer, where they are more than one: who asks waits for so much and no longer."""


@dataclass(frozen=True)
class Request:
    """`kind` and what it needs: VALUES and MOMENTS (name: the manifest that was trained on, first tile, count; for
    VALUES in `hashes` the roster entry that counts them, packed), TILES (hashes, joined), HASHES (name: state root,
    first: round), WIRES (first: round, count: the round of the state that the asker has), CHAIN (first round, count),
    RUN; of the run's data CATALOGUE and SOURCES (name: the dataset), and PIECES (name: the dataset; hashes: numbers of
    pieces, 8 bytes each).

    MOMENTS with a count of 0 says that the asker needs no more of the column in which the first tile is.
    """

    kind: str
    name: Hash = NO_HASH
    first: int = 0
    count: int = 0
    hashes: bytes = b""


@dataclass(frozen=True)
class ChainPart:
    """The answer to CHAIN: commits, each packed."""

    commits: tuple[bytes, ...]


class Serving:
    """Answers fetches from a store, a chain, and the inputs of the running round."""

    def __init__(
        self,
        info: RunInfo,
        chain: Chain,
        store: StateStore | None,
        inputs: Callable[[Hash, int, int], memoryview | bytes | None],
        moments: MomentShelf | None = None,
        data: Callable[[Request], Blob] | None = None,
    ) -> None:
        """`inputs(parent, first tile, count)` gives own contributed values as bytes, or None.

        `data` answers what is asked of the run's data; None where there is none here.
        """
        self._moments = moments
        self._data = data
        self._info = info
        self._chain = chain
        self._store = store
        self._inputs = inputs

    def answer(self, request: Request) -> Blob:
        """The bytes asked for. Raises RemoteProtocolError where we do not have them."""
        if request.kind == RUN:
            return Blob(pack(self._info))
        if request.kind == CHAIN:
            return self._commits(request.first, request.count)
        if request.kind == VALUES:
            data = self._inputs(request.name, request.first, request.count)
            if data is None:
                raise RemoteProtocolError(f"no values of our own on top of {short(request.name)}")
            return Blob(data)
        if request.kind == MOMENTS:
            return self._offered(request)
        if request.kind == TILES:
            return self._tiles(request.hashes)
        if request.kind == HASHES:
            return self._hashes(request.name, request.first)
        if request.kind == WIRES:
            return self._wires(request.first)
        if request.kind in (CATALOGUE, PIECES, SOURCES):
            if self._data is None:
                raise RemoteProtocolError("no data of the run is here")
            return self._data(request)
        raise RemoteProtocolError(f"nothing is known of {request.kind[:20]!r}")

    def _offered(self, request: Request) -> Blob:
        if self._moments is None or request.count > MAX_TILES_AT_ONCE:
            raise RemoteProtocolError(f"a request for the moments of {request.count} tiles")
        if request.count == 0:
            self._moments.note_taken(request.name, request.first)
            return Blob(b"")
        found = self._moments.serve(request.name, request.first, request.count)
        if found is None:
            raise RemoteProtocolError(f"no moments on top of {short(request.name)} are offered here")
        return Blob(found[1], pack(found[0]))

    def _commits(self, first: int, count: int) -> Blob:
        count = min(max(count, 0), MAX_COMMITS_AT_ONCE)
        try:
            return Blob(pack(ChainPart(self._chain.part(max(first, 0), count, MAX_CHAIN_BYTES))))
        except StateError as error:
            raise RemoteProtocolError(str(error)) from error

    def _tiles(self, joined: bytes) -> Blob:
        hashes = split_hashes(joined)
        if not hashes or len(joined) % HASH_BYTES or len(hashes) > MAX_TILES_AT_ONCE or self._store is None:
            raise RemoteProtocolError(f"a request for {len(joined)} bytes of tile hashes")
        found: list[memoryview] = []
        for tile_hash in hashes:
            data = self._store.find(tile_hash)
            if data is None:
                raise RemoteProtocolError(f"tile {short(tile_hash)} is not here")
            found.append(data)
            if len(found) > 1 and sum(len(part) for part in found) > MAX_JOINED_BYTES:
                raise RemoteProtocolError(f"tiles of more than {MAX_JOINED_BYTES} bytes at once")
        return Blob(found[0] if len(found) == 1 else b"".join(found))

    def _wires(self, round: int) -> Blob:
        """The hash of each tile as a round handed it out."""
        hashes = self._store.wire_hashes(round) if self._store else None
        if hashes is None or all(tile_hash == NO_HASH for tile_hash in hashes):
            raise RemoteProtocolError(f"what round {round} handed out is not here")
        return Blob(b"".join(hashes))

    def _hashes(self, root: Hash, round: int) -> Blob:
        version = whole_state(self._store, round, root) if self._store else None
        if version is None:
            raise RemoteProtocolError(f"no state {short(root)} of round {round} here")
        return Blob(b"".join(version.tile_hashes))
