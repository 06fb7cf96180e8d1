#!/usr/bin/env python3
"""How fast bytes move: our streams and our whole sync beside raw TCP and hivemind, on loopback, in one run.

    python scripts/bench_transfer.py --mib 128 --peers 4

One to one: tiles that are checked by hash, beside plain TCP and `load_state_from_peers`. All to all: a round of real
peers that exchange shared parameters, from the moment when the last of them has trained to the last one's commit on
disk (with votes, hashes and files), beside `AllReduceRunner` for a tensor of the same size with as many processes, from
the moment when all begin to the last one's end (which leaves the values in memory, and agrees on nothing). Both move
every value 2 (n - 1) / n times from each peer, by libp2p daemons of the same kind. Memory is what a peer's process and
its daemon took at most in the sync beyond what they had right before it: values, gradients and moments do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

MIB = 2**20
WIDTH = 512
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
    state = _best(_pair(_serve_state, _ask_state, size, arguments.rounds))
    _row("hivemind load_state_from_peers", size / state, None)
    tiles = _best(_pair(_serve_tiles, _ask_tiles, size, arguments.rounds))
    _row("our tiles, checked by hash", size / tiles, size / state)

    peers = arguments.peers
    moved = 2 * (peers - 1) * size
    print(
        f"\n{peers} peers average {arguments.mib} MiB each, by the formula {moved / peers / MIB:.1f} MiB up for each:"
    )
    theirs = _all_reduce(peers, size, arguments.rounds)[1:]
    reference = moved / statistics.median(found.seconds for found in theirs)
    _row("hivemind AllReduceRunner", reference, None)
    _costs(theirs, moved)
    ours = _our_rounds(peers, size, arguments.rounds)
    rate = moved / statistics.median(found.seconds for found in ours)
    _row("our round: trained to commit on disk", rate, reference)
    _costs(ours, moved)
    up = statistics.median(found.sent for found in ours) / peers / MIB
    print(f"  of {len(ours)} rounds; {up:.1f} MiB up for each peer, messages and columns among them")
    memory = max(found.memory for found in ours) / MIB
    print(f"  memory of a peer in the sync beyond that right before it: {memory:.0f} MiB (target: below 128)")


def _row(what: str, rate: float, reference: float | None) -> None:
    beside = "" if reference is None else f"  {rate / reference:5.2f} times hivemind's"
    print(f"  {what:36} {rate / MIB:7.0f} MiB/s{beside}", flush=True)


def _costs(found: Sequence[_Cost], moved: int) -> None:
    python, daemon = (statistics.median(getattr(cost, name) for cost in found) for name in ("python", "daemon"))
    per = 1000 * MIB / moved
    print(
        f"    processor: {python * per:.1f} ms a MiB in Python, {daemon * per:.1f} in the libp2p daemons, of all peers"
    )


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

    return await HivemindNetwork.start(initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",))


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


@dataclass(frozen=True)
class _Cost:
    """Of one round, all peers together: wall time, processor time, bytes up, and of one peer at most memory."""

    seconds: float
    python: float
    daemon: float
    sent: int = 0
    memory: int = 0


def _all_reduce(peers: int, size: int, times: int) -> list[_Cost]:
    """Each all-reduce, from the moment when all processes begin to the last one's end."""
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
    watch, spans = _Watch([process.pid for process in processes if process.pid]), []
    for at in range(times):
        for pipe in pipes:
            pipe.send(([name for name, _ in names], at))
        for pipe in pipes:
            pipe.recv()
        began = time.time()
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            pipe.recv()
        spans.append((began, time.time()))
    watch.stop()
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return [_Cost(end - began, *watch.processor(began, end)) for began, end in spans]


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


