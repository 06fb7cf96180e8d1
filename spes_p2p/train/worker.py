"""The other ranks of a peer: their processes, and the loop in which they do what rank 0 says.

Rank 0 starts them on this machine (`LocalRanks`), or an outer torchrun has started all (`ranks_from_environment`).
They read no data and write no files. Signals are rank 0's business: the others end when it says so, when its
connections end, or, where it started them, when the kernel sees its process end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from spes_p2p.config.load import config_from_text
from spes_p2p.errors import ConfigError, LocalProtocolError, SpesError
from spes_p2p.interop.hf import state_layout
from spes_p2p.locks import Scratch
from spes_p2p.parent import end_with
from spes_p2p.train.ddp import Ranks, abort, broadcast_object, connect, disconnect
from spes_p2p.train.memory import least_free_and_total_bytes
from spes_p2p.train.others import unpacked
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.watchdog import Watchdog

_START_SECONDS = 120.0
_NOTICE_SECONDS = 10.0
_CLOSE_SECONDS = 2.0  # what was told to stop needs less, and the rest has nothing to save
_SCRATCH = "spes-p2p-ranks-"
_FROZEN_FIX = "check that process's device and the machine's memory; then start the peer again"
_FIX = "if memory ran out, use fewer ranks, a smaller micro_batch_sequences or activation checkpointing"


class Child:
    """One other rank's process, ended from rank 0, and the thread that starts it and waits for its end.

    The thread lives as long as the process: a rank ends with the thread that started it (`end_with`), not only with
    the whole parent.
    """

    def __init__(self, rank: int, command: list[str], folder: Path, on_end: Callable[[Child], None]) -> None:
        """Starts `command`, whose output goes to a file in `folder`. Raises SpesError where that fails.

        `on_end` is called in the thread of this object.
        """
        self.rank = rank
        self._command = command
        self._log = folder / f"rank-{rank}.log"
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise SpesError(f"rank {rank} could not be started: {self._failure}", fix="use fewer ranks")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def loss(self) -> SpesError:
        """The error that says how the process ended."""
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return SpesError(f"local rank {self.rank} was killed by {signal.Signals(-code).name}", fix=_FIX)
        return SpesError(f"local rank {self.rank} ended with exit code {code}{self._last_words()}", fix=_FIX)

    def end(self, patience_seconds: float) -> None:
        """Waits for the end, which is forced after `patience_seconds`."""
        self._thread.join(patience_seconds)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def kill(self) -> None:
        """SIGKILL; `on_end` is called as ever."""
        if self._process is not None:
            self._process.kill()

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    def _run(self) -> None:
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self._process.wait()
        self._on_end(self)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        words = [line for line in lines if line.strip()]
        return f": {words[-1][:300]}" if words else ""


def _environment() -> dict[str, str]:
    """Ours, and where this package lies, which may be in a source tree that only this process knows of."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def serve(ranks: Ranks) -> None:
    """Calls what rank 0 says until it says stop. Raises SpesError where rank 0 has ended."""
    _leave_signals_to_rank_0()
    trainer: Trainer | None = None
    while True:
        try:
            name, packed = broadcast_object(ranks)
        except RuntimeError as error:
            raise SpesError(f"rank {ranks.rank} lost rank 0: {error}", fix="see the output of rank 0") from error
        arguments = {key: unpacked(value) for key, value in packed.items()}
        if name == "stop":
            return
        if name == "measure":  # before there is anything to train
            least_free_and_total_bytes(ranks)
        elif name == "build":
            trainer = _build(ranks, **arguments)
        elif trainer is None:
            raise LocalProtocolError(f"command {name} came before build")
        else:
            getattr(trainer, name)(**arguments)


def _build(ranks: Ranks, config: str, threads: int) -> Trainer:
    torch.set_num_threads(threads)  # as rank 0: the same bits at every rank
    checked = config_from_text(config)
    return Trainer(checked, state_layout(checked), ranks.device, ranks)


