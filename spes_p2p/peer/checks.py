"""What can keep a machine from training in a run, each as one line: ok, a warning or a failure, with the fix.

Pure functions of what was measured; `doctor.py` measures and asks others, and `join` raises what fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from spes_p2p.config.schema import Config
from spes_p2p.errors import SpesError
from spes_p2p.observe.metrics import bytes_text, count_text, seconds_text
from spes_p2p.planning.budget import Device, columns_that_fit
from spes_p2p.planning.disk import DiskNeed
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import Link, sync_costs
from spes_p2p.planning.units import gib_text

Level = Literal["ok", "warning", "failure"]
LEAST_PYTHON = (3, 11)
IN_USE_SHARE = 0.15
"""Share of a GPU's memory in use by other programs from which the doctor warns."""
HOME_LINK = Link(2.5e6, 12.5e6)
"""20 Mbit/s up and 100 down."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `fix` is empty where nothing is wrong."""

    name: str
    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """What was found here. `cuda`: the version that torch was built for, None without; `gpus`: what torch can use.

    `driver`: of NVIDIA, with the newest CUDA version that it can run (an empty text: none is installed).
    """

    system: str
    python: tuple[int, int, int]
    torch: str
    cuda: str | None
    driver: str
    gpus: tuple[Gpu, ...]
    host_free_bytes: int
    host_total_bytes: int
    cores: int
    rocm: str | None = None
    """What torch was built for instead, in words."""