def _our_rounds(peers: int, size: int, times: int) -> list[_Cost]:
    """Each round that counted everybody, without the first two, from the last READY to the last commit on disk."""
    from spes_p2p.observe.events import Round
    from spes_p2p.observe.sinks import EventReader
    from spes_p2p.quickstart.first_run import CONFIG, QuickstartOptions, prepare
    from spes_p2p.quickstart.processes import LocalSwarm

    others = 4 * WIDTH * WIDTH + (8 + 3) * WIDTH  # attention, router, norms
    rows = (size // 4 - others) // 2 // WIDTH  # embedding and head
    overrides = (
        f"model.d_model={WIDTH}", "model.num_heads=8", "model.num_layers=1", "model.expert_ffn=8",
        "model.num_experts=8", f"model.embedding_rows={rows}", "data.sequence_length=32", "data.block_sequences=4",
        "sync.steps_per_round=1", "optimizer.batch_sequences=1", "sync.merge_alpha=0", "sync.tile_values=1048576",
        "eval.sequences=1",
    )  # fmt: skip
    rounds = times + 1
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as folder:
        options = QuickstartOptions(Path(folder) / "swarm", peers, rounds, overrides=overrides)
        data, _, agreed, local = prepare(options, lambda text: None)
        with LocalSwarm(options.output) as swarm:
            swarm.bootstrap(CONFIG, data, agreed)
            names = [f"peer-{index}" for index in range(peers)]
            running = [swarm.peer(name, data, ["--until-round", str(rounds), *local]) for name in names]
            watch = _Watch([process.pid for process in running])
            for process in running:
                if process.wait(600.0) != 0:
                    raise SystemExit(f"a peer failed: {process.last_words()}")
            watch.stop()
        spans: dict[int, list[tuple[int, float, float, int]]] = {}
        for name, process in zip(names, running, strict=True):
            for at, event in EventReader(options.output / name / "metrics.jsonl").read():
                if isinstance(event, Round) and event.round > 2 and event.roster_size == peers:
                    ready = at - sum(value for phase, value in event.seconds.items() if phase != "train")
                    spans.setdefault(event.round, []).append((process.pid, ready, at, event.bytes_sent))
    found = []
    for span in (span for span in spans.values() if len(span) == peers):
        began, end = max(ready for _, ready, _, _ in span), max(at for _, _, at, _ in span)
        memory = max(watch.growth(pid, ready, at) for pid, ready, at, _ in span)
        sent = sum(sent for _, _, _, sent in span)
        found.append(_Cost(end - began, *watch.processor(began, end), sent, memory))
    if not found:
        raise SystemExit("no round counted everybody: try again, or with more --until-round")
    return found


class _Watch:
    """Samples processes and the daemons that they started: anonymous memory, processor time."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._peers = {pid: psutil.Process(pid) for pid in pids}
        self._samples: list[tuple[float, dict[int, _Sample]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        looks = 0
        families: dict[int, list[psutil.Process]] = {}
        while not self._ended.wait(0.02):
            if looks % 25 == 0:
                families = {pid: _family(peer) for pid, peer in self._peers.items()}
            looks += 1
            self._samples.append((time.time(), {pid: _sample(family) for pid, family in families.items()}))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self, pid: int, began: float, end: float) -> int:
        """Bytes of memory, at most, beyond those at the last look before."""
        before = [samples[pid].memory for at, samples in self._samples if at <= began][-1]
        return max((samples[pid].memory - before for at, samples in self._samples if began < at <= end), default=0)

    def processor(self, began: float, end: float) -> tuple[float, float]:
        """Seconds of all, (Python, daemons)."""
        first = [samples for at, samples in self._samples if at <= began][-1]
        last = next((samples for at, samples in self._samples if at >= end), self._samples[-1][1])
        python = sum(last[pid].python - first[pid].python for pid in self._peers)
        return python, sum(last[pid].daemon - first[pid].daemon for pid in self._peers)


class _Sample(NamedTuple):
    memory: int
    python: float
    daemon: float


def _family(peer: psutil.Process) -> list[psutil.Process]:
    try:
        return [peer, *(child for child in peer.children() if child.name() == "p2pd")]
    except psutil.Error:  # it has ended
        return []


def _sample(family: Sequence[psutil.Process]) -> _Sample:
    memory, spent = 0, [0.0, 0.0]
    for at, process in enumerate(family):
        try:
            usage = process.memory_info()
            memory += usage.rss - usage.shared  # without what is mapped from files
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        spent[at > 0] += times.user + times.system
    return _Sample(memory, *spent)


if __name__ == "__main__":
    main()
