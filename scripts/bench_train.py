#!/usr/bin/env python3
"""A whole training step on one GPU: tokens/s, MFU and peak memory, beside transformers and beside owning everything.

python scripts/bench_train.py --config spes-1b
python scripts/bench_train.py --config spes-7b --micro-batches 4 model.activation_checkpointing=selective
python scripts/bench_train.py --config spes-1b --only ours

Rows: ours with the columns of a peer, plain and with model.torch_compile; ours with all columns (what DiLoCo needs of
each peer); transformers' model of the same shape, trained plainly: fp32 weights, bf16 autocast, fused AdamW,
load-balancing loss, gradients clipped. A step is --micro-batches micro-batches and one update, with random tokens and
values. MFU counts the arithmetic that a row needs (`planning.sizes.flops_per_token`: weight gradients of owned experts
alone, nothing that is recomputed) over the GPU's dense bf16 peak. A row that does not fit says so.
Without a GPU a small shape runs on the CPU, for the comparison alone.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spes_p2p.config.load import config_from_text, config_to_yaml, load_config
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from spes_p2p.interop.hf import hf_config
from spes_p2p.peer.options import config_path
from spes_p2p.planning.gpus import GPUS
from spes_p2p.planning.memory import Workload, predict
from spes_p2p.planning.sizes import flops_per_token
from spes_p2p.planning.units import GIB
from spes_p2p.testing.training_bench import clean_up, measure, random_batch, random_trainer

CPU_SHAPE = (
    "model.num_layers=2",
    "model.d_model=128",
    "model.num_heads=4",
    "model.expert_ffn=128",
    "model.vocab_size=1000",
    "model.activation_checkpointing=none",
    "data.sequence_length=64",
    "optimizer.micro_batch_sequences=2",
)
ROWS = ("ours", "compiled", "everything", "transformers")
Step = Callable[[], object]


def main() -> int:
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = _config(arguments, device)
    owned = config.swarm.experts_per_peer if arguments.owned_experts is None else arguments.owned_experts
    peak = _peak_flops(arguments.peak_tflops, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if device.type == "cpu":
        print("no GPU here: a small shape on the CPU, for the comparison alone. Figures need one GPU: --config spes-1b")
    micro, length = config.optimizer.micro_batch_sequences, config.data.sequence_length
    print(f"{config.run.run_id}: {arguments.micro_batches} micro-batches of {micro} x {length} tokens a step\n")
    print(f"{'':34}{'tokens/s':>10}{'ms/step':>10}{'MFU':>7}{'peak GiB':>10}{'planned':>9}")
    everything = config.model.num_experts
    compiled = config_from_text(config_to_yaml(config), ["model.torch_compile=true"])
    rows: dict[str, tuple[str, int, Callable[[], Step]]] = {
        "ours": (f"ours, {owned} of {everything} columns", owned, partial(ours, config, owned, device)),
        "compiled": (f"ours, {owned} of {everything} columns, compiled", owned, partial(ours, compiled, owned, device)),
        "everything": ("ours, all columns (DiLoCo)", everything, partial(ours, config, everything, device)),
        "transformers": ("transformers, all trained", everything, partial(theirs, config, device)),
    }
    for key in arguments.only:
        label, columns, build = rows[key]
        planned = 0 if key == "transformers" else predict(Workload.of(config, columns)).allocated
        try:
            _row(config, label, columns, build, planned, device, peak, arguments.repeats)
        except torch.OutOfMemoryError:
            print(f"{label:34}out of memory", flush=True)
        except (ConfigError, ImportError, RuntimeError, TypeError, ValueError) as error:
            print(f"{label:34}does not run here: {str(error).splitlines()[0]}", flush=True)
        clean_up(device)
    return 0


def ours(config: Config, owned: int, device: torch.device) -> Step:
    """One inner step as `join` makes it."""
    trainer, batch = random_trainer(config, owned, device), random_batch(config)
    return lambda: trainer.train_step(batch)


def theirs(config: Config, device: torch.device) -> Step:
    """A plain loop over transformers' model."""
    from transformers import AutoModelForCausalLM

    settings, optimizer = hf_config(config.model, config.data.sequence_length), config.optimizer
    settings.output_router_logits, settings.use_cache = True, False
    with device:
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")
    if device.type == "cuda":
        _let_experts_run_in_bf16()
    if config.model.activation_checkpointing == "full":
        model.gradient_checkpointing_enable()
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=optimizer.lr, betas=optimizer.betas, fused=True)
    parts = torch.from_numpy(random_batch(config).tokens).to(device).split(optimizer.micro_batch_sequences)

    def step() -> None:
        for tokens in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def _let_experts_run_in_bf16() -> None:
    """autocast does not know grouped_mm, so that fp32 weights would take torch's slow way (pytorch issue 174763)."""
    import torch.nn.functional as F
    from transformers.integrations import moe

    moe._grouped_mm = lambda rows, weights, offs: F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=offs)


def _row(
    config: Config,
    label: str,
    owned: int,
    build: Callable[[], Step],
    planned: int,
    device: torch.device,
    peak_flops: float | None,
    repeats: int,
) -> None:
    measured = measure(build(), device, repeats)
    tokens = config.optimizer.batch_sequences * config.data.sequence_length
    speed = tokens / measured.seconds
    used = speed * flops_per_token(config.model, config.data.sequence_length, owned)
    mfu = f"{used / peak_flops:7.1%}" if peak_flops else f"{'-':>7}"
    peak = f"{measured.peak_bytes / GIB:10.2f}" if measured.peak_bytes else f"{'-':>10}"
    plan = f"{planned / GIB:9.2f}" if planned and measured.peak_bytes else f"{'-':>9}"
    print(f"{label:34}{speed:10,.0f}{1000 * measured.seconds:10.1f}{mfu}{peak}{plan}", flush=True)


def _config(arguments: argparse.Namespace, device: torch.device) -> Config:
    """With a step of --micro-batches, whatever the run's batch is."""
    overrides = [*(CPU_SHAPE if device.type == "cpu" else ()), *arguments.overrides]
    config = load_config(config_path(arguments.config), overrides)
    size = arguments.micro_batches * config.optimizer.micro_batch_sequences
    return load_config(config_path(arguments.config), [*overrides, f"optimizer.batch_sequences={size}"])


def _peak_flops(tflops: float | None, device: torch.device) -> float | None:
    """As given, else by the GPU's name; None where it is not known."""
    if tflops is not None:
        return tflops * 1e12
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name().replace(" ", "").upper()
    return next((gpu.peak_flops for key, gpu in reversed(GPUS.items()) if key.split("-")[0] in name), None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("spes-1b"), help="YAML file, or a name such as spes-1b")
    parser.add_argument("--owned-experts", type=int, help="columns of a peer (default: swarm.experts_per_peer)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one step (default 8)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; the fastest counts")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of a GPU that is not known by name")
    parser.add_argument("overrides", nargs="*", help="such as model.activation_checkpointing=selective")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
