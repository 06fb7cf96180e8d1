"""How much memory the device of a trainer has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from spes_p2p.errors import SpesError

_MEMINFO = Path("/proc/meminfo")


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes of the device; on the CPU what the system could give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _available_bytes(total)), total


def spare_at_peak_bytes(device: torch.device) -> int | None:
    """What was left of a GPU when this process used most, since the last call. None on the CPU, which can swap."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    spare = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return spare


def forget_peak(device: torch.device) -> None:
    """Gives memory back that nobody uses, and starts anew with what was used most."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _available_bytes(otherwise: int) -> int:
    if not _MEMINFO.exists():
        return otherwise
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(parts[1]) * 1024 for parts in lines if parts[0] == "MemAvailable:"), otherwise)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no room: libraries beside torch have no type of their own for it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def out_of_memory(error: RuntimeError, columns: int) -> SpesError:
    """What to tell people, and what helps."""
    return SpesError(
        f"the device ran out of memory while training {columns} expert columns: {str(error).split('. ')[0]}",
        fix="go on with --resume and a smaller --max-experts, optimizer.micro_batch_sequences=1 or "
        "model.activation_checkpointing=full",
    )
