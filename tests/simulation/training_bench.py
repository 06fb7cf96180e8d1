"""One rank of training with random values made on its device, for benchmarks: no state on disk, no data, no peers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import Batch
from spes_p2p.experts.bank import MATRICES
from spes_p2p.interop.hf import state_layout
from spes_p2p.model.params import named_shared
from spes_p2p.model.transformer import Transformer
from spes_p2p.train.trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """`seconds` of one step (the median); `peak_bytes` allocated on a GPU, 0 on a CPU."""

    seconds: float
    peak_bytes: int


def random_trainer(config: Config, owned: int, device: torch.device) -> Trainer:
    """Trains the first `owned` columns; every value is normal with `model.init_std`, norms are ones."""
    trainer = Trainer(config, state_layout(config), device)
    trainer.begin(tuple(range(owned)), step=0, keep_moments=False, round_steps=0)
    _fill(trainer.learner.model, config.model.init_std, device)
    return trainer


def random_batch(config: Config, seed: int = 0) -> Batch:
    """One inner step's tokens."""
    shape = config.optimizer.batch_sequences, config.data.sequence_length
    tokens = np.random.default_rng(seed).integers(config.model.vocab_size, size=shape)
    return Batch(tokens, np.ones(shape[0], np.bool_), np.arange(shape[0], dtype=np.int64))


def measure(step: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> Measured:
    """`step` several times; the peak is that of the steps after the warm-up, which allocates what stays."""
    for _ in range(warm_up):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return Measured(median(times), torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)


def profiled(step: Callable[[], object], device: torch.device, warm_up: int = 2) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of what one step runs on the device, what takes most time first.

    On a GPU kernels and copies alone, so that the times add up to those in which it works.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    for _ in range(warm_up):
        step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    rows = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000, event.count)
        for event in profiler.key_averages()
        if not on_gpu or event.device_type == DeviceType.CUDA
    ]
    return sorted(rows, key=lambda row: -row[1])


def clean_up(device: torch.device) -> None:
    """Gives back the memory of what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def _fill(model: Transformer, std: float, device: torch.device) -> None:
    for parameter in named_shared(model).values():
        parameter.normal_(std=std) if parameter.dim() > 1 else parameter.fill_(1.0)
    for bank in model.banks:
        for expert in range(bank.num_experts):
            for which in MATRICES:
                bank.load(expert, which, std * torch.randn(bank.shape_of(which), device=device))
