"""What it costs to get the run's data from other peers: hashing, checking, bytes for each trained byte, and the way.

    python scripts/bench_data_swarm.py                 # all of it, on a made-up dataset of 256 MB
    python scripts/bench_data_swarm.py --megabytes 64 --no-network

Bytes for each trained byte are counted, not timed: sequences in the run's random order, a dataset of 100 GB of which
nothing is on disk yet, for several sizes of pieces. The way is libp2p on loopback, both ends on this machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.merkle import EMPTY_ROOT
from spes_p2p.data.order import Order
from spes_p2p.data.pieces import CATALOGUE_VERSION, Catalogue, PieceGrid, ShardRoot
from spes_p2p.data.trees import TREES, FolderPieces
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.piece_fetcher import DataHolders, PieceFetcher
from spes_p2p.exchange.pieces import DataTraffic, PieceServing
from spes_p2p.exchange.requests import DataRequest, unpack_request
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.tasks import Tasks

SHARD_TOKENS = (2**28 - 128) // 2  # as tokenize cuts them by default, in tokens of 2 bytes
SHARDS = 400
SEQUENCES = ((512, 2), (2048, 2), (4096, 4))
PIECES = (4096, 8192, 16384, 65536)
LEASED = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--no-network", action="store_true")
    arguments = parser.parse_args()
    print_bytes()
    with TemporaryDirectory(prefix="bench-data-swarm-") as folder:
        pieces = print_hashing(Path(folder), arguments.megabytes)
        if not arguments.no_network:
            with NetworkThread() as thread:
                thread.run(print_way(Path(folder), pieces))


def print_bytes() -> None:
    """Fetched for each trained byte, proofs included, where no piece is used twice by chance or by an earlier one."""
    print("bytes fetched for each trained byte (the first 20,000 sequences of 100 GB; in brackets all of an epoch)")
    print("  sequence " + "".join(f"{size // 1024:>7} KiB pieces" for size in PIECES))
    for tokens, item_bytes in SEQUENCES:
        row = [fetched_bytes(tokens, item_bytes, size) for size in PIECES]
        print(f"  {tokens * item_bytes:>8} " + "".join(f"{first:>11.2f} ({all_of:.2f})" for first, all_of in row))


def fetched_bytes(length: int, item_bytes: int, piece_bytes: int) -> tuple[float, float]:
    shards = tuple(ShardRoot(SHARD_TOKENS * 2 // item_bytes, EMPTY_ROOT) for _ in range(SHARDS))
    grid = PieceGrid(Catalogue(CATALOGUE_VERSION, f"uint{8 * item_bytes}", piece_bytes, shards))
    order = Order(grid.tokens // length, seed=0)
    pieces = grid.of_tokens(order.sequences_at(np.arange(LEASED)) * length, length)
    each = piece_bytes + grid.max_proof_bytes
    return len(pieces) * each / (LEASED * length * item_bytes), grid.total * each / (grid.tokens * item_bytes)


def print_hashing(folder: Path, megabytes: int) -> FolderPieces:
    rng = np.random.default_rng(0)
    (folder / "0.raw").write_bytes(rng.integers(0, 2**16, megabytes * 500_000, dtype=np.uint16).tobytes())
    (folder / "paths.txt").write_text("0.raw\n")
    dataset, began = Dataset.open(folder / "paths.txt", "uint16"), time.perf_counter()
    pieces = FolderPieces.open(dataset, folder / "own", lambda text: None)
    seconds = time.perf_counter() - began
    share = (folder / TREES).stat().st_size / (megabytes * 1e6)
    print(f"hashing a dataset: {megabytes / seconds:.0f} MB/s; its trees take {100 * share:.2f}% of it")
    some = rng.permutation(pieces.held)[:5000].tolist()
    began = time.perf_counter()
    found = [pieces.find(piece) for piece in some]
    read = time.perf_counter() - began
    began = time.perf_counter()
    for piece, joined in zip(some, found):
        size = pieces.grid.place(piece).size
        assert joined is not None
        assert pieces.grid.is_sound(piece, memoryview(joined)[:size], joined[size:])
    checked = time.perf_counter() - began
    size_mb = sum(len(joined or b"") for joined in found) / 1e6
    print(f"handing out, read and checked: {size_mb / read:.0f} MB/s; checking alone: {size_mb / checked:.0f} MB/s")
    return pieces


class _Holder:
    def __init__(self, pieces: FolderPieces, tasks: Tasks) -> None:
        self._serving, self._tasks = PieceServing(pieces, DataTraffic()), tasks

    async def on_call(self, caller: str, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: str, request: bytes) -> Blob:
        asked = unpack_request(request)
        if not isinstance(asked, DataRequest):
            raise RemoteProtocolError("it has data only")
        return await self._tasks.in_thread(lambda: self._serving.answer(asked))


async def print_way(folder: Path, pieces: FolderPieces) -> None:
    """One holder, then two, on loopback."""
    loopback, limits = ("/ip4/127.0.0.1/tcp/0",), StreamLimits()
    tasks = Tasks(lambda error: print(error))
    first = await HivemindNetwork.start((), folder / "0.key", loopback, (), False, limits)
    networks = [first]
    try:
        for index in (1, 2):
            network = await HivemindNetwork.start(
                first.transport.addresses[:1], folder / f"{index}.key", loopback, (), False, limits
            )
            networks.append(network)
        asker, holders = networks[2], networks[:2]
        for holder in holders:
            await holder.transport.serve(_Holder(pieces, tasks))
            asker.transport.learn(holder.signer.peer_id, holder.transport.addresses)
        for some in (holders[:1], holders):
            holding = dict.fromkeys((holder.signer.peer_id for holder in some), pieces.held)
            fetcher = PieceFetcher(
                asker.transport, pieces.grid, DataHolders(holders[0].signer.peer_id, holding.copy), print,
                DataTraffic(), lambda: 5.0, tasks.in_thread,
            )  # fmt: skip
            print(f"{len(some)} holder(s) on loopback: {await fetched_per_second(fetcher, pieces):.0f} MB/s")
    finally:
        await tasks.stop()
        for network in networks:
            await network.close()


async def fetched_per_second(fetcher: PieceFetcher, pieces: FolderPieces) -> float:
    size = 0

    def take(found: Sequence[tuple[int, bytes]]) -> None:
        nonlocal size
        size += sum(len(joined) for _, joined in found)

    began = time.perf_counter()
    order = np.random.default_rng(1).permutation(pieces.held)[:8192].tolist()
    for at in range(0, len(order), 1024):
        await fetcher.fetch(order[at : at + 1024], take, urgent=True)
    return size / 1e6 / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
