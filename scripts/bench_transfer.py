#!/usr/bin/env python3
"""How fast bytes move: our streams and our whole sync beside raw TCP and hivemind, on loopback, in one run.

    python scripts/bench_transfer.py --mib 128 --peers 4

One to one: tiles that are checked by hash, beside plain TCP and `load_state_from_peers`. All to all: a round of real
peers that exchange shared parameters, from the moment when the round closes to its commit on disk (with votes, hashes
and files), beside `AllReduceRunner` for a tensor of the same size with as many processes (which leaves the values in
memory, and agrees on nothing). Memory is what a peer's process had beyond what it held when it stopped training.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
TILE_BYTES = 4 * MIB
PARALLEL = 4
WORKERS = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the tensors, MiB")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="of each; the median is shown, without the first")
    arguments = parser.parse_args()
    size = arguments.mib * MIB

    print(f"One to one, {arguments.mib} MiB:")
    tcp = _best(_pair(_serve_tcp, _ask_tcp, size, arguments.rounds))
    _row("plain TCP, unchecked", size / tcp, None)
    theirs = _best(_pair(_serve_state, _ask_state, size, arguments.rounds))
    _row("hivemind load_state_from_peers", size / theirs, None)
    ours = _best(_pair(_serve_tiles, _ask_tiles, size, arguments.rounds))
    _row("our tiles, checked by hash", size / ours, size / theirs)

    moved = 2 * (arguments.peers - 1) * size
    print(
        f"\n{arguments.peers} peers average {arguments.mib} MiB each; all of them together move {moved / MIB:.0f} MiB:"
    )
    theirs = statistics.median(_all_reduce(arguments.peers, size, arguments.rounds)[1:])
    _row("hivemind AllReduceRunner", moved / theirs, None)
    ours, memory = _our_rounds(arguments.peers, size, arguments.rounds)
    _row("our round: close to commit on disk", moved / ours, moved / theirs)
    print(f"  memory of a peer beyond that at the end of training: {memory / MIB:.0f} MiB (target: below 128)")


def _row(what: str, rate: float, reference: float | None) -> None:
    beside = "" if reference is None else f"  {rate / reference:5.2f} times hivemind's"
    print(f"  {what:36} {rate / MIB:7.0f} MiB/s{beside}", flush=True)


def _best(seconds: Sequence[float]) -> float:
    return min(seconds)


# ---- one to one ----


def _pair(serve: Any, ask: Any, size: int, times: int) -> list[float]:
    """Seconds of each of `times` downloads in one process from another."""
    here, there = WORKERS.Pipe()
    ours, theirs = WORKERS.Pipe()
    server = WORKERS.Process(target=_in_loop, args=(serve, there, size, times))
    server.start()
    asker = WORKERS.Process(target=_in_loop, args=(ask, theirs, size, times))
    asker.start()
    ours.send(here.recv())
    found: list[float] = ours.recv()
    here.send("done")
    for process in (asker, server):
        process.join()
    return found


def _in_loop(work: Any, pipe: Connection, size: int, times: int) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # hivemind's own processes cannot be spawned
    asyncio.run(work(pipe, size, times))


async def _told(pipe: Connection) -> Any:
    return await asyncio.to_thread(pipe.recv)


async def _serve_tcp(pipe: Connection, size: int, times: int) -> None:
    data = bytes(size)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await _told(pipe)


async def _ask_tcp(pipe: Connection, size: int, times: int) -> None:
    port, found = await _told(pipe), []
    for _ in range(times):
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        left = size
        while left:
            left -= len(await reader.read(MIB))
        found.append(time.perf_counter() - began)
        writer.close()
    pipe.send(found)


class _Library:
    """Answers a fetch of tile k."""

    def __init__(self, size: int) -> None:
        self.tiles = [bytes([at % 256]) * TILE_BYTES for at in range(size // TILE_BYTES)]

    async def on_call(self, caller: Any, request: bytes) -> bytes:
        return b""

    async def on_fetch(self, caller: Any, request: bytes) -> Any:
        from spes_p2p.swarm.ports import Blob

        return Blob(self.tiles[int(request)])


async def _network(initial_peers: Sequence[str] = ()) -> Any:
    from spes_p2p.swarm.hivemind_backend import HivemindNetwork

    return await HivemindNetwork.start(initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",), use_relay=False)


async def _serve_tiles(pipe: Connection, size: int, times: int) -> None:
    network, library = await _network(), _Library(size)
    await network.transport.serve(library)
    from spes_p2p.state.hashes import hash_tile

    hashes = [hash_tile(tile) for tile in library.tiles]
    pipe.send((network.signer.peer_id, network.transport.addresses, hashes))
    await _told(pipe)
    await network.close()


async def _ask_tiles(pipe: Connection, size: int, times: int) -> None:
    from spes_p2p.state.hashes import hash_tile

    peer, addresses, hashes = await _told(pipe)
    network, found, slots = await _network(addresses[:1]), [], asyncio.Semaphore(PARALLEL)

    async def get(at: int) -> None:
        async with slots:
            _, data = await network.transport.fetch(peer, str(at).encode(), 10.0, TILE_BYTES)
        if await asyncio.to_thread(hash_tile, data) != hashes[at]:
            raise AssertionError("a tile came wrong")

    for _ in range(times):
        began = time.perf_counter()
        await asyncio.gather(*(get(at) for at in range(len(hashes))))
        found.append(time.perf_counter() - began)
    pipe.send(found)
    await network.close()


def _averager(size: int, dht: Any) -> Any:
    from hivemind.averaging import DecentralizedAverager

    return DecentralizedAverager(
        [torch.zeros(size // 4)], dht, prefix="bench", start=True, allow_state_sharing=True, target_group_size=2
    )


async def _serve_state(pipe: Connection, size: int, times: int) -> None:
    import hivemind

    dht = hivemind.DHT(start=True)
    averager = _averager(size, dht)
    pipe.send([str(maddr) for maddr in dht.get_visible_maddrs()])
    await _told(pipe)
    averager.shutdown()
    dht.shutdown()


async def _ask_state(pipe: Connection, size: int, times: int) -> None:
    import hivemind

    dht = hivemind.DHT(initial_peers=await _told(pipe), start=True)
    averager, found = _averager(size, dht), []
    averager.allow_state_sharing = False
    for _ in range(times):
        began = time.perf_counter()
        state = await asyncio.to_thread(averager.load_state_from_peers)
        if state is None:
            raise AssertionError("hivemind found no state")
        found.append(time.perf_counter() - began)
    pipe.send(found)
    averager.shutdown()
    dht.shutdown()


# ---- all to all ----


def _all_reduce(peers: int, size: int, times: int) -> list[float]:
    """Seconds of each all-reduce: from the moment when all processes begin to the last one's end."""
    pipes, processes = [], []
    for _ in range(peers):
        here, there = WORKERS.Pipe()
        processes.append(WORKERS.Process(target=_in_loop, args=(_reduce_with_others, there, size, times)))
        processes[-1].start()
        pipes.append(here)
    first = pipes[0]
    first.send([])
    names = [first.recv()]
    for pipe in pipes[1:]:
        pipe.send(names[0][1])
        names.append(pipe.recv())
    found = []
    for at in range(times):
        for pipe in pipes:
            pipe.send(([name for name, _ in names], at))
        for pipe in pipes:
            pipe.recv()
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            pipe.recv()
        found.append(time.perf_counter() - began)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return found


