#!/usr/bin/env python3
"""What a codec, handing columns out less often, or a setting that saves memory costs in loss, paired by seed.

    python scripts/bench_sync_quality.py                                # every codec, and pairs of periods
    python scripts/bench_sync_quality.py --only fp32 int8 "int8, 10 and 50" --seeds 5

Real training and the real exchange of --peers peers in one process, on the in-memory network and the virtual clock.
A row is a codec with H = 20 and columns handed out every round, or "CODEC, A and B": shared parameters every A steps,
columns every B; what follows " with " are settings of every peer, KEY=VALUE. Of each seed
(initial values and order of data) the held-out loss in the end is compared with that of fp32 at H = 20: the mean
difference in percent, with its 95% interval over the seeds (Student's t). Bytes are what one peer sends in a whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import ConfigError
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.peer.options import config_path
from tests.simulation.memory_swarm import MemorySwarm
from tests.simulation.pretend_peer import PretendWork
from tests.simulation.training_swarm import TrainerOf, held_out_loss
from tests.simulation.virtual_time import run_virtual

REFERENCE = "fp32"
ROWS = (
    "fp32", "bf16", "int8", "int4", "ternary",
    "fp32, 10 and 50", "fp32, 20 and 80", "fp32, 50 and 50",
    "int8, 5 and 50", "int4, 5 and 50", "fp32 with model.foreign_dtype=int8", "fp32 with model.foreign_dtype=nf4",
)  # fmt: skip
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95% points of Student's t for so many seeds."""
FEW = ("sync.tile_values=65536", "eval.every_rounds=0")


@dataclass(frozen=True)
class Result:
    loss: float
    bytes_sent: float
    """By one peer, on average."""
    seconds: float


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or _made_data(folder)
        rows = [REFERENCE, *(row for row in arguments.only if row != REFERENCE)]
        found: dict[str, list[Result]] = {row: [] for row in rows}
        for seed in range(arguments.seeds):
            for row in rows:
                result = _run(_config(arguments, row, seed, data), arguments, folder / f"{seed} {row}", device)
                found[row].append(result)
                print(f"seed {seed}: {row:18} loss {result.loss:.4f} ({result.seconds:.0f} s)", flush=True)
    print(f"\n{arguments.config}: {arguments.peers} peers, {arguments.steps} steps, {arguments.seeds} seeds")
    width = max(map(len, rows))
    print(f"{'codec, periods':{width}}{'loss':>9}{'against fp32':>24}{'sent':>12}{'of fp32':>9}")
    base = mean(result.bytes_sent for result in found[REFERENCE])
    for row, results in found.items():
        sent = mean(result.bytes_sent for result in results)
        print(
            f"{row:{width}}{mean(result.loss for result in results):9.4f}{_difference(results, found[REFERENCE]):>24}"
            f"{bytes_text(sent):>12}{sent / base:9.1%}"
        )


def _difference(results: Sequence[Result], reference: Sequence[Result]) -> str:
    """Mean of the paired differences in percent, and half the width of its 95% interval."""
    differences = [100 * (one.loss / other.loss - 1) for one, other in zip(results, reference, strict=True)]
    if len(differences) < 2:
        return f"{differences[0]:+.2f}%"
    half = T_95.get(len(differences), 2.0) * stdev(differences) / math.sqrt(len(differences))
    return f"{mean(differences):+.2f}% +- {half:.2f}"


def _run(config: Config, arguments: argparse.Namespace, folder: Path, device: torch.device) -> Result:
    dataset, started = open_dataset(config), time.perf_counter()

    async def play() -> Result:
        swarm = MemorySwarm(config, folder)
        await swarm.start_organiser()
        names = [f"p{index}" for index in range(arguments.peers)]
        works = [PretendWork(learner=TrainerOf(config, dataset, device), finishes_steps=True) for _ in names]
        await asyncio.gather(*map(swarm.add, names, works))  # the run begins when all have come
        while swarm.up[0].driver.core.tip.step < arguments.steps:
            await swarm.until_round(swarm.up[0].round + 1)
        tip = swarm.up[0].driver.core.tip
        loss = held_out_loss(config, dataset, swarm.up[0].store.version(tip.round), arguments.sequences, device)
        sent = mean(swarm.network.peer(life.name).transport.traffic.sent for life in swarm.up)
        await swarm.stop()
        return Result(loss, sent, time.perf_counter() - started)

    return run_virtual(play(), max_virtual_seconds=10**6)


def _config(arguments: argparse.Namespace, row: str, seed: int, data: Path) -> Config:
    row, _, settings = row.partition(" with ")
    codec, _, periods = row.partition(", ")
    shared, _, columns = (periods or "20 and 20").partition(" and ")
    if int(columns) % int(shared):
        raise ConfigError(f"{row!r}: columns every {columns} steps is no multiple of {shared}", fix="choose another")
    overrides = [
        *FEW,
        f"data.path={data}",
        f"run.seed={seed}",
        f"sync.codec={codec}",
        f"sync.steps_per_round={shared}",
        f"sync.expert_rounds={int(columns) // int(shared)}",
        f"swarm.min_peers={arguments.peers}",
        *settings.split(),
        *arguments.overrides,
    ]
    return load_config(config_path(arguments.config), overrides)


def _made_data(folder: Path) -> Path:
    build_stdlib_corpus(folder / "corpus", 16 * 10**6)
    tokenize([str(folder / "corpus" / "*.jsonl")], folder / "tokens", TokenizeOptions())
    return folder / "tokens"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("tiny"), help="YAML file, or a name such as small")
    parser.add_argument("--data", type=Path, help="token shards (default: bytes of the standard library's sources)")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=256, help="held-out sequences of the loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("overrides", nargs="*", default=[], help="after --, such as model.num_layers=2")
    return parser.parse_args()


if __name__ == "__main__":
    main()
