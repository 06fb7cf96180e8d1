"""Processes of the other ranks: how they start and end, and what rank 0 hears when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from spes_p2p.errors import LocalProtocolError, SpesError
from spes_p2p.locks import Scratch
from spes_p2p.train import watchdog
from spes_p2p.train.ddp import broadcast_object
from spes_p2p.train.worker import LocalRanks, _leave_signals_to_rank_0
from tests.swarm.micro import wait_for_ends
from tests.train.small import CPU, batch_of, small_config, trainer_of

ROOT = Path(__file__).parents[2]


def test_one_rank_needs_no_process_and_neither_torch_distributed_nor_torchs_compiler() -> None:
    """Each takes a second or more to load."""
    program = """
import sys, torch
before = set(sys.modules)
from spes_p2p.train.worker import LocalRanks
from tests.train.small import CPU, trainer_of, small_config, batch_of
with LocalRanks(1, CPU) as ranks:
    assert ranks.pids == ()
    trainer_of(small_config(), ranks=ranks.ranks).train_step(batch_of(0))
assert not torch.distributed.is_initialized()
assert not {"torch.nn.parallel.distributed", "torch._dynamo"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_killed_rank_is_named_and_nothing_hangs() -> None:
    heard, news = list[SpesError](), threading.Event()

    def lost(error: SpesError) -> None:
        heard.append(error)
        news.set()

    with LocalRanks(2, CPU, lost) as ranks:
        trainer = trainer_of(small_config(), ranks=ranks.ranks)
        trainer.train_step(batch_of(0))
        (pid,) = ranks.pids
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):  # the first finds the connection cut, the second the process gone
            with pytest.raises(SpesError, match="local rank 1 was killed by SIGKILL"):
                trainer.train_step(batch_of(0))
        assert news.wait(60.0)
        trainer.close()
    assert [str(error) for error in heard] == ["local rank 1 was killed by SIGKILL"]
    assert not psutil.pid_exists(pid)
    trainer_of(small_config()).train_step(batch_of(0))  # a peer of one rank goes on in this process


def test_a_rank_that_ends_is_heard_of_while_nobody_asks_it_anything() -> None:
    """With its last words."""
    heard, news = list[SpesError](), threading.Event()

    def lost(error: SpesError) -> None:
        heard.append(error)
        news.set()

    with LocalRanks(2, CPU, lost) as ranks:
        broadcast_object(ranks.ranks, ["dance", {}])
        assert news.wait(60.0)
        with pytest.raises(SpesError, match=r"local rank 1 ended with exit code 1: .*command dance came before build"):
            ranks.explain()
    (error,) = heard
    assert str(error).startswith("local rank 1 ended with exit code 1: ")
    assert "command dance came before build" in str(error)


def test_a_frozen_rank_is_named_within_a_time_learnt_from_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FLOOR_SECONDS", 0.5)
    with LocalRanks(2, CPU) as ranks:
        trainer = trainer_of(small_config(), ranks=ranks.ranks)
        trainer.train_step(batch_of(0))
        (pid,) = ranks.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SpesError, match=r"local rank 1 was stopped by a signal: no answer for \d+ s; inner_step"):
            trainer.train_step(batch_of(0))
        trainer.close()
    assert not psutil.pid_exists(pid)


def test_folders_of_killed_peers_are_removed_by_the_next_one() -> None:
    program = "import os\nfrom spes_p2p.locks import Scratch\nprint(Scratch('spes-p2p-test-').path)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    mine = Scratch("spes-p2p-test-")
    assert not left.exists()
    others = Scratch("spes-p2p-test-")
    assert mine.path.is_dir()  # its process lives
    for scratch in (mine, others):
        scratch.remove()
        assert not scratch.path.exists()


def test_ranks_end_when_rank_0_is_killed() -> None:
    program = """
import sys
from spes_p2p.train.worker import LocalRanks
from tests.train.small import CPU
ranks = LocalRanks(2, CPU)
print(*ranks.pids, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank_0:
        assert rank_0.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in rank_0.stdout.readline().split()]
        assert len(ranks) == 1
        rank_0.kill()
        assert wait_for_ends(ranks) == []


def test_a_clean_stop_ends_all_ranks() -> None:
    with LocalRanks(2, CPU) as ranks:
        (rank_1,) = (psutil.Process(pid) for pid in ranks.pids)
        rank_1.send_signal(signal.SIGTERM)  # rank 0's business
        trainer = trainer_of(small_config(), ranks=ranks.ranks)
        trainer.train_step(batch_of(0))
        trainer.close()
        with pytest.raises(LocalProtocolError, match="after a failure or close"):
            trainer.train_step(batch_of(0))
    assert not rank_1.is_running()


def test_a_signal_to_all_ranks_is_heeded_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, a service manager, a terminal that is closed: the others go on until rank 0 has left."""
    handlers = dict[signal.Signals, object]()
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    _leave_signals_to_rank_0()
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)


@pytest.mark.thorough
def test_more_ranks_under_torchrun(tmp_path: Path) -> None:
    program = """
import os, sys, torch
from spes_p2p.train.ddp import disconnect
from spes_p2p.train.worker import ranks_from_environment, serve
from tests.train.small import CPU, batch_of, small_config, trainer_of
ranks = ranks_from_environment(CPU)
if ranks.rank == 0:
    trainer = trainer_of(small_config(), ranks=ranks)
    trainer.train_step(batch_of(0))
    assert len(set(trainer.value_hashes())) == 1
    trainer.close()
    print("trained on", ranks.world_size)
else:
    serve(ranks)
disconnect(ranks)
"""
    (tmp_path / "program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "program.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "trained on 2" in done.stdout, done.stderr
    assert done.returncode == 0
