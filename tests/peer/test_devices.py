"""Which GPUs a peer trains on, with torch's questions answered by the test: there need not be any."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spes_p2p.errors import ConfigError
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.peer import devices, doctor
from spes_p2p.peer.checks import machine_checks
from spes_p2p.peer.devices import choose_cards, choose_device, step_on
from spes_p2p.peer.doctor import find_machine
from spes_p2p.peer.fitting import measure, measure_ranks
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.planning.units import GIB
from spes_p2p.train.worker import LocalRanks

OPTIONS = PeerOptions(NetworkOptions(), Path("peer"))
CUDA = torch.device("cuda")
GOOD, OLD, SMALL = ("RTX 4090", (8, 9), 24), ("GTX 1080", (6, 1), 8), ("RTX 3060", (8, 6), 8)
Card = tuple[str, tuple[int, int], int]


class Box:
    """A machine with these GPUs; `said` is what people were told, `tried` which GPUs made a product."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cards: Card) -> None:
        self.said: list[str] = []
        self.tried: list[int | None] = []
        self.free = {number: card[2] * GIB for number, card in enumerate(cards)}
        answers = {
            "is_available": lambda: bool(cards),
            "device_count": lambda: len(cards),
            "get_device_name": lambda number: cards[number][0],
            "get_device_capability": lambda device: cards[device if isinstance(device, int) else device.index or 0][1],
            "get_device_properties": lambda number: SimpleNamespace(total_memory=cards[number][2] * GIB),
            "mem_get_info": lambda device: (self.free[device if isinstance(device, int) else device.index], 24 * GIB),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(devices, "_trial", self._try)

    def _try(self, device: torch.device) -> str:
        self.tried.append(device.index)
        return ""

    def cards(self, batch: int, device: torch.device = CUDA, options: PeerOptions = OPTIONS) -> tuple[int, ...]:
        return choose_cards(options, device, batch, self.said.append)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", "is not a device"),
        ("mps", "torch sees no GPU of Apple's here"),
        ("meta", "on a CPU, on CUDA or on Apple's GPUs"),
        ("cuda:7", "no such GPU, cuda:0 is the only one"),
    ],
)
def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    Box(monkeypatch, GOOD)
    assert choose_device("auto") == CUDA
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=words) as raised:
        choose_device(name)
    assert raised.value.fix


@pytest.mark.parametrize(("gpus", "used"), [(1, 1), (3, 2), (4, 4), (5, 4), (6, 4), (7, 4), (8, 8)])
def test_as_many_gpus_as_divide_the_batch_are_used(monkeypatch: pytest.MonkeyPatch, gpus: int, used: int) -> None:
    box = Box(monkeypatch, *[GOOD] * gpus)
    assert box.cards(batch=8) == tuple(range(used))
    words = f"{used} of {gpus} GPUs are used: a batch of 8 sequences cannot be split over {gpus}"
    assert box.said == [words] * (used < gpus)
    assert box.tried == [0]  # a product on each would take memory of the other ranks'


def test_old_and_small_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(monkeypatch, OLD, GOOD, SMALL, GOOD)
    assert box.cards(batch=8) == (1, 3)
    (said,) = box.said
    assert "2 of 4 GPUs are used" in said
    assert "GTX 1080, compute capability 6.1" in said
    assert "GPU 2 has far less memory" in said
    assert box.cards(8, options=replace(OPTIONS, local_ranks=3)) == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"--local-ranks asks for 4 ranks, but 3 GPUs can train; .*GTX 1080"):
        box.cards(8, options=replace(OPTIONS, local_ranks=4))
    box = Box(monkeypatch, GOOD)
    with pytest.raises(ConfigError, match=r"--local-ranks asks for 2 ranks, but 1 GPUs can train$"):
        box.cards(8, options=replace(OPTIONS, local_ranks=2))


def test_apples_gpu_makes_a_step_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    box, mps = Box(monkeypatch), torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps") == mps
    assert choose_device("auto") == torch.device("cpu")  # until somebody has tried it
    assert math.isfinite(step_on(torch.device("cpu")))

    def lacks(device: torch.device) -> float:
        raise NotImplementedError("The operator 'aten::_embedding_bag' is not implemented for MPS\nand more")

    monkeypatch.setattr(devices, "step_on", lacks)
    missing = r"mps cannot train with torch .*: The operator 'aten::_embedding_bag' is"
    with pytest.raises(ConfigError, match=missing) as told:
        box.cards(8, mps)
    assert "MPS_FALLBACK" in told.value.fix
    with pytest.raises(ConfigError, match="--local-ranks is 2, but several ranks cannot share mps"):
        box.cards(8, mps, replace(OPTIONS, local_ranks=2))
    monkeypatch.setattr(devices, "step_on", lambda device: 1.0)
    assert box.cards(8, mps) == ()
    assert "fp32" in box.said[0]


