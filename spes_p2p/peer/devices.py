"""Chooses the device that a peer computes on, and which of several GPUs its ranks use.

Training computes in bf16, and in fp16 with a loss scale on GPUs below compute capability 8.0 (RTX 20xx, T4, V100),
which do not have it. Still older ones have no tensor cores, and are refused. Apple's GPUs (`--device mps`) compute in
fp32, as a CPU does; AMD's (ROCm) are torch's CUDA devices. What a device cannot do is said before anything is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.loader import Batch
from spes_p2p.errors import ConfigError, first_line
from spes_p2p.experts.kernels import BF16_CAPABILITY, half_dtype
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.initial import InitialState
from spes_p2p.train.trainer import Trainer

if TYPE_CHECKING:
    from spes_p2p.peer.options import PeerOptions

LEAST_CAPABILITY = (7, 0)
MEMORY_SHARE = 0.5
"""A GPU with less than this share of the best one's memory would hold the others back: all ranks hold the same."""
_ON_CPU = "use --device cpu, or a GPU of compute capability 7.0 or newer (V100, T4, RTX 20xx) with a torch made for it"
_TRIAL_WIDTH = 16
_TINY_STEP = (
    "model.d_model=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_experts=4",
    "model.expert_ffn=16",
    "data.sequence_length=16",
    "optimizer.batch_sequences=2",
)
_ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""The older name, which every version reads, and the newer one."""


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one. Raises ConfigError for a device that is not here, or never trains.

    Before CUDA starts, here and in the ranks' processes, its allocator is told to grow segments in place: sizes change
    with the routing, and less is lost between blocks then. What a person has set stays.
    """
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device", fix="use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(
            f"--device {name}: training runs on a CPU, on CUDA or on Apple's GPUs (mps)",
            fix="use auto, cpu, cuda or mps",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU of Apple's here", fix="use --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: torch sees no GPU here", fix="use --device cpu, or install a torch with CUDA"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        here = "cuda:0 is the only one" if count == 1 else f"those here are cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"--device {name}: there is no such GPU, {here}", fix="use one of these, or auto")
    return device


def choose_cards(
    options: PeerOptions, device: torch.device, batch_sequences: int, say: Callable[[str], None]
) -> tuple[int, ...]:
    """The numbers of the GPUs to use, one for each rank; none on a CPU. `say` hears why some are left out.

    Without --local-ranks: of those that can train and have memory enough beside the best one, the largest number that
    divides the batch. Raises ConfigError where too few can train.
    """
    if device.type == "mps":
        _check_apple(options, device)
        say("Apple's GPU computes in fp32 and keeps its memory while paused; nobody has trained on one yet")
    if device.type != "cuda":
        return ()
    one = options.local_ranks is None and device.index is not None
    numbers = range(torch.cuda.device_count()) if device.index is None or not one else (device.index,)
    trouble = _troubles(numbers)
    able = [number for number in numbers if not trouble[number]]
    newer = [number for number in able if torch.cuda.get_device_capability(number) >= BF16_CAPABILITY]
    if newer and len(newer) < len(able):  # all ranks compute in one dtype
        trouble |= {number: f"GPU {number} computes in fp16, the others in bf16" for number in set(able) - set(newer)}
        able = newer
    reasons = list(filter(None, dict.fromkeys(trouble.values())))
    if not able:
        raise ConfigError("; ".join(reasons), fix=_ON_CPU)
    if len(able) < (options.local_ranks or 1):
        asked = f"--local-ranks asks for {options.local_ranks} ranks, but {len(able)} GPUs can train"
        raise ConfigError("; ".join([asked, *reasons]), fix="use fewer --local-ranks")
    for limit in dict.fromkeys(filter(None, map(limits_of, able))):
        say(limit)
    if options.local_ranks is not None or one:
        return tuple(able[: options.local_ranks or 1])
    roomy = _with_room(able)
    reasons += [f"GPU {number} has far less memory than the best one" for number in able if number not in roomy]
    count = max(size for size in range(1, len(roomy) + 1) if batch_sequences % size == 0)
    if count < len(roomy):
        reasons.append(f"a batch of {batch_sequences} sequences cannot be split over {len(roomy)}")
    if reasons:
        say(f"{count} of {len(numbers)} GPUs are used: {'; '.join(reasons)}")
    return tuple(sorted(roomy[:count]))


def _troubles(numbers: Sequence[int]) -> dict[int, str]:
    """By GPU number, why it cannot train. Tries one GPU per model, since a trial holds GPU memory until we exit."""
    kinds = {number: _kind_of(number) for number in numbers}
    first = {kind: number for number, kind in reversed(kinds.items())}
    tried = {kind: why_it_cannot_train(number) for kind, number in first.items()}
    return {number: tried[kind] for number, kind in kinds.items()}


def limits_of(number: int) -> str:
    """What GPU `number` does less well than others, in a sentence, or nothing."""
    if torch.version.hip is not None:
        return "AMD's GPUs train by the same calls as NVIDIA's (ROCm), but nobody has tried it yet"
    if torch.cuda.get_device_capability(number) < BF16_CAPABILITY:
        return f"{torch.cuda.get_device_name(number)} has no bf16: it trains in fp16 with a loss scale"
    return ""


def _check_apple(options: PeerOptions, device: torch.device) -> None:
    """Raises ConfigError for what such a device cannot do, found out by a step of a tiny model."""
    if (options.local_ranks or 1) > 1:
        raise ConfigError(
            f"--local-ranks is {options.local_ranks}, but several ranks cannot share {device}", fix="leave it out"
        )
    try:
        step_on(device)
    except (RuntimeError, TypeError) as error:  # NotImplementedError among them
        raise ConfigError(
            f"{device} cannot train with torch {torch.__version__}: {first_line(error)}",
            fix="use --device cpu, or set PYTORCH_ENABLE_MPS_FALLBACK=1, which computes there what is missing",
        ) from error


def step_on(device: torch.device) -> float:
    """The loss of one inner step of a tiny model, as training makes it: whatever is missing raises RuntimeError."""
    config = load_config(bundled_config("tiny"), _TINY_STEP)
    layout = state_layout(config)
    trainer = Trainer(config, layout, device)
    trainer.adopt((0,), InitialState(layout, config.run.seed, config.model.init_std), 0)
    shape = config.optimizer.batch_sequences, config.data.sequence_length
    tokens = np.arange(shape[0] * shape[1]).reshape(shape) % config.model.vocab_size
    return trainer.train_step(Batch(tokens, np.ones(shape[0], np.bool_), np.arange(shape[0]))).loss


def _kind_of(number: int) -> str:
    try:
        return torch.cuda.get_device_name(number)
    except RuntimeError:
        return str(number)


def why_it_cannot_train(number: int) -> str:
    """Why GPU `number` cannot compute in bf16 or fp16, or nothing. Makes a CUDA context on it."""
    try:
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        what = f"this GPU ({number}: {name}, compute capability {'.'.join(map(str, capability))})"
        if torch.version.hip is None and capability < LEAST_CAPABILITY:
            return f"{what} has no tensor cores for fp16 or bf16, which training needs"
        failure = _trial(torch.device("cuda", number))
    except RuntimeError as error:  # a driver's, or no kernel image for it
        return f"GPU {number} cannot be used by torch {torch.__version__}: {first_line(error)}"
    return f"{what} fails with torch {torch.__version__}: {failure}" if failure else ""


def _trial(device: torch.device) -> str:
    """What is wrong with a small product in the dtype of training, or nothing."""
    dtype = half_dtype(device)
    try:
        ones = torch.ones(_TRIAL_WIDTH, _TRIAL_WIDTH, device=device, dtype=dtype)
        total = float((ones @ ones).float().sum())
    except RuntimeError as error:
        return first_line(error)
    return "" if total == _TRIAL_WIDTH**3 else f"a product in {dtype} gave {total:g}, not {_TRIAL_WIDTH**3}"


def _with_room(numbers: Sequence[int]) -> list[int]:
    """Those with memory enough, most memory first."""
    total = {number: torch.cuda.get_device_properties(number).total_memory for number in numbers}
    roomy = [number for number in numbers if total[number] >= MEMORY_SHARE * max(total.values())]
    return sorted(roomy, key=lambda number: -total[number])