@dataclass(frozen=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int
    trouble: str = ""
    """Why it cannot train."""
    limits: str = ""
    """What it does less well than others."""


def machine_checks(machine: Machine, on_gpu: bool = True) -> list[Check]:
    """Checks of Python, torch and its driver, GPUs and memory. `on_gpu`: whether training is to run on a GPU."""
    return [_python(machine), _torch(machine), *_gpus(machine, on_gpu), _memory(machine)]


def _python(machine: Machine) -> Check:
    text = f"{'.'.join(map(str, machine.python))} on {machine.system}"
    if machine.python < LEAST_PYTHON:
        return Check("python", "failure", text, f"install Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer")
    if not machine.system.startswith("Linux"):
        return Check("python", "warning", f"{text}: only Linux is tested", "on Windows use WSL 2")
    return Check("python", "ok", text)


def _torch(machine: Machine) -> Check:
    text = f"{machine.torch}, " + (f"for CUDA {machine.cuda}" if machine.cuda else machine.rocm or "without CUDA")
    text += f"; {machine.driver}" if machine.driver else ""
    if machine.driver and not machine.gpus:
        why = "torch has no CUDA" if machine.cuda is None else "torch cannot use it"
        fix = "install a torch for CUDA (https://pytorch.org)" if machine.cuda is None else "update the NVIDIA driver"
        return Check("torch", "warning", f"{text}: there is an NVIDIA driver, but {why}", fix)
    return Check("torch", "ok", text)


def _gpus(machine: Machine, on_gpu: bool) -> Iterable[Check]:
    if not machine.gpus:
        fix = "use a machine with a GPU; a CPU is enough only for a tiny run"
        yield Check("gpu", "warning", "none that torch can use: training runs on the CPU", fix)
    none_can = all(gpu.trouble for gpu in machine.gpus)
    for number, gpu in enumerate(machine.gpus):
        if gpu.trouble:
            yield Check("gpu", "failure" if none_can and on_gpu else "warning", gpu.trouble, "use --device cpu")
            continue
        text = f"{number}: {gpu.name}, {gib_text(gpu.free_bytes)} of {gib_text(gpu.total_bytes)} free"
        text += f"; {gpu.limits}" if gpu.limits else ""
        crowded = gpu.total_bytes - gpu.free_bytes > IN_USE_SHARE * gpu.total_bytes
        fix = "close the other programs that use it (nvidia-smi lists them)" if crowded else ""
        yield Check("gpu", "warning" if crowded else "ok", text, fix)


def _memory(machine: Machine) -> Check:
    free, total = gib_text(machine.host_free_bytes), gib_text(machine.host_total_bytes)
    return Check("memory", "ok", f"{free} of {total} free, {machine.cores} processor cores")


def fit_check(config: Config, device: Device, wanted: int, words: str, fits: bool) -> Check:
    """`config` with the options chosen for `wanted` columns (`words` names them, or says why it does not fit)."""
    count = min(config.model.num_experts, columns_that_fit(config, device))
    run = f"{config.run.run_id} ({count_text(Sizes.of(config.model).total)} parameters)"
    if not fits:
        fix = "use a machine with more memory, free some, or join with a smaller --max-experts"
        return Check("fit", "failure" if count == 0 else "warning", f"{run}: {words}", fix)
    if count < wanted:
        text = f"{run} wants {wanted} expert columns of each peer, but there is free memory for only {count}"
        return Check("fit", "warning", text, "free some memory, or join with a smaller --max-experts")
    options = f"; {words}" if words else ""
    return Check("fit", "ok", f"{run}: room for {count} of {config.model.num_experts} expert columns{options}")


@dataclass(frozen=True)
class Disk:
    """Where a peer would write: free bytes, and what its folder holds already."""

    path: str
    free_bytes: int
    held_bytes: int = 0
    is_writable: bool = True


def disk_check(config: Config | None, wanted: int, disk: Disk, data_bytes: int = 0) -> Check:
    """Free space against what the run takes in all; `config` None: the run is not known.

    `data_bytes`: most of the run's data that is kept here; less where there is no room, so nothing depends on it.
    """
    if not disk.is_writable:
        return Check("disk", "failure", f"{disk.path} cannot be written to", "choose a folder of yours with --output")
    if config is None:
        return Check("disk", "ok", f"{bytes_text(disk.free_bytes)} free at {disk.path}")
    need = DiskNeed.of(config, wanted)
    room = disk.free_bytes + disk.held_bytes
    text = f"{bytes_text(disk.free_bytes)} free at {disk.path}; the run takes up to {bytes_text(need.most)}"
    if data_bytes:
        text += f", and up to {bytes_text(data_bytes)} for its data (--max-data-disk)"
    if room < need.least:
        text = f"{bytes_text(disk.free_bytes)} free at {disk.path}, but the run needs at least {bytes_text(need.least)}"
        return Check("disk", "failure", text, "free some space, or choose another disk with --output")
    if room < need.most:
        fix = "free some space, or join with output.keep_checkpoints=1; saving pauses while the disk is full"
        return Check("disk", "warning", text, fix)
    return Check("disk", "ok", text)


def clock_check(ahead_seconds: float) -> Check:
    """`ahead_seconds`: how far the clocks of others are ahead; more than 3 s keep a peer out of the DHT."""
    return Check("clock", "ok", f"differs from the others' by {abs(ahead_seconds):.1f} s")


def reach_check(is_public: bool | None, address: str) -> Check:
    """`is_public` None: nobody could try to dial this machine."""
    if is_public:
        return Check("reach", "ok", f"direct: others dial this machine at {address}")
    fix = "forward a TCP port in the router and name it: --port PORT"
    if is_public is None:
        return Check("reach", "ok", "unknown: no other node could try to dial this machine; it can train all the same")
    text = "none: nobody can dial this machine; it can still train, over connections that it keeps open"
    return Check("reach", "warning", text, f"{fix} (it then also reduces for others)")


def sync_check(config: Config, owned: int, peers: int) -> Check:
    """What a sync takes of a link. `peers`: that the run has, this one counted."""
    cost = sync_costs(config, peers, owned, HOME_LINK, None)[0]
    assert cost.seconds is not None
    text = f"one of {peers} peers sends {bytes_text(cost.bytes_up)} and receives {bytes_text(cost.bytes_down)}"
    return Check("sync", "ok", f"{text}: {seconds_text(cost.seconds)} at 20 Mbit/s up and 100 down")


def of_error(name: str, error: SpesError) -> Check:
    """A known error as a failed check."""
    return Check(name, "failure", str(error), error.fix)


def raise_failures(checks: Iterable[Check], say: Callable[[str], None]) -> None:
    """Passes warnings to `say`, and raises SpesError for the first failed check, with its text and fix."""
    for check in checks:
        if check.level == "failure":
            raise SpesError(f"this machine cannot take part: {check.name}: {check.text}", check.fix)
        if check.level == "warning":
            say(f"warning: {check.name}: {check.text} / fix: {check.fix}")