def test_a_gpu_says_what_it_lacks_and_amds_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(monkeypatch, ("T4", (7, 5), 16))
    assert box.cards(8) == (0,)
    assert box.said == ["T4 has no bf16: it trains in fp16 with a loss scale"]
    box = Box(monkeypatch, ("Instinct MI50", (6, 0), 16))
    monkeypatch.setattr(torch.version, "hip", "7.0")  # its numbers mean something else
    monkeypatch.setattr(torch.version, "cuda", None)
    assert box.cards(8) == (0,)
    assert "ROCm" in box.said[0]
    found = {check.name: check for check in machine_checks(find_machine())}
    assert "for ROCm 7.0" in found["torch"].text
    assert "ROCm" in found["gpu"].text


def test_a_gpu_without_tensor_cores_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(monkeypatch, OLD, GOOD)
    with pytest.raises(ConfigError, match=r"this GPU \(0: GTX 1080, compute capability 6.1\)") as raised:
        box.cards(8, torch.device("cuda:0"))
    assert "--device cpu" in raised.value.fix
    assert box.cards(8, torch.device("cuda:1")) == (1,)
    assert box.cards(8, torch.device("cpu")) == ()


def test_a_gpu_without_bf16_computes_in_fp16_but_not_beside_one_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = ("T4", (7, 5), 24)
    box = Box(monkeypatch, turing, turing)
    assert box.cards(batch=8) == (0, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert half_dtype(CUDA) == torch.float16
    assert half_dtype(torch.device("cpu")) == torch.bfloat16
    box = Box(monkeypatch, turing, GOOD, GOOD)
    assert box.cards(batch=8) == (1, 2)
    assert "GPU 0 computes in fp16, the others in bf16" in box.said[0]
    assert box.cards(8, torch.device("cuda:0")) == (0,)


def test_a_torch_without_kernels_for_the_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(monkeypatch, GOOD)

    def no_kernel(device: torch.device) -> str:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with")

    monkeypatch.setattr(devices, "_trial", no_kernel)
    with pytest.raises(ConfigError, match=r"cannot be used by torch .*no kernel image is available") as raised:
        box.cards(8)
    assert "\n" not in str(raised.value)


def test_the_doctor_says_which_gpus_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver", lambda: "")
    Box(monkeypatch, OLD)
    found = find_machine()
    for on_gpu, level in ((True, "failure"), (False, "warning")):
        (check,) = [check for check in machine_checks(found, on_gpu) if check.name == "gpu"]
        assert (check.level, check.fix) == (level, "use --device cpu")
        assert "compute capability 6.1" in check.text
    Box(monkeypatch, OLD, GOOD)
    assert [check.level for check in machine_checks(find_machine()) if check.name == "gpu"] == ["warning", "ok"]


def test_a_gpu_that_does_not_answer_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(monkeypatch, GOOD)

    def broken(device: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal state\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    (gpu,) = find_machine().gpus
    assert (gpu.total_bytes, gpu.trouble) == (0, "CUDA error: an illegal state")


def test_the_fullest_gpu_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(monkeypatch, GOOD, GOOD)
    box.free[1] = 3 * GIB
    assert measure(CUDA, 2, (0, 1)).free_bytes == 3 * GIB
    assert measure(torch.device("cuda:0"), 1).free_bytes == 24 * GIB


def test_ranks_measure_their_own_memory() -> None:
    with LocalRanks(2, torch.device("cpu")) as two:
        found = measure_ranks(torch.device("cpu"), two.ranks)
    assert (found.ranks, found.is_gpu) == (2, False)
    assert 0 < 2 * found.free_bytes <= found.total_bytes


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_is_set_unless_a_person_did(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in devices._ALLOCATOR_SETTINGS:
        monkeypatch.delenv(each, raising=False)
    choose_device("cpu")
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    choose_device("cpu")
    assert [os.environ.get(each) for each in devices._ALLOCATOR_SETTINGS].count("max_split_size_mb:64") == 1
    assert sum(each in os.environ for each in devices._ALLOCATOR_SETTINGS) == 1
