#!/usr/bin/env python3
"""One MoE layer forward and backward: our backends beside transformers, MegaBlocks and the dense ceiling, in one run.

python scripts/bench_moe.py                    # the reference shape, and those of spes-1b and spes-9b, on a GPU
python scripts/bench_moe.py --shapes reference --owned 1/4 --only ours replica --routing skewed

Every row is one layer of the same shape on the same tokens with the same routing: experts alone, behind the router.
Gradients of weights are added to those that are there, as between micro-batches. `owned` is the share of experts with
weight gradients; others always have all. TFLOP/s count the products that a row must make (6, or 4 + 2 x owned, FLOP a
weight and row). The ceiling is one dense matrix product of the same FLOP. Times are medians. The replica is what
MegaBlocks' grouped dMoE computes, in plain torch, for machines where MegaBlocks does not build. On a CPU, and with
--tiny, a small shape runs, for the comparison alone. --json: one object a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.errors import ConfigError, first_line
from spes_p2p.experts.bank import MATRICES, ExpertBank
from spes_p2p.experts.choice import resolve_backend
from spes_p2p.experts.stores import Foreign, ForeignDtype, Workspace

GPU_SHAPES = {
    "reference": (8192, 2048, 2048, 32, 4),
    "one-sequence": (4096, 2048, 2048, 32, 4),
    "spes-1b": (8 * 2048, 768, 2048, 16, 2),
    "spes-9b": (2048, 2048, 2048, 64, 8),
}
CPU_SHAPES = {"small": (512, 128, 256, 8, 2)}
"""(tokens, d_model, expert ffn, experts, experts a token)."""
BACKENDS = ("grouped_mm", "triton", "quack", "megablocks", "eager")
FOREIGN_KINDS: tuple[ForeignDtype, ...] = ("int8", "nf4")
ROWS = ("dense", "ours", "quantised", "replica", "transformers", "megablocks")
ROUTINGS = ("even", "skewed", "empty")
"""Tokens evenly over experts, most of them with few, or half of the experts without any."""


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    d_model: int
    ffn: int
    experts: int
    top_k: int

    def flop(self, owned: Fraction) -> float:
        """Forward, gradient of the rows, and weight gradients of owned experts (evenly routed)."""
        products = self.tokens * self.top_k * 3 * self.d_model * self.ffn
        return float(products * 2 * (2 + owned))


@dataclass(frozen=True)
class Row:
    what: str
    owned: Fraction
    milliseconds: float
    peak_bytes: int
    tflops: float


class Inputs:
    """Tokens and a random routing, the same for everybody."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, routing: str = "even") -> None:
        generator = torch.Generator().manual_seed(0)
        scores_TE = torch.rand(shape.tokens, shape.experts, generator=generator)
        if routing == "skewed":
            scores_TE += torch.linspace(1, 0, shape.experts)
        elif routing == "empty":
            scores_TE[:, max(shape.top_k, shape.experts // 2) :] = -1
        weight_TK, expert_TK = scores_TE.softmax(-1).topk(shape.top_k)
        self.x_TD = torch.randn(shape.tokens, shape.d_model, generator=generator).to(device, dtype).requires_grad_()
        self.weight_TK = weight_TK.to(device).requires_grad_()
        self.expert_TK = expert_TK.to(device)
        self.dy_TD = torch.randn(shape.tokens, shape.d_model, generator=generator).to(device, dtype)


def main() -> int:
    chosen = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() and not chosen.tiny else "cpu")
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    if not chosen.json:
        print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {dtype}, median of {chosen.repeats}")
    for shape in (Shape(one, *values) for one, values in shapes.items() if one in (chosen.shapes or shapes)):
        if not chosen.json:
            print(f"\n{shape.name}: {shape.tokens} tokens, d {shape.d_model}, ffn {shape.ffn}, ", end="")
            print(f"{shape.experts} experts top-{shape.top_k}, routing {chosen.routing}")
            print(f"{'':34}{'owned':>6}{'ms':>9}{'TFLOP/s':>9}{'peak MiB':>10}")
        inputs = Inputs(shape, device, dtype, chosen.routing)
        for row in rows_of(shape, inputs, chosen.only, chosen.owned, chosen.repeats):
            if chosen.json:
                found = {"bench": "moe", "shape": shape.name, "routing": chosen.routing, **asdict(row)}
                print(json.dumps(found | {"owned": str(row.owned)}), flush=True)
                continue
            peak = f"{row.peak_bytes / 2**20:10.0f}" if device.type == "cuda" else f"{'-':>10}"
            print(f"{row.what:34}{row.owned!s:>6}{row.milliseconds:9.3f}{row.tflops:9.2f}{peak}", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*GPU_SHAPES, *CPU_SHAPES])
    parser.add_argument("--owned", nargs="+", type=Fraction, default=[Fraction(1), Fraction(1, 4), Fraction(1, 16)])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--routing", choices=ROUTINGS, default="even")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="the small shape, on the CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    return parser.parse_args()