class LocalRanks:
    """Processes for ranks 1..N-1 on this machine, started, watched and ended by rank 0. A context manager.

    `ranks` is for the Trainer. With one rank nothing is started.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        lost: Callable[[SpesError], None] = lambda error: None,
        cards: Sequence[int] = (),
    ) -> None:
        """Starts the processes and connects. On CUDA, rank r uses GPU `cards[r]`, or r where none are given.

        `lost` is told, in another thread, that a rank has ended, also while rank 0 does something else. Raises
        ConfigError for more ranks than GPUs, SpesError where a rank ends or does not come up in time.
        """
        self._cards = tuple(cards)
        self.ranks = Ranks(device=torch.device("cuda", cards[0]) if cards else device, cards=self._cards)
        self._children: list[Child] = []
        self._ended: list[Child] = []
        self._news = threading.Event()
        self._lost = lost
        self._frozen: SpesError | None = None
        self._closing = False
        if world_size == 1:
            return
        _check_devices(world_size, device)
        self._folder = Scratch(_SCRATCH)
        self._watchdog = Watchdog(self._on_frozen)
        try:
            self._start(world_size, device.type, self._folder.path)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1..N-1."""
        return tuple(child.pid for child in self._children)

    def check(self) -> None:
        """Raises SpesError where a rank has ended, naming the first one and how it ended, or which one is frozen."""
        if self._frozen is not None:
            raise self._frozen
        if self._ended and not self._closing:
            raise self._ended[0].loss()

    def explain(self) -> None:
        """As `check`, after something broke: waits a moment for the end of a process to be seen."""
        self._news.wait(_NOTICE_SECONDS)
        self.check()

    def close(self) -> None:
        """Ends all processes, by force those that the Trainer's `close` has not ended."""
        if self._closing or not hasattr(self, "_watchdog"):
            return
        self._closing = True
        self._watchdog.close()
        abort(self.ranks)
        disconnect(self.ranks)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for child in self._children:
            child.end(max(0.0, deadline - time.monotonic()))
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world_size: int, device_type: str, folder: Path) -> None:
        if device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        store_path = folder / "store"
        for rank in range(1, world_size):
            arguments = [rank, world_size, self._device_of(rank, device_type), os.getpid(), store_path]
            command = [sys.executable, "-m", "spes_p2p.train.worker", *map(str, arguments)]
            self._children.append(Child(rank, command, folder, self._on_end))
        store = dist.FileStore(str(store_path), world_size)
        self._wait_until_ready(store, world_size)
        device = torch.device(self._device_of(0, device_type))
        alone = Ranks(
            0, world_size, device, check=self.check, explain=self.explain, watch=self._watchdog.watching,
            progress=self._watchdog.progress, cards=self._cards,
        )  # fmt: skip
        try:
            self.ranks = connect(alone, store)
        except RuntimeError:
            self.explain()
            raise

    def _device_of(self, rank: int, device_type: str) -> str:
        return _device_of(self._cards[rank] if self._cards else rank, device_type)

    def _wait_until_ready(self, store: Any, world_size: int) -> None:
        waiting = [_ready_key(rank) for rank in range(1, world_size)]
        for _ in range(int(_START_SECONDS / 0.05)):
            self.check()
            if store.check(waiting):
                return
            self._news.wait(0.05)
        raise SpesError(f"{world_size - 1} local ranks did not start in {_START_SECONDS:.0f} s", fix="use fewer ranks")

    def _on_end(self, child: Child) -> None:
        self._ended.append(child)
        self._news.set()
        if not self._closing:
            abort(self.ranks)
            self._lost(self._frozen or child.loss())

    def _on_frozen(self, command: str, seconds: float, longest: float) -> None:
        """Nobody can be waited for any more: the others are ended, which frees rank 0 from where it waits."""
        stopped = [child for child in self._children if child.is_stopped()]
        named = ", ".join(str(child.rank) for child in stopped or self._children)
        how = "was stopped by a signal" if stopped else "hangs"
        took = f"; {command} has never taken more than {longest:.1f} s before" if longest else ""
        self._frozen = SpesError(f"local rank {named} {how}: no answer for {seconds:.0f} s{took}", fix=_FROZEN_FIX)
        for child in self._children:
            child.kill()


def ranks_from_environment(device: torch.device) -> Ranks | None:
    """The ranks of an outer torchrun (RANK, WORLD_SIZE, MASTER_ADDR), connected; None where there is none.

    Ranks above 0 then call `serve`, and rank 0 makes the Trainer. torchrun ends all ranks when one is lost.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = _device_of(int(os.environ.get("LOCAL_RANK", rank)), device.type)
    return connect(Ranks(rank, world_size, torch.device(local)))


def _device_of(number: int, device_type: str) -> str:
    return f"cuda:{number}" if device_type == "cuda" else device_type


def _check_devices(world_size: int, device: torch.device) -> None:
    if device.type == "cuda" and world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{world_size} local ranks were asked for, but {torch.cuda.device_count()} GPUs are visible",
            fix="use one rank per GPU: set --local-ranks or CUDA_VISIBLE_DEVICES",
        )


def _ready_key(rank: int) -> str:
    return f"ready-{rank}"


def _leave_signals_to_rank_0() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # terminals and services signal all ranks
        signal.signal(ignored, signal.SIG_IGN)


def main(arguments: list[str]) -> None:
    """`rank world_size device parent_pid store_path`, as LocalRanks starts it."""
    _leave_signals_to_rank_0()
    rank, world_size = int(arguments[0]), int(arguments[1])
    end_with(int(arguments[3]), signal.SIGKILL)
    store = dist.FileStore(arguments[4], world_size)
    store.set(_ready_key(rank), "1")
    ranks = connect(Ranks(rank, world_size, torch.device(arguments[2])), store)
    try:
        serve(ranks)
    except Exception:  # noqa: BLE001 (told, and the end of this process)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly end with open process groups may be an abort, and hide what was wrong
    disconnect(ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
