"""Answers what others fetch from this peer, from what is on disk.

Nothing is computed for others, and a request for what is not here is refused, so that the asker tries another holder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.exchange import requests
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.candidate_state import whole_state
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack


@dataclass(eq=False)
class Serving:
    """Answers fetches from a store, a chain, and the inputs of the running round."""

    info: RunInfo
    chain: Chain
    store: StateStore | None
    inputs: Callable[[Hash, int, int], bytes | memoryview | None]
    """(parent, first tile, count) to own contributed values, or None."""
    data: Callable[[requests.DataRequest], Blob] | None = None
    """Answers what is asked of the run's data; None where there is none here."""

    def answer(self, request: requests.Request, caller: PeerId) -> Blob:
        """The bytes that `caller` asks for. Raises RemoteProtocolError where we do not have them."""
        match request:
            case requests.RunRequest():
                return Blob(pack(self.info))
            case requests.ChainRequest():
                return self._commits(request.first, request.count)
            case requests.ValuesRequest():
                return self._values(request)
            case requests.TilesRequest():
                return self._tiles(request.hashes)
            case requests.HashesRequest():
                return self._hashes(request.root, request.round)
            case requests.WiresRequest():
                return self._wires(request.round)
            case requests.CatalogueRequest() | requests.SourcesRequest() | requests.PiecesRequest():
                if self.data is None:
                    raise RemoteProtocolError("this peer has no data of the run")
                return self.data(request)

    def _values(self, request: requests.ValuesRequest) -> Blob:
        found = self.inputs(request.parent, request.first_tile, request.count)
        if found is None:
            raise RemoteProtocolError(f"no values of our own on top of {short(request.parent)}")
        return Blob(found)

    def _commits(self, first: int, count: int) -> Blob:
        count = min(max(count, 0), requests.MAX_COMMITS_AT_ONCE)
        try:
            return Blob(pack(requests.ChainPart(self.chain.part(max(first, 0), count, requests.MAX_CHAIN_BYTES))))
        except StateError as error:
            raise RemoteProtocolError(str(error)) from error

    def _tiles(self, hashes: tuple[Hash, ...]) -> Blob:
        if self.store is None:
            raise RemoteProtocolError("this peer keeps no state")
        found, most = list[memoryview](), requests.MAX_JOINED_BYTES
        for tile_hash in hashes:
            data = self.store.find(tile_hash)
            if data is None:
                raise RemoteProtocolError(f"tile {short(tile_hash)} is not here")
            found.append(data)
            if len(found) > 1 and sum(len(part) for part in found) > most:
                raise RemoteProtocolError(f"more than {most} bytes of tiles were requested at once")
        return Blob(found[0] if len(found) == 1 else b"".join(found))

    def _wires(self, round: int) -> Blob:
        """The hash of each tile as a round handed it out."""
        hashes = self.store.wire_hashes(round) if self.store else None
        if hashes is None or all(tile_hash == NO_HASH for tile_hash in hashes):
            raise RemoteProtocolError(f"what round {round} handed out is not here")
        return Blob(b"".join(hashes))

    def _hashes(self, root: Hash, round: int) -> Blob:
        version = whole_state(self.store, round, root) if self.store else None
        if version is None:
            raise RemoteProtocolError(f"no state {short(root)} of round {round} here")
        return Blob(b"".join(version.tile_hashes))
