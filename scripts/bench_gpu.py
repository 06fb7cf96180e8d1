#!/usr/bin/env python3
"""Everything that is worth measuring on a borrowed GPU, in the order of its worth, in one command without network.

python scripts/bench_gpu.py --minutes 8 --out gpu.jsonl
python scripts/bench_gpu.py --tiny --out tiny.jsonl    # small shapes on the CPU: whether it would run at all

The machine; the tests marked gpu or kernels, and each kernel's equality at real shapes; the MoE layer beside its
baselines; training steps by micro-batch, eager and compiled; what a step spends its time on; other shapes and routings;
memory beside `spes-p2p plan`. Each row is a process of its own with a time limit, and a JSON object is written as soon
as there is one, so that whatever breaks or ends early takes nothing else with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GPU_FIELDS = (
    "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
)
LEAST_SECONDS = 5.0
"""A row is not begun with less than that left."""
VERSIONS = """
import importlib.metadata as metadata, json, platform, sys, torch
names = "torch", "triton", "transformers", "bitsandbytes", "megablocks", "quack", "numpy", "pydantic"
found = {name: metadata.version(name) for name in names if any(metadata.packages_distributions().get(name, ()))}
gpu = torch.cuda.is_available()
print(json.dumps({
    "bench": "machine", "python": sys.version.split()[0], "system": platform.platform(), "versions": found,
    "cuda": torch.version.cuda, "capability": torch.cuda.get_device_capability() if gpu else None,
}))
"""
COPIES = """
import json, time, torch
host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
ways = ("host to device", device, host), ("device to host", host, device), ("on the device", device, device.clone())
for what, to, of in ways:
    to.copy_(of)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        to.copy_(of, non_blocking=True)
    torch.cuda.synchronize()
    print(json.dumps({"bench": "copy", "what": what, "gib_per_second": 5 / (time.perf_counter() - started)}))
"""


@dataclass(frozen=True)
class Row:
    name: str
    arguments: tuple[str, ...]
    """Of Python."""
    seconds: float = 60.0
    """At most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="in all (default 8)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, written row by row")
    parser.add_argument("--only", default="", help="rows whose names begin with this")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    with open(arguments.out, "a", encoding="utf-8") as out:
        write(out, {"row": "begin", "commit": commit(), "argv": sys.argv[1:], "gpu": gpu_state()})
        for row in tiny_rows() if arguments.tiny else gpu_rows():
            if not row.name.startswith(arguments.only):
                continue
            limit = min(row.seconds, end - time.monotonic())
            if limit < LEAST_SECONDS:
                write(out, {"row": row.name, "failed": "no time left"})
                continue
            for found in results(row, limit, arguments.tiny):
                write(out, found)
    return 0


def write(out: Any, found: dict[str, Any]) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    out.write(line + "\n")
    out.flush()
    os.fsync(out.fileno())


def results(row: Row, limit: float, tiny: bool) -> Iterator[dict[str, Any]]:
    """What a row prints, then how it ended and the state of the GPU right after it."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, *row.arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        timer = threading.Timer(limit, _kill, (process.pid,))
        timer.start()
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield {"row": row.name, **found}
        code = process.wait()
        late = not timer.is_alive()
        timer.cancel()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    ended: dict[str, Any] = {"row": row.name, "bench": "end", "seconds": round(time.monotonic() - started, 1)}
    if code:
        reason = f"stopped after {limit:.0f} s" if late else f"exit code {code}"
        ended["failed"] = ": ".join([reason, *said[-1:]])
    if row.name == "tests":
        ended["said"] = last
    yield ended | {"notes": said[-5:], "gpu": gpu_state()}


def _kill(process: int) -> None:
    """The row's process and all that it has started."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # ended in this moment
        return


def commit() -> str:
    """Of this clone; what was carried along without Git says so in COMMIT."""
    carried = ROOT / "COMMIT"
    if carried.exists():
        return carried.read_text().strip()
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def gpu_state() -> dict[str, str]:
    """Driver, clocks and power by nvidia-smi; nothing where there is none."""
    try:
        command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GPU_FIELDS.split(","), map(str.strip, done.stdout.splitlines()[0].split(","))))


def moe(*arguments: str) -> tuple[str, ...]:
    return "scripts/bench_moe.py", "--json", *arguments


def train(config: str, *arguments: str) -> tuple[str, ...]:
    return "scripts/bench_train.py", "--json", "--config", config, *arguments


def memory(*overrides: str) -> tuple[str, ...]:
    return train("spes-1b", "--only", "ours", "--micro-batches", "2", "--repeats", "2", *overrides)


