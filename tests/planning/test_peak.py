"""The predicted peak against every tensor that a step really makes, counted one by one on the CPU.

What CUDA does in kernels of its own is stood in for by functions that allocate as these do: RMSNorm keeps its input
alone, SwiGLU makes nothing but its results, the softmax of the loss nothing at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._tools.mem_tracker import MemTracker

from spes_p2p.experts import swiglu
from spes_p2p.experts.masters import halves_of
from spes_p2p.model import output_loss
from spes_p2p.model.layers import RMSNorm, compute_dtype
from spes_p2p.model.params import masters_of
from spes_p2p.model.transformer import Transformer
from spes_p2p.planning.memory import BUFFERS, HEAD, LAST, OPTIMIZER, STEP, Workload, predict
from spes_p2p.train.optim import Optimizer
from tests.model.tiny import init_normal_
from tests.planning.runs import run_named

torch.set_num_threads(1)
SHAPE = (
    "model.d_model=128",
    "model.num_heads=4",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_ffn=256",
    "model.num_layers=3",
    "model.expert_backend=grouped_mm",
    "data.sequence_length=128",
    "optimizer.batch_sequences=8",
    "optimizer.micro_batch_sequences=4",
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 1.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy * 1.0, torch.zeros_like(ctx.saved_tensors[1])


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(self: RMSNorm, x: Tensor) -> Tensor:
        normed: Tensor = _Norm.apply(x.float(), self.weight)
        return normed.to(compute_dtype(x))

    def forward(gate_up: Tensor, weight: Tensor) -> Tensor:
        return gate_up.chunk(2, dim=1)[0].clone()

    def backward(d_hidden: Tensor, gate_up: Tensor, weight: Tensor, end: Tensor) -> swiglu.Gradients:
        return swiglu.Gradients(torch.zeros_like(d_hidden), torch.zeros_like(gate_up), torch.zeros_like(weight))

    def losses(logits: Tensor, *rest: Any) -> Tensor:
        return torch.zeros(2)

    monkeypatch.setattr(RMSNorm, "forward", norm)
    monkeypatch.setattr(output_loss, "row_losses", losses)
    monkeypatch.setattr(swiglu, "forward", forward)
    monkeypatch.setattr(swiglu, "backward", backward)


def lower_halves(model: Transformer) -> list[Tensor]:
    return [halves.lower for halves in map(halves_of, masters_of(model)) if halves is not None]


def peak_bytes(work: Workload) -> int:
    """Of two micro-batches under bf16 autocast, of all that lives at once: weights, gradients, activations."""
    model = Transformer(work.model, tuple(range(work.owned)), device="cpu", expert_dtype=torch.bfloat16)
    init_normal_(model, seed=0)
    model.add_gradients_in_place()
    tokens = torch.randint(0, work.model.vocab_size, (work.sequences, work.sequence_length))
    tracker = MemTracker()
    tracker.track_external(model, *lower_halves(model))
    with tracker:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens).total
            loss.backward()
            tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize(
    ("mode", "owned", "vocabulary", "moment"),
    [("none", 2, 500, LAST), ("selective", 8, 500, LAST), ("full", 2, 500, LAST), ("full", 4, 6000, HEAD)],
)
@pytest.mark.usefixtures("_kernels")
def test_the_peak_of_a_step_is_what_was_predicted(mode: str, owned: int, vocabulary: int, moment: str) -> None:
    shape = (*SHAPE, f"model.vocab_size={vocabulary}", f"model.activation_checkpointing={mode}")
    work = Workload.of(run_named("tiny", *shape), owned)
    memory = predict(work)
    predicted = memory.allocated - memory.parts[OPTIMIZER] - memory.parts[BUFFERS]
    assert memory.moment == moment
    assert predicted == pytest.approx(peak_bytes(work), rel=0.05)  # a product of the head is not added in place here


def test_the_peak_of_an_update_has_the_masters_of_one_layer_whole() -> None:
    owned, config = 8, run_named("tiny", *SHAPE, "data.sequence_length=16", "optimizer.micro_batch_sequences=1")
    work = Workload.of(config, owned)
    model = Transformer(config.model, tuple(range(owned)), device="cpu", expert_dtype=torch.bfloat16)
    init_normal_(model, seed=0)
    optimizer = Optimizer(config.optimizer)
    optimizer.rebuild(model, keep_moments=False, ramp_fresh=False)
    optimizer.reserve()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    moments = [one for group in optimizer.groups for kept in group.moments.values() for one in kept.values()]
    tracker = MemTracker()
    tracker.track_external(model, *lower_halves(model), *moments)
    with tracker:
        optimizer.step(1e-3)
    memory = predict(work)
    assert memory.moment == STEP
    measured = int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert memory.allocated - memory.parts[BUFFERS] == pytest.approx(measured, rel=0.01)
