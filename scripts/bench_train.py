#!/usr/bin/env python3
"""A whole training step on one GPU: tokens/s, MFU and peak memory, beside transformers and beside owning everything.

python scripts/bench_train.py --config spes-1b
python scripts/bench_train.py --config spes-7b --micro-batches 4 model.activation_checkpointing=selective
python scripts/bench_train.py --config spes-1b --only ours --profile 20

Rows: ours with the columns of a peer, plain and with model.torch_compile; ours with all columns (what DiLoCo needs of
each peer); transformers' model of the same shape, trained plainly: fp32 weights, bf16 autocast, fused AdamW,
load-balancing loss, gradients clipped. A step is --micro-batches micro-batches and one update, with random tokens and
values. MFU counts the arithmetic that a row needs (`planning.sizes.flops_per_token`: weight gradients of owned experts
alone, nothing that is recomputed) over the GPU's dense bf16 peak. A row that does not fit says so.
Times are medians. Without a GPU, and with --tiny, a small shape runs on the CPU, for the comparison alone. --json: one
object a row. --profile N: after the time of a step also the N kernels that take most of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from spes_p2p.config.load import bundled_config, config_from_text, config_to_yaml, load_config
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError, first_line
from spes_p2p.interop.hf import hf_config
from spes_p2p.peer.devices import choose_device
from spes_p2p.planning.gpus import GPUS
from spes_p2p.planning.memory import Workload, predict
from spes_p2p.planning.sizes import flops_per_token
from spes_p2p.planning.units import GIB
from tests.simulation.training_bench import clean_up, measure, profiled, random_batch, random_trainer

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
    device = choose_device("cpu" if arguments.tiny else "auto")
    config = _config(arguments, device)
    owned = config.swarm.experts_per_peer if arguments.experts_per_peer is None else arguments.experts_per_peer
    peak = _peak_flops(arguments.peak_tflops, device)
    if not arguments.json:
        _heading(config, device)
    everything = config.model.num_experts
    config, compiled = (
        config_from_text(config_to_yaml(config), [f"model.torch_compile={wanted}"]) for wanted in ("false", "true")
    )
    rows: dict[str, tuple[str, int, Callable[[], Step]]] = {
        "ours": (f"ours, {owned} of {everything} columns", owned, partial(ours, config, owned, device)),
        "compiled": (f"ours, {owned} of {everything} columns, compiled", owned, partial(ours, compiled, owned, device)),
        "everything": ("ours, all columns (DiLoCo)", everything, partial(ours, config, everything, device)),
        "transformers": ("transformers, all trained", everything, partial(theirs, config, device)),
    }
    for key in arguments.only:
        label, columns, build = rows[key]
        planned = 0 if key == "transformers" else predict(Workload.of(config, columns)).allocated
        found: dict[str, Any] = {
            "bench": "train", "run": config.run.run_id, "what": label, "overrides": arguments.overrides,
            "micro_batch_sequences": config.optimizer.micro_batch_sequences, "planned_bytes": planned,
        }  # fmt: skip
        try:
            step = build()
            found |= _row(config, columns, step, device, peak, arguments.repeats)
            if arguments.profile:
                top = profiled(step, device)
                found |= {"busy_milliseconds": sum(took for _, took, _ in top), "top": top[: arguments.profile]}
        except torch.OutOfMemoryError:
            found["failed"] = "out of memory"
        except (ConfigError, ImportError, RuntimeError, TypeError, ValueError) as error:
            found["failed"] = f"does not run here: {first_line(error)}"
        print(json.dumps(found) if arguments.json else _line(found), flush=True)
        clean_up(device)
    return 0


def _heading(config: Config, device: torch.device) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if device.type == "cpu":
        print("no GPU here: a small shape on the CPU, for the comparison alone. Figures need one GPU: --config spes-1b")
    micro, length = config.optimizer.micro_batch_sequences, config.data.sequence_length
    count = config.optimizer.batch_sequences // micro
    print(f"{config.run.run_id}: {count} micro-batches of {micro} x {length} tokens a step\n")
    print(f"{'':34}{'tokens/s':>10}{'ms/step':>10}{'MFU':>7}{'peak GiB':>10}{'planned':>9}")


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
    config: Config, owned: int, step: Step, device: torch.device, peak_flops: float | None, repeats: int
) -> dict[str, Any]:
    measured = measure(step, device, repeats)
    speed = config.optimizer.batch_sequences * config.data.sequence_length / measured.seconds
    used = speed * flops_per_token(config.model, config.data.sequence_length, owned)
    return {
        "tokens_per_second": speed, "milliseconds": 1000 * measured.seconds, "tflops": used / 1e12,
        "mfu": used / peak_flops if peak_flops else None, "peak_bytes": measured.peak_bytes,
    }  # fmt: skip


def _line(found: dict[str, Any]) -> str:
    label = f"{found['what']:34}"
    if "failed" in found:
        return f"{label}{found['failed']}"
    mfu = f"{found['mfu']:7.1%}" if found["mfu"] else f"{'-':>7}"
    sizes = found["peak_bytes"], found["planned_bytes"]
    peak, planned = (f"{size / GIB:.2f}" if found["peak_bytes"] else "-" for size in sizes)
    line = f"{label}{found['tokens_per_second']:10,.0f}{found['milliseconds']:10.1f}{mfu}{peak:>10}{planned:>9}"
    if "top" in found:
        line += f"\n{found['busy_milliseconds']:10.3f} ms of a step in kernels; most of it:"
        line += "".join(f"\n{took:10.3f} ms {calls:6} x {name}" for name, took, calls in found["top"])
    return line


def _config(arguments: argparse.Namespace, device: torch.device) -> Config:
    """With a step of --micro-batches, whatever the run's batch is."""
    overrides = [*(CPU_SHAPE if device.type == "cpu" else ()), *arguments.overrides]
    config = load_config(_path(arguments.config), overrides)
    size = arguments.micro_batches * config.optimizer.micro_batch_sequences
    return load_config(_path(arguments.config), [*overrides, f"optimizer.batch_sequences={size}"])


def _path(given: Path) -> Path:
    return given if given.suffix else bundled_config(str(given))


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
    parser.add_argument("--experts-per-peer", type=int, help="columns of a peer (default: swarm.experts_per_peer)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one step (default 8)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of a GPU that is not known by name")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="the N kernels that take most of a step")
    parser.add_argument("--tiny", action="store_true", help="the small shape, on the CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("overrides", nargs="*", help="such as model.activation_checkpointing=selective")
    return parser.parse_intermixed_args()  # options stand between overrides in scripts/bench_gpu.py


if __name__ == "__main__":
    sys.exit(main())
