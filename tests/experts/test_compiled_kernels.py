"""Every Triton kernel compiles for the GPUs that people have, without one: to machine code that is as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compile_kernels.py")
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""What a block may use at most, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
PRODUCTS = ("_rows", "_outer")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the program says of each kernel for each GPU: one process, whose start is half of what a GPU costs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(PROGRAM), *map(str, SHARED_BYTES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_kernels_compile_with_wide_loads_and_without_spills(capability: int, compiled: list[dict[str, Any]]) -> None:
    kernels = [kernel for kernel in compiled if kernel["capability"] == capability]
    names = Counter(kernel["kernel"] for kernel in kernels)
    once = "_forward", "_backward", "_gather", "_combine", "_bytes", "_nibbles"
    twice = "_row_losses", *PRODUCTS
    assert names == dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["has_wide_loads"], kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["tensor_cores"] == (kernel["kernel"] in PRODUCTS), kernel
