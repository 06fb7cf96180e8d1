"""What can be fetched from a peer as a stream: contributions, tiles, hash lists, the chain, the run itself.

One small record names what is asked for; `Serving` answers it from what is on disk. Nothing is computed for others, and
a request for what is not here is refused, so that the asker tries another holder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.ids import NO_HASH, Hash, short
from spes_p2p.state.hashes import HASH_BYTES, split_hashes
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.messages import Commit
from spes_p2p.wire import pack

VALUES = "values"
TILES = "tiles"
HASHES = "hashes"
CHAIN = "chain"
RUN = "run"
MAX_TILES_AT_ONCE = 64
MAX_COMMITS_AT_ONCE = 64


@dataclass(frozen=True)
class Request:
    """`kind` and what it needs: VALUES (name: parent manifest, first tile, count), TILES (hashes, joined),
    HASHES (name: state root, first: round), CHAIN (first round, count), RUN."""

    kind: str
    name: Hash = NO_HASH
    first: int = 0
    count: int = 0
    hashes: bytes = b""


@dataclass(frozen=True)
class ChainPart:
    """The answer to CHAIN."""

    commits: tuple[Commit, ...]


class Serving:
    """Answers fetches from a store, a chain, and the inputs of the running round."""

    def __init__(
        self,
        info: RunInfo,
        chain: Chain,
        store: StateStore | None,
        inputs: Callable[[Hash, int, int], memoryview | bytes | None],
    ) -> None:
        """`inputs(parent, first tile, count)` gives own contributed values as bytes, or None."""
        self._info = info
        self._chain = chain
        self._store = store
        self._inputs = inputs

    def answer(self, request: Request) -> Blob:
        """The bytes asked for. Raises RemoteProtocolError where we do not have them."""
        if request.kind == RUN:
            return Blob(pack(self._info))
        if request.kind == CHAIN:
            count = min(max(request.count, 0), MAX_COMMITS_AT_ONCE)
            return Blob(pack(ChainPart(self._chain.part(max(request.first, 0), count))))
        if request.kind == VALUES:
            data = self._inputs(request.name, request.first, request.count)
            if data is None:
                raise RemoteProtocolError(f"no values of our own on top of {short(request.name)}")
            return Blob(data)
        if request.kind == TILES:
            return self._tiles(request.hashes)
        if request.kind == HASHES:
            return self._hashes(request.name, request.first)
        raise RemoteProtocolError(f"nothing is known of {request.kind[:20]!r}")

    def _tiles(self, joined: bytes) -> Blob:
        hashes = split_hashes(joined)
        if not hashes or len(joined) % HASH_BYTES or len(hashes) > MAX_TILES_AT_ONCE:
            raise RemoteProtocolError(f"a request for {len(joined)} bytes of tile hashes")
        found = [self._store.find(tile_hash) for tile_hash in hashes] if self._store else [None]
        missing = [tile_hash for tile_hash, data in zip(hashes, found, strict=False) if data is None]
        if missing:
            raise RemoteProtocolError(f"tile {short(missing[0])} is not here")
        if len(found) == 1 and found[0] is not None:
            return Blob(found[0])
        return Blob(b"".join(data for data in found if data is not None))

    def _hashes(self, root: Hash, round: int) -> Blob:
        try:
            version = self._store.version(round) if self._store else None
        except StateError as error:
            raise RemoteProtocolError(str(error)) from error
        if version is None or version.root != root:
            raise RemoteProtocolError(f"no state {short(root)} of round {round} here")
        return Blob(b"".join(version.tile_hashes))


def slice_bytes(tile_sizes: list[int]) -> int:
    """Bytes of tiles with so many values."""
    return sum(tile_sizes) * VALUE_BYTES
