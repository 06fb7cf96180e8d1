"""What all tests share: one torch thread in every process that uses torch, and nothing heavy for those that do not."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import settings

# How fast an example runs says nothing on a busy machine.
settings.register_profile("no deadline", parent=settings.default, deadline=None)
settings.load_profile("no deadline")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch and numpy when they load, here and in child processes
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton loads: its kernels run on the CPU here


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What long searches have seen (`record_property("told", ...)`) is printed at the end, also where they passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(f"{report.nodeid}:\n{value}")