def gpu_rows() -> Iterator[Row]:
    """In the order of their worth."""
    sequences, none = "optimizer.micro_batch_sequences", "model.activation_checkpointing=none"
    fast = ("--only", "ours", "--micro-batches", "4", "--repeats", "3", none)
    compiled = ("--only", "compiled", *fast[2:])
    yield Row("machine", ("-c", VERSIONS))
    yield Row("kernels", ("scripts/bench_kernels.py",), 120)
    yield Row("tests", ("-m", "pytest", "-q", "-m", "gpu or kernels", "-p", "no:cacheprovider", *GPU_TESTS), 120)
    yield Row("moe reference", moe("--shapes", "reference", "--owned", "1/4", "--only", "ours", "replica", "dense"))
    for micro in (4, 8, 2):
        yield Row(f"train 7b {micro}", train("spes-7b", *fast, f"{sequences}={micro}"), 75)
    yield Row("train 7b 4 compiled", train("spes-7b", *compiled, f"{sequences}=4"), 120)
    yield Row("profile 7b", train("spes-7b", *fast, "--profile", "20", f"{sequences}=4"), 90)
    for micro in (8, 16):
        yield Row(f"train 1b {micro}", train("spes-1b", *fast, f"{sequences}={micro}"))
    yield Row("train 1b 8 compiled", train("spes-1b", *compiled, f"{sequences}=8"), 120)
    yield Row("profile 7b compiled", train("spes-7b", *compiled, "--profile", "20", f"{sequences}=4"), 120)
    yield Row("moe quantised", moe("--shapes", "reference", "--owned", "1/4", "--only", "quantised"))
    yield Row("copies", ("-c", COPIES), 30)
    for routing in ("skewed", "empty"):
        arguments = "--shapes", "reference", "--owned", "1/4", "--only", "ours", "replica", "--routing", routing
        yield Row(f"moe {routing}", moe(*arguments))
    for shape in ("one-sequence", "spes-1b", "spes-9b"):
        yield Row(f"moe {shape}", moe("--shapes", shape, "--owned", "1", "1/4", "--only", "ours", "replica"), 90)
    yield Row("moe others", moe("--shapes", "reference", "--owned", "1", "--only", "transformers", "megablocks"))
    yield from memory_rows()
    yield Row("train 9b", train("spes-9b", *fast, f"{sequences}=2"), 75)
    yield Row("train 1b others", train("spes-1b", "--only", "everything", "transformers", "--repeats", "3"), 120)


GPU_TESTS = (
    "tests/experts/test_backends.py",
    "tests/experts/test_bank.py",
    "tests/experts/test_dispatch.py",
    "tests/experts/test_quantise.py",
    "tests/experts/test_swiglu.py",
    "tests/model/test_softmax_loss.py",
    "tests/model/test_transformer.py",
    "tests/train/test_trainer.py",
)


def memory_rows() -> Iterator[Row]:
    """One option at a time, then together: each prints what was measured beside what `plan` says."""
    checkpointing, sequences = "model.activation_checkpointing", "optimizer.micro_batch_sequences"
    muon, int8, nf4 = "optimizer.name=muon", "model.foreign_dtype=int8", "model.foreign_dtype=nf4"
    none, selective, full = (f"{checkpointing}={mode}" for mode in ("none", "selective", "full"))
    settings = (
        (none,), (selective,), (full,), (none, f"{sequences}=4"), (full, f"{sequences}=16"), (none, muon),
        (full, muon), (none, int8), (full, int8), (none, nf4), (selective, nf4), (full, nf4, muon),
        (full, nf4, muon, "--experts-per-peer", "1"), (none, "--experts-per-peer", "0"),
        (full, "--experts-per-peer", "16"),
    )  # fmt: skip
    for setting in settings:
        yield Row(f"memory {' '.join(part.rpartition('.')[2] for part in setting)}", memory(*setting), 40)


def tiny_rows() -> Iterator[Row]:
    """One row of each kind."""
    fast = ("--only", "ours", "--tiny", "--micro-batches", "1", "--repeats", "1")
    yield Row("machine", ("-c", VERSIONS))
    yield Row("kernels", ("scripts/bench_kernels.py", "--tiny"), 120)
    yield Row("tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", GPU_TESTS[0]), 120)
    yield Row("moe", moe("--tiny", "--repeats", "1", "--owned", "1/4", "--only", "ours", "replica", "quantised"), 120)
    yield Row("train", train("spes-1b", *fast), 120)
    yield Row("profile", train("spes-1b", *fast, "--profile", "20"), 120)
    yield Row("memory", train("spes-1b", *fast, "optimizer.name=muon"), 120)


if __name__ == "__main__":
    sys.exit(main())
