#!/usr/bin/env python3
"""Predicted (`spes-p2p plan`) beside measured peak memory of a training step, for combinations of options. Needs CUDA.

python scripts/bench_memory.py --config spes-1b
python scripts/bench_memory.py --config configs/spes-7b.yaml --owned-experts 8 model.num_layers=8

Each row trains three steps of two micro-batches with random values and reads torch.cuda.max_memory_allocated after the
first, when moments are there. Predicted is what `plan` says without the allocator's losses and CUDA itself. A row whose
prediction does not fit into the GPU is left out, and so are rows of a library that is not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from spes_p2p.peer.options import config_path
from spes_p2p.planning.memory import Memory, Workload, predict
from spes_p2p.planning.options import Options
from spes_p2p.planning.units import GIB
from spes_p2p.testing.training_bench import clean_up, measure, random_batch, random_trainer

MICRO_BATCHES = 2


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("bench_memory.py compares with a GPU's own count and needs one: torch sees no CUDA device here.")
        print("What it would compare, by prediction alone: spes-p2p plan --config", arguments.config)
        return 1
    config = load_config(config_path(arguments.config), arguments.overrides)
    owned = config.swarm.experts_per_peer if arguments.owned_experts is None else arguments.owned_experts
    device, total = torch.device("cuda"), torch.cuda.mem_get_info()[1]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"{config.run.run_id}, {MICRO_BATCHES} micro-batches a step\n")
    print(f"{'predicted':>9} {'measured':>9} {'error':>7}  GiB; columns, options")
    worst = 0.0
    for columns, options in combinations(config, owned):
        label = f"{columns} columns, micro-batch {', '.join(_texts(options))}"
        memory = predict(workload(config, columns, options))
        if memory.total > total:
            print(f"{memory.allocated / GIB:9.2f} {'-':>9} {'-':>7}  {label}: too large for this GPU", flush=True)
            continue
        worst = max(worst, row(config, columns, options, memory, device, label))
    print(f"\nlargest error {worst:.1%}")
    return 0


def combinations(config: Config, owned: int) -> Iterator[tuple[int, Options]]:
    """(columns, options): one option at a time, then together."""
    plain = replace(Options.of(config), activation_checkpointing="none")
    selective, full = (replace(plain, activation_checkpointing=mode) for mode in ("selective", "full"))
    half = replace(plain, micro_batch_sequences=max(1, plain.micro_batch_sequences // 2))
    experts = config.model.num_experts
    yield from [(owned, plain), (owned, selective), (owned, full), (owned, half)]
    yield from [(0, plain), (experts, full), (max(1, owned // 2), selective)]
    yield owned, replace(plain, gradient_dtype="bf16")
    yield owned, replace(plain, optimizer="adamw8bit")
    yield owned, replace(full, optimizer="adamw8bit", gradient_dtype="bf16")
    yield owned, replace(plain, foreign_dtype="int8")
    yield owned, replace(full, foreign_dtype="fp8")
    yield owned, replace(full, foreign_offload=True)
    yield owned, replace(selective, foreign_dtype="int8", foreign_offload=True, gradient_dtype="bf16")
    yield owned, replace(full, micro_batch_sequences=2 * plain.micro_batch_sequences)


def workload(config: Config, columns: int, options: Options) -> Workload:
    return Workload.of(batched(config, options), columns)


def batched(config: Config, options: Options) -> Config:
    """`config` with these options and a step of a few micro-batches."""
    config = options.applied(config)
    size = MICRO_BATCHES * options.micro_batch_sequences
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"batch_sequences": size})})


def row(config: Config, columns: int, options: Options, memory: Memory, device: torch.device, label: str) -> float:
    """Measures and prints one; the error as a share of what was measured."""
    measured, trouble = 0, ""
    try:
        measured = peak_bytes(batched(config, options), columns, device)
    except ConfigError as error:
        trouble = str(error)
    except torch.OutOfMemoryError:
        trouble = "out of memory"
    clean_up(device)  # out here nothing holds what failed
    if trouble:
        print(f"{memory.allocated / GIB:9.2f} {'-':>9} {'-':>7}  {label}: {trouble}", flush=True)
        return 0.0
    off = memory.allocated / measured - 1
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items())
    print(f"{memory.allocated / GIB:9.2f} {measured / GIB:9.2f} {off:+7.1%}  {label}", flush=True)
    print(f"{'':29}at {memory.moment}: {parts}", flush=True)
    return abs(off)


def peak_bytes(config: Config, columns: int, device: torch.device) -> int:
    trainer, batch = random_trainer(config, columns, device), random_batch(config)
    return measure(lambda: trainer.train_step(batch), device, repeats=2, warm_up=1).peak_bytes


def _texts(options: Options) -> Iterator[str]:
    yield str(options.micro_batch_sequences)
    yield from (change.rpartition(".")[2] for change in options.changes(Options(options.micro_batch_sequences)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("spes-1b"), help="YAML file, or a name such as spes-1b")
    parser.add_argument("--owned-experts", type=int, help="columns (default: swarm.experts_per_peer)")
    parser.add_argument("overrides", nargs="*", help="such as model.num_layers=8")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