async def _reduce_with_others(pipe: Connection, size: int, times: int) -> None:
    from hivemind.averaging.allreduce import AllReduceRunner
    from hivemind.p2p import P2P, PeerID

    p2p = await P2P.create(initial_peers=await _told(pipe), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    pipe.send((p2p.peer_id.to_base58(), [str(maddr) for maddr in await p2p.get_visible_maddrs()]))
    values = torch.randn(size // 4)
    while (told := await _told(pipe)) is not None:
        names, at = told
        order = [PeerID.from_base58(name) for name in names]
        runner = AllReduceRunner(
            p2p=p2p, servicer_type=AllReduceRunner, prefix=f"round-{at}", group_id=str(at).encode(), tensors=[values],
            ordered_peer_ids=order, peer_fractions=tuple(1 / len(order) for _ in order),
        )  # fmt: skip
        await runner.add_p2p_handlers(p2p, namespace=f"round-{at}")
        pipe.send("ready")
        await _told(pipe)
        async for change in runner:
            values += change
        pipe.send("done")
    await p2p.shutdown()


def _our_rounds(peers: int, size: int, times: int) -> tuple[float, int]:
    """(median seconds from the close of a round to its commit on disk, most anonymous memory beyond training's)."""
    from spes_p2p.observe.events import Round
    from spes_p2p.observe.sinks import EventReader
    from spes_p2p.testing.processes import LocalSwarm
    from spes_p2p.testing.quickstart import CONFIG, QuickstartOptions, prepare

    rows = size // 4 // 2 // 512  # embedding and head, with 512 values a row
    overrides = (
        "model.d_model=512", "model.num_heads=8", "model.num_layers=1", "model.expert_ffn=8", "model.num_experts=8",
        f"model.embedding_rows={rows}", "data.sequence_length=32", "data.block_sequences=4", "sync.steps_per_round=1",
        "optimizer.batch_sequences=1", "sync.merge_alpha=0", "sync.tile_values=1048576", "eval.sequences=1",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as folder:
        options = QuickstartOptions(Path(folder) / "swarm", peers, times + 1, overrides=overrides)
        data, _, agreed, local = prepare(options, lambda text: None)
        with LocalSwarm(options.output) as swarm:
            swarm.bootstrap(CONFIG, data, agreed)
            names = [f"peer-{index}" for index in range(peers)]
            running = [swarm.peer(name, data, ["--rounds", str(times + 1), *local]) for name in names]
            memory = _Memory([process.pid for process in running])
            for process in running:
                if process.wait(600.0) != 0:
                    raise SystemExit(f"a peer failed: {process.last_words()}")
            grown = memory.stop()
        seconds = []
        for name in names:
            for _, event in EventReader(options.output / name / "metrics.jsonl").read():
                if isinstance(event, Round) and event.round > 2:
                    seconds.append(sum(value for phase, value in event.seconds.items() if phase != "train"))
    return statistics.median(seconds), grown


class _Memory:
    """Samples the anonymous memory of processes; what they have beyond their usual (their median) counts."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._samples: dict[int, list[int]] = {pid: [] for pid in pids}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            for pid, samples in self._samples.items():
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:  # it has ended
                    continue
                samples += [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        late = [samples[len(samples) // 2 :] for samples in self._samples.values() if len(samples) > 1]
        return max(max(samples) - min(samples) for samples in late)


if __name__ == "__main__":
    main()
