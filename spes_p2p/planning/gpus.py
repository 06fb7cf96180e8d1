"""Data sheets of GPUs that people have: memory, and dense bf16 products with fp32 sums (no sparsity)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from spes_p2p.planning.sizes import flops_per_token
from spes_p2p.planning.units import GIB

USUAL_MFU = 0.35
"""Share of the peak that training reaches where nobody has measured."""


@dataclass(frozen=True)
class Gpu:
    memory_bytes: int
    peak_flops: float
    """A second."""


GPUS = {
    "RTX3060": Gpu(12 * GIB, 26e12),
    "RTX3090": Gpu(24 * GIB, 71e12),
    "RTX4080": Gpu(16 * GIB, 97e12),
    "RTX4090": Gpu(24 * GIB, 165e12),
    "RTX5090": Gpu(32 * GIB, 209e12),
    "A6000": Gpu(48 * GIB, 155e12),
    "L4": Gpu(24 * GIB, 121e12),
    "L40S": Gpu(48 * GIB, 362e12),
    "A100-40": Gpu(40 * GIB, 312e12),
    "A100-80": Gpu(80 * GIB, 312e12),
    "H100": Gpu(80 * GIB, 989e12),
    "H200": Gpu(141 * 10**9, 989e12),
    "B200": Gpu(180 * 10**9, 2250e12),
}


def gpu_named(name: str) -> Gpu:
    """As on the box, in any case: `rtx4090`. Raises ConfigError for one that is not in the table."""
    known = {_plain(key): key for key in GPUS}
    wanted = _plain(name)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        fix = f"did you mean {known[near[0]]}? Otherwise" if near else f"known: {', '.join(GPUS)}; otherwise"
        raise ConfigError(
            f"--gpu {name!r} is not in the table of GPUs", fix=f"{fix} give --gpu-memory and --tokens-per-second"
        )
    return GPUS[known[wanted]]


def usual_speed(gpu: Gpu, config: Config, owned: int) -> float:
    """Tokens a second that it trains, at USUAL_MFU, with so many columns."""
    return USUAL_MFU * gpu.peak_flops / flops_per_token(config.model, config.data.sequence_length, owned)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