def rows_of(shape: Shape, inputs: Inputs, only: list[str], shares: list[Fraction], repeats: int) -> Iterator[Row]:
    """Who can run here; who cannot is told in a line."""
    whole, device, dtype = Fraction(1), inputs.x_TD.device, inputs.x_TD.dtype
    if "dense" in only:
        yield measure("dense matrix product (ceiling)", shape, whole, dense(shape, device, dtype), device, repeats)
    for backend in BACKENDS if "ours" in only else ():
        for share in shares:
            with explained(backend):
                layer = ours(shape, share, backend, device, dtype)
                step = step_of(partial(routed, layer, inputs), inputs)
                yield measure(f"spes-p2p {backend}", shape, share, step, device, repeats)
                del layer, step  # their memory is no part of the next row
    for kind in FOREIGN_KINDS if "quantised" in only else ():
        with explained(f"foreign experts in {kind}"):
            foreign = Foreign(kind)
            quarter = ours(shape, Fraction(1, 4), "auto", device, dtype, foreign)
            step = step_of(partial(routed, quarter, inputs), inputs, foreign.workspace)
            yield measure(f"spes-p2p auto, foreign in {kind}", shape, Fraction(1, 4), step, device, repeats)
            del quarter, step, foreign
    baselines: dict[str, list[tuple[str, Callable[[], nn.Module]]]] = {
        "replica": [("replica of MegaBlocks grouped dMoE", partial(Replica, shape, device, dtype))],
        "transformers": [
            (f"transformers OLMoE {kind}", partial(transformers_experts, shape, kind, device, dtype))
            for kind in ("grouped_mm", "eager")
        ],
        "megablocks": [("MegaBlocks dMoE (experts alone)", partial(_MegaBlocks, shape, device, dtype))],
    }
    for label, build in (row for key, rows in baselines.items() if key in only for row in rows):
        with explained(label):
            theirs = build()
            step = step_of(partial(routed, theirs, inputs), inputs)
            yield measure(label, shape, whole, step, device, repeats)
            del theirs, step


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Says why something does not run here, and goes on."""
    try:
        yield
    except (ConfigError, ImportError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"{what}: does not run here: {first_line(error)}", file=sys.stderr)


def measure(
    what: str, shape: Shape, owned: Fraction, step: Callable[[], None], device: torch.device, repeats: int
) -> Row:
    for _ in range(5):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, stop in events:
            start.record()
            step()
            stop.record()
        torch.cuda.synchronize()
        milliseconds, peak = median(a.elapsed_time(b) for a, b in events), torch.cuda.max_memory_allocated()
    else:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        milliseconds, peak = 1000 * median(times), 0
    return Row(what, owned, milliseconds, peak, shape.flop(owned) / milliseconds / 1e9)


def step_of(
    forward: Callable[[Tensor], Tensor], inputs: Inputs, workspace: Workspace | None = None
) -> Callable[[], None]:
    """Forward and backward. What a `workspace` holds is forgotten before each, as other layers overwrite it."""

    def step() -> None:
        inputs.x_TD.grad = inputs.weight_TK.grad = None
        if workspace is not None:
            workspace.holds.clear()
        y_TD = forward(inputs.x_TD)
        if workspace is not None:
            workspace.holds.clear()
        y_TD.backward(inputs.dy_TD)

    return step


def routed(experts: nn.Module, inputs: Inputs, x_TD: Tensor) -> Tensor:
    """Through experts that are told where each token goes."""
    output: Tensor = experts(x_TD, inputs.expert_TK, inputs.weight_TK)
    return output


class Replica(nn.Module):
    """MegaBlocks' grouped dMoE with GLU in plain torch: sort, gather, three grouped products, a weighted sum of copies.

    It waits less for the device than the original, which reads the groups' sizes on the host.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = shape.experts
        self.w1, self.v1, self.w2 = (
            nn.Parameter(0.02 * torch.randn(shape.experts, shape.ffn, shape.d_model, device=device, dtype=dtype))
            for _ in range(3)
        )

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        tokens, top_k = expert_TK.shape
        bins, indices = torch.sort(expert_TK.flatten().int())
        ends = torch.searchsorted(bins, torch.arange(self.experts, device=bins.device), right=True, out_int32=True)
        x_ND = x_TD[indices // top_k]
        hidden_NF = F.silu(F.grouped_mm(x_ND, self.w1.mT, offs=ends)) * F.grouped_mm(x_ND, self.v1.mT, offs=ends)
        y_ND = F.grouped_mm(hidden_NF, self.w2, offs=ends)
        weighted_ND = y_ND * weight_TK.flatten()[indices, None].to(y_ND.dtype)
        spread_ND = torch.empty_like(y_ND).index_copy(0, indices, weighted_ND)
        return spread_ND.view(tokens, top_k, -1).sum(1)


def dense(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The same FLOP in nine plain products: forward, rows, weights, each of gate, up and down."""
    rows = shape.tokens * shape.top_k
    x, w = torch.randn(rows, shape.d_model), torch.randn(shape.d_model, shape.ffn)
    x, w, y = x.to(device, dtype), w.to(device, dtype), torch.randn(rows, shape.ffn).to(device, dtype)

    def step() -> None:
        for _ in range(3):
            _ = (x @ w, y @ w.T, x.T @ y)

    return step


def ours(
    shape: Shape,
    share: Fraction,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    foreign: Foreign | None = None,
) -> ExpertBank:
    owned = range(max(1, int(share * shape.experts)))
    found, _ = resolve_backend(backend, device, dtype)
    bank = ExpertBank(shape.experts, shape.d_model, shape.ffn, tuple(owned), found, device, dtype, foreign)
    for expert in range(shape.experts):
        for which in MATRICES:
            bank.load(expert, which, 0.02 * torch.randn(bank.shape_of(which), device=device))
    return bank


def transformers_experts(shape: Shape, implementation: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = OlmoeConfig(
        hidden_size=shape.d_model, intermediate_size=shape.ffn, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )  # fmt: skip
    config._experts_implementation = implementation
    experts = OlmoeExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


class _MegaBlocks(nn.Module):
    """Its dropless layer over grouped products, told where tokens go.

    Served by torch's grouped_mm where grouped_gemm is not installed.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        from megablocks import grouped_gemm_util
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        super().__init__()
        if grouped_gemm_util.ops is None:
            grouped_gemm_util.ops = _TorchGrouped()
            grouped_gemm_util.grouped_gemm_is_available = lambda: True
            grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
        arguments = Arguments(
            hidden_size=shape.d_model, ffn_hidden_size=shape.ffn, moe_num_experts=shape.experts,
            moe_top_k=shape.top_k, mlp_type="glu", mlp_impl="grouped", activation_fn=F.silu, bias=False,
            return_bias=False, device=device, bf16=dtype == torch.bfloat16, fp16=False, moe_loss_weight=0,
        )  # fmt: skip
        self.experts = dMoE(arguments).to(device, dtype).experts

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        output = self.experts(x_TD.unsqueeze(1), None, weight_TK.to(x_TD.dtype), expert_TK)
        return (output[0] if isinstance(output, tuple) else output).squeeze(1)


class _TorchGrouped:
    """`grouped_gemm.ops` by torch."""

    @staticmethod
    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        ends = batch_sizes.cumsum(0).to(a.device, torch.int32)
        return F.grouped_mm(a, b.mT if trans_b else b, offs=ends)


if __name__ == "__main__":
    sys.exit(main())
