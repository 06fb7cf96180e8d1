"""Several ranks, as real processes: the same training as one rank, and a clear end when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spes_p2p.errors import ConfigError, LocalProtocolError, SpesError
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import LocalRanks
from tests.train.small import (
    CPU,
    batch_of,
    initial,
    largest_difference,
    same_bits,
    small_config,
    small_layout,
    trainer_of,
    values_of,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2, CPU) as ranks:
        yield ranks


def rounds(trainer: Trainer) -> list[float]:
    """Two rounds with a change of columns between; losses and gradient norms of the steps."""
    numbers = []
    for start, owned in ((0, (1, 4)), (3, (0, 4, 5))):
        trainer.adopt(owned, initial(trainer.config), start)
        results = [trainer.train_step(batch_of(start + index, masked=(0, 1, 2))) for index in range(3)]
        numbers += [number for result in results for number in (result.loss, result.grad_norm, result.router_z)]
    return numbers


@pytest.mark.parametrize("micro", [8, 2])
def test_two_ranks_train_like_one(two_ranks: LocalRanks, micro: int) -> None:
    """Each micro-batch of a rank has a load-balancing loss of its own: it is off here."""
    config = small_config(
        f"optimizer.micro_batch_sequences={micro}", "optimizer.load_balancing_weight=0.0", "optimizer.eps=1e-3"
    )
    one = Trainer(config, small_layout(config), CPU)
    two = Trainer(config, small_layout(config), CPU, two_ranks.ranks)
    assert rounds(two) == pytest.approx(rounds(one), rel=1e-4)
    assert largest_difference(values_of(two), values_of(one)) < 1e-5
    hashes = two.value_hashes()
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert one.value_hashes()[0] != Trainer.value_hashes(trainer_of(config))[0]


def test_two_ranks_resume_bit_for_bit(two_ranks: LocalRanks) -> None:
    config = small_config()
    whole = trainer_of(config, ranks=two_ranks.ranks)
    whole.train_step(batch_of(0))
    state = whole.private_state()
    loss = whole.train_step(batch_of(1)).loss
    resumed = trainer_of(config, (3,), ranks=two_ranks.ranks)
    resumed.load_private_state(state)
    assert resumed.train_step(batch_of(1)).loss == loss
    assert same_bits(values_of(resumed), values_of(whole))
    assert len(set(resumed.value_hashes())) == 1


def test_a_batch_that_cannot_be_split_is_refused(two_ranks: LocalRanks) -> None:
    odd = small_config("optimizer.batch_sequences=7")
    with pytest.raises(ConfigError, match="7 sequences cannot be split over 2 ranks"):
        Trainer(odd, small_layout(odd), CPU, two_ranks.ranks)
    trainer = trainer_of(small_config(), ranks=two_ranks.ranks)
    with pytest.raises(ConfigError, match="3 sequences"):
        trainer.train_step(batch_of(0, sequences=3))
    trainer.train_step(batch_of(0))  # and nothing is broken


def test_only_rank_0_has_a_trainer() -> None:
    config = small_config()
    with pytest.raises(LocalProtocolError, match="rank 1"):
        Trainer(config, small_layout(config), CPU, Ranks(rank=1, world_size=2))


def test_one_rank_needs_no_process_and_no_torch_distributed() -> None:
    program = """
import sys, torch
before = set(sys.modules)
from spes_p2p.train.worker import LocalRanks
from tests.train.small import CPU, trainer_of, small_config, batch_of
with LocalRanks(1, CPU) as ranks:
    assert ranks.pids == ()
    trainer_of(small_config(), ranks=ranks.ranks).train_step(batch_of(0))
assert not torch.distributed.is_initialized()
assert "torch.nn.parallel.distributed" not in set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_killed_rank_is_named_and_the_rest_ends(two_ranks: LocalRanks) -> None:
    """The last test of the module: it kills what the others use."""
    trainer = trainer_of(small_config(), ranks=two_ranks.ranks)
    trainer.train_step(batch_of(0))
    (pid,) = two_ranks.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SpesError, match="local rank 1 was killed by SIGKILL"):
        for seed in range(1000):  # a step may still find the process, whose end is yet to be noticed
            trainer.train_step(batch_of(seed))
    with pytest.raises(SpesError, match="local rank 1 was killed by SIGKILL"):
        trainer.train_step(batch_of(0))
    trainer.close()
    two_ranks.close()
    assert not psutil.pid_exists(pid)
    trainer_of(small_config()).train_step(batch_of(0))  # a peer of one rank goes on in this process


def test_ranks_end_when_rank_0_is_killed() -> None:
    program = """
import sys
from spes_p2p.train.worker import LocalRanks
from tests.train.small import CPU
ranks = LocalRanks(3, CPU)
print(*ranks.pids, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank_0:
        assert rank_0.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in rank_0.stdout.readline().split()]
        assert len(ranks) == 2
        rank_0.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert alive == []


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


def test_a_rank_that_fails_says_why() -> None:
    """Rank 1 cannot build what it is told to: its last words come with the error."""
    config = small_config()
    with LocalRanks(2, CPU) as ranks:
        trainer = Trainer(config, small_layout(config), CPU, ranks.ranks)
        trainer.config = config
        with pytest.raises(SpesError, match="local rank 1 ended with exit code 1: .*KeyError: 'dance'"):
            with trainer._command("dance"):
                trainer._ranks.explain()


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "program.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "trained on 2" in done.stdout, done.stderr
    assert done.returncode == 0
