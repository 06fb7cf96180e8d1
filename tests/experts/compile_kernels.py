"""Compiles every Triton kernel for GPUs that are not here, by the calls that training makes; a JSON object a kernel.

A process of its own, since the tests run kernels by Triton's interpreter. `ptxas` comes with Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from spes_p2p.experts import dispatch_kernels, quantise_kernels, swiglu_kernels
from spes_p2p.experts.quantise import Kind, quantise
from spes_p2p.experts.triton_backend import TritonGrouped
from spes_p2p.model import softmax_loss_kernels


class AbsentGpu:
    """A driver that only says which GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(capability: int) -> list[tuple[str, Any]]:
    """(name, kernel) of each launch."""
    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((self.__name__, run(self, *arguments, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    try:
        driver.set_active(AbsentGpu(capability))
        launch_all()
    finally:
        JITFunction.run = run
    return found


def launch_all() -> None:
    """As in training in bf16, with widths of the published shapes and few rows."""
    rows, width, ffn = 2, 2048, 1024
    gate_up_N2F, weight_N = torch.zeros(rows, 2 * ffn, dtype=torch.bfloat16), torch.zeros(rows)
    ends_E = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    swiglu_kernels.backward(swiglu_kernels.forward(gate_up_N2F, weight_N), gate_up_N2F, weight_N, ends_E)
    target_n, counted_n = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    for with_gradient in (True, False):
        logits_nV = torch.zeros(rows, 50_304, dtype=torch.bfloat16)
        softmax_loss_kernels.row_losses(logits_nV, 50_257, target_n, counted_n, 1e-4, with_gradient)
    x_ND, w_EFD = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(4, ffn, width, dtype=torch.bfloat16)
    values, out = torch.zeros(64, width), torch.zeros(64, width, dtype=torch.bfloat16)
    kinds: tuple[Kind, ...] = ("int8", "nf4")
    for kind in kinds:
        quantise_kernels.dequantise(*quantise(kind, values), out)
    order_N, backend = torch.zeros(4 * rows, dtype=torch.int64), TritonGrouped()
    dispatch_kernels.combine(dispatch_kernels.gather(x_ND, order_N, ends_E, 4), order_N.view(rows, 4))
    y_NF = backend.rows(x_ND, w_EFD.mT, ends_E)
    backend.rows(y_NF, w_EFD, ends_E)
    backend.add_outer(backend.outer(y_NF, x_ND, ends_E).float(), y_NF, x_ND, ends_E)


def spilled_bytes(ptx: str, capability: int) -> int:
    """What a thread keeps in memory for want of registers."""
    ptxas, arch = get_ptxas(capability).path, sm_arch_from_capability(capability)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [ptxas, "-v", f"--gpu-name={arch}", source.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for name, kernel in compiled(capability):
            ptx = kernel.asm["ptx"]
            report = {
                "capability": capability,
                "kernel": name,
                "cubin_bytes": len(kernel.asm["cubin"]),
                "spilled_bytes": spilled_bytes(ptx, capability),
                "shared_bytes": kernel.metadata.shared,
                "has_wide_loads": re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*, 0x10", ptx) is not None,
                "tensor_cores": re.search(r"\b(mma|wgmma)\b", ptx) is not None,
            }
            sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
