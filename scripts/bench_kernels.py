#!/usr/bin/env python3
"""Every Triton kernel at the shapes of training: equal to plain torch in fp32, and how long it takes.

python scripts/bench_kernels.py          # on a GPU; a JSON object a kernel, exit code 1 where one differs
python scripts/bench_kernels.py --tiny   # on the CPU by Triton's interpreter, which multiplies fp32 alone

`error` is the largest difference from torch in fp32, over the largest value; bf16 alone rounds by 2^-8 of a value.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

TOLERANCE = 2e-2
REPEATS = 10
TOP_K = 4
FOREIGN_KINDS: tuple[Literal["int8", "nf4"], ...] = ("int8", "nf4")


@dataclass(frozen=True)
class Shape:
    rows: int
    d_model: int
    ffn: int
    experts: int
    vocabulary: int


REAL = Shape(rows=32768, d_model=2048, ffn=1024, experts=64, vocabulary=151_665)
TINY = Shape(rows=48, d_model=80, ffn=40, experts=4, vocabulary=130)
Check = tuple[str, Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]
"""(name, by the kernel, by torch in fp32)"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    tiny = parser.parse_args().tiny
    if tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = torch.device("cpu" if tiny else "cuda")
    different = False
    for name, kernel, torchs in checks(TINY if tiny else REAL, device):
        got, want = kernel(), torchs()
        errors = [float((left.float() - right).abs().max() / right.abs().max()) for left, right in zip(got, want)]
        del got, want
        equal = all(error <= TOLERANCE for error in errors)
        different |= not equal
        found = {"bench": "kernel", "what": name, "equal": equal, "error": max(errors)}
        print(json.dumps(found | {"milliseconds": milliseconds(kernel, 1 if tiny else REPEATS)}), flush=True)
    return int(different)


def checks(shape: Shape, device: torch.device) -> Iterator[Check]:
    from spes_p2p.experts import (
        dispatch_kernels,
        quantise_kernels,
        swiglu_kernels,
        triton_backend,
    )
    from spes_p2p.experts.dispatch import sort_by_slot
    from spes_p2p.experts.quantise import Quantised, dequantise, quantise
    from spes_p2p.model import softmax_loss_kernels

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    rows, backend = shape.rows, triton_backend.TritonGrouped()
    ends_E = torch.randint(rows, (shape.experts,), device=device, dtype=torch.int32).sort().values
    ends_E[1], ends_E[-1] = ends_E[0], rows  # one expert has nothing to do
    ranges = list(zip([0, *ends_E.tolist()[:-1]], ends_E.tolist()))
    x_ND, w_EFD = random(rows, shape.d_model), random(shape.experts, shape.ffn, shape.d_model)
    dy_NF = random(rows, shape.ffn)

    def rows_by_torch() -> tuple[Tensor]:
        return (torch.cat([x_ND[start:end].float() @ w_EFD[at].float().T for at, (start, end) in enumerate(ranges)]),)

    def outer_by_torch() -> tuple[Tensor]:
        return (torch.stack([dy_NF[start:end].float().T @ x_ND[start:end].float() for start, end in ranges]),)

    yield "grouped rows", lambda: (backend.rows(x_ND, w_EFD.mT, ends_E),), rows_by_torch
    yield "grouped outer", lambda: (backend.outer(dy_NF, x_ND, ends_E),), outer_by_torch

    gate_up_N2F, weight_N = random(rows, 2 * shape.ffn), torch.rand(rows, device=device)

    def swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up * weight[:, None]

    def swiglu_gradients() -> tuple[Tensor, ...]:
        gate_up, weight = gate_up_N2F.float().requires_grad_(), weight_N.clone().requires_grad_()
        hidden = swiglu(gate_up, weight)
        return hidden.detach(), *torch.autograd.grad(hidden, (gate_up, weight), dy_NF.float())

    yield (
        "swiglu forward",
        lambda: (swiglu_kernels.forward(gate_up_N2F, weight_N),),
        lambda: (swiglu(gate_up_N2F.float(), weight_N),),
    )
    yield (
        "swiglu backward",
        lambda: swiglu_kernels.backward(dy_NF, gate_up_N2F, weight_N, ends_E[-1:]),
        swiglu_gradients,
    )

    order = sort_by_slot(torch.randint(shape.experts, (rows // TOP_K, TOP_K), device=device), shape.experts)
    x_TD = x_ND[: rows // TOP_K]

    def gathered() -> tuple[Tensor]:
        return (dispatch_kernels.gather(x_TD, order.order_N, order.end_1(shape.experts), TOP_K),)

    yield "gather", gathered, lambda: (x_TD[order.order_N // TOP_K],)
    yield (
        "combine",
        lambda: (dispatch_kernels.combine(x_ND, order.inverse_TK),),
        lambda: (x_ND.float()[order.inverse_TK].sum(1),),
    )

    for kind in FOREIGN_KINDS:
        held = quantise(kind, w_EFD)

        def back(held: Quantised = held) -> tuple[Tensor]:
            out = torch.empty_like(w_EFD)
            quantise_kernels.dequantise(*held, out)
            return (out,)

        def back_by_torch(held: Quantised = held) -> tuple[Tensor]:
            return (dequantise(Quantised(*(tensor.cpu() for tensor in held)), torch.empty(w_EFD.shape)).to(device),)

        yield f"from {kind}", back, back_by_torch

    count, padded = min(rows, 1024), -(-shape.vocabulary // 64) * 64
    logits_nV = random(count, padded)
    logits_nV[:, shape.vocabulary :] = 0
    target_n = torch.randint(shape.vocabulary, (count,), device=device)
    counted_n = (torch.arange(count, device=device) % 3 > 0).float()

    def losses_by_kernel() -> tuple[Tensor, Tensor]:
        left = logits_nV.clone()
        return softmax_loss_kernels.row_losses(left, shape.vocabulary, target_n, counted_n, 1e-4, True), left

    def losses_by_torch() -> tuple[Tensor, Tensor]:
        logits = logits_nV.float().requires_grad_()
        real = logits[:, : shape.vocabulary]
        entropy = torch.nn.functional.cross_entropy(real, target_n, reduction="none") * counted_n
        squares = real.logsumexp(1).square() * counted_n
        (gradient,) = torch.autograd.grad(entropy.sum() + 1e-4 * squares.sum(), logits)
        return torch.stack((entropy.sum(), squares.sum())).detach(), gradient

    yield "softmax loss", losses_by_kernel, losses_by_torch


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median of a few runs, each waited for."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1000 * median(times)


if __name__ == "__main__":
    sys.exit(main())
