"""Measures this machine for `checks`: Python, torch, driver, GPUs, memory, disk. Nothing here takes a second."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from spes_p2p.errors import first_line
from spes_p2p.peer.checks import Disk, Gpu, Machine
from spes_p2p.peer.devices import limits_of, why_it_cannot_train
from spes_p2p.train.memory import free_and_total_bytes

NVIDIA_SMI = "nvidia-smi"
_SMI_SECONDS = 5.0


def find_machine() -> Machine:
    """Describes this machine. A GPU that cannot train, or not be queried, is listed with the reason in `trouble`."""
    free, total = free_and_total_bytes(torch.device("cpu"))
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=sys.version_info[:3],
        torch=f"torch {torch.__version__.partition('+')[0]}",
        cuda=torch.version.cuda,
        rocm=None if torch.version.hip is None else f"for ROCm {torch.version.hip}",
        driver=_driver(),
        gpus=tuple(_gpus()),
        host_free_bytes=free,
        host_total_bytes=total,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def find_disk(output: Path) -> Disk:
    """Where `output` is, or would be made."""
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    return Disk(str(folder), shutil.disk_usage(folder).free, _held_bytes(output))


def _held_bytes(folder: Path) -> int:
    """Of all files under it, those with several names counted once."""
    found: dict[int, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a running peer may have removed it
            stat = path.lstat()
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        trouble = why_it_cannot_train(number)
        try:
            name, free_and_total = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
            found.append(Gpu(name, *free_and_total, trouble, limits_of(number)))
        except RuntimeError as error:
            found.append(Gpu("a GPU", 0, 0, trouble or first_line(error)))
    return found


def _driver() -> str:
    """The NVIDIA driver's version as nvidia-smi reports it; "" if there is none."""
    command = [NVIDIA_SMI, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = done.stdout.strip().splitlines()[:1]
    return f"NVIDIA driver {version[0]}" if done.returncode == 0 and version else ""
