"""How much memory the device of a trainer has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from spes_p2p.errors import SpesError, first_line
from spes_p2p.train.ddp import Ranks, least_over_ranks

_WORDS = "out of memory", "alloc_failed", "can't allocate memory"


@dataclass(frozen=True)
class Held:
    """Bytes that the tensors of one rank take, as they are allocated."""

    model: int
    """Bytes of everything that a forward pass needs, trained values included."""
    trained: int
    """Bytes of the values that are trained."""
    gradients: int
    """Bytes of the gradients in the last step; they are freed after each step."""
    moments: int
    """Bytes of the optimizer moments, scales included."""

    @property
    def training(self) -> int:
        """What training takes beside the forward pass: values, gradients, moments."""
        return self.trained + self.gradients + self.moments


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes of the device; on the CPU what the system could give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        return max(0, most - torch.mps.driver_allocated_memory()), most
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def least_free_and_total_bytes(ranks: Ranks) -> tuple[int, int]:
    """The least of all ranks' devices. All ranks call it."""
    free, total = least_over_ranks(ranks, free_and_total_bytes(ranks.device))
    return free, total


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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no room: libraries beside torch have no type of their own for it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _WORDS)


@contextmanager
def telling_of_memory(doing: str) -> Iterator[None]:
    """Raises SpesError where memory runs out inside; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, doing) from error


def out_of_memory(error: RuntimeError, doing: str) -> SpesError:
    """What to tell people, and what helps."""
    return SpesError(
        f"the device ran out of memory while {doing}: {first_line(error).split('. ')[0]}",
        fix="start again with a smaller --max-experts, optimizer.micro_batch_sequences=1 or "
        "model.activation_checkpointing=full",
    )
