"""What one micro-batch of the 7B run moves through memory, counted on tensors without values: a budget.

Each operation that torch would launch counts what it reads and writes once; kernels of our own count what they are
made to. No cache is thought of, so these are upper bounds, good for comparing one version with another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spes_p2p.experts import backends, stores, swiglu
from spes_p2p.experts.choice import resolve_backend
from spes_p2p.experts.dispatch import Order
from spes_p2p.experts.quantise import Quantised
from spes_p2p.model import output_loss
from spes_p2p.model.layers import RMSNorm, compute_dtype
from spes_p2p.model.transformer import Transformer
from tests.planning.runs import run_named

SEQUENCES, OWNED, EXPERTS = 2, 8, 32
FREE = ("device", "empty", "detach", "alias", "new_empty", "empty_like")
MAKES = ("zero_", "fill_", "new_zeros", "zeros_like", "ones_like", "full_like")


class Traffic(TorchDispatchMode):
    """Bytes and launches, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def add(self, name: str, *tensors: Tensor) -> None:
        self.bytes[name] += sum(map(_moved, tensors))
        self.launches[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE or name.startswith("_unsafe_view"):
            return result
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in MAKES:
            read = []
        elif name == "copy_":
            read = read[1:]
        elif name == "index_put_":  # touches the rows given alone
            read, written = [read[-1], read[-1]], [read[-1]]
        elif name in ("index_select", "embedding"):
            read = [*written, read[-1]]
        self.add(name, *read, *written)
        return result


def _moved(x: Tensor) -> int:
    return min(x.numel(), math.prod(size for size, step in zip(x.shape, x.stride()) if step)) * x.itemsize


@contextmanager
def own_kernels(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on CUDA: each is one launch that reads its inputs and writes its results."""

    def made(name: str, read: tuple[Tensor, ...], *results: Tensor) -> None:
        traffic.add(name, *read, *results)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            y = torch.empty_like(x)
            made("rms_norm", (x,), y)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            dx = torch.empty_like(x)
            made("rms_norm backward", (x, dy), dx)
            return dx, torch.empty_like(weight)

    def norm(self: RMSNorm, x: Tensor) -> Tensor:
        normed: Tensor = Norm.apply(x.float(), self.weight)
        return normed.to(compute_dtype(x))

    def forward(gate_up: Tensor, weight: Tensor) -> Tensor:
        hidden = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        made("swiglu", (gate_up, weight), hidden)
        return hidden

    def needed(end: Tensor, rows: Tensor) -> Tensor:
        """Those before `end`, with every expert chosen as often; `end` says of how many slots by where it lies."""
        slots = end.storage_offset() + 1
        return rows[: len(rows) * slots // EXPERTS]

    def backward(d_hidden: Tensor, gate_up: Tensor, weight: Tensor, end: Tensor) -> swiglu.Gradients:
        found = swiglu.Gradients(torch.empty_like(d_hidden), torch.empty_like(gate_up), torch.empty_like(weight))
        made("swiglu backward", (d_hidden, gate_up, weight), needed(end, found.hidden_NF), *found[1:])
        return found

    def gather(x: Tensor, order: Order, end: Tensor) -> Tensor:
        rows = x.new_empty(len(order.order_N), x.shape[1])
        made("gather", (needed(end, rows), needed(end, order.order_N)), needed(end, rows))
        return rows

    def combine(rows: Tensor, order: Order) -> Tensor:
        y = rows.new_empty(len(order.inverse_TK), rows.shape[1])
        made("combine", (rows, order.inverse_TK), y)
        return y

    def dequantise(quantised: Quantised, out: Tensor) -> Tensor:
        made("dequantise", tuple(quantised), out)
        return out

    def losses(logits: Tensor, *rest: Any) -> Tensor:
        made("softmax loss", (logits, logits), logits)
        return torch.empty(2)

    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "forward", norm)
        patch.setattr(output_loss, "row_losses", losses)
        patch.setattr(output_loss, "_adds_into_fp32", lambda device, dtype: True)
        patch.setattr(torch, "addmm", lambda into, left, right, **named: made("addmm", (left, right, into), into))
        patch.setattr(stores, "dequantise", dequantise)
        patch.setattr(backends, "gather_rows", gather)
        patch.setattr(backends, "sum_rows", combine)
        patch.setattr(swiglu, "forward", forward)
        patch.setattr(swiglu, "backward", backward)
        yield


Sums = Literal["by autograd", "in place"]


def of_micro_batch(layers: int, sums: Sums, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Traffic:
    """The second one of a step: gradients are there already."""
    config = run_named("spes-7b", f"model.num_layers={layers}", "model.expert_backend=grouped_mm", *overrides)
    resolve_backend("grouped_mm", torch.device("cpu"), torch.bfloat16)  # tried with values, once
    traffic = Traffic()
    with FakeTensorMode(allow_non_fake_inputs=True), own_kernels(traffic, monkeypatch):
        model = Transformer(config.model, tuple(range(OWNED)), device="cpu", expert_dtype=torch.bfloat16)
        if sums == "in place":
            model.add_gradients_in_place()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.empty(SEQUENCES, config.data.sequence_length, dtype=torch.int64)
        traffic.bytes.clear()  # what making the model took
        traffic.launches.clear()
        with traffic:
            with torch.autocast("cpu", torch.bfloat16):
                total = model(tokens).total
            total.backward()
    return traffic


def of_a_layer(sums: Sums, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Traffic, Traffic]:
    """A layer's, and that of what is there once."""
    one, two = (of_micro_batch(layers, sums, monkeypatch, *overrides) for layers in (1, 2))
    layer, rest = Traffic(), Traffic()
    for kind in ("bytes", "launches"):
        getattr(layer, kind).update(getattr(two, kind))
        getattr(layer, kind).subtract(getattr(one, kind))
        getattr(rest, kind).update(getattr(one, kind))
        getattr(rest, kind).subtract(getattr(layer, kind))
    return layer, rest


def test_bytes_and_launches_of_a_micro_batch_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 tokens, 8 of 32 columns. Lower the budget where a change saves; docs/performance.md has these figures."""
    layer, rest = of_a_layer("in place", monkeypatch)
    assert sum(layer.launches.values()) <= 142, layer.launches
    assert sum(layer.bytes.values()) <= 9.46e9, layer.bytes
    assert sum(rest.launches.values()) <= 71, rest.launches
    assert sum(rest.bytes.values()) <= 21.11e9, rest.bytes


def test_what_is_added_in_place_saves_what_autograd_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: tuple[Sums, ...] = ("in place", "by autograd")
    (layer, rest), (plain_layer, plain_rest) = (of_a_layer(way, monkeypatch) for way in ways)
    experts = OWNED * 3 * 2048 * 2048
    assert (
        sum(plain_layer.bytes.values()) - sum(layer.bytes.values()) == 8 * experts
    )  # a cast to fp32, and 2 bytes read
    assert sum(plain_rest.bytes.values()) - sum(rest.bytes.values()) > 12e9


@pytest.mark.parametrize(("kind", "value"), [("int8", 1 + 4 / 128), ("nf4", 0.5 + 4 / 64)])
def test_foreign_experts_are_read_once_and_written_once_a_pass(
    kind: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales read, two bytes written; of owned ones the fp32 masters read. Forward and backward pass."""
    plain, _ = of_a_layer("in place", monkeypatch)
    held, _ = of_a_layer("in place", monkeypatch, f"model.foreign_dtype={kind}")
    expert = 3 * 2048 * 2048
    more = 2 * expert * ((EXPERTS - OWNED) * (value + 2) + OWNED * (4 + 2))
    assert sum(held.bytes.values()) - sum(plain.bytes.values()) == more
    assert sum(held.launches.values()) - sum(plain.launches.values()) == 2 * 2 * 2  # passes, parts, owned and foreign
