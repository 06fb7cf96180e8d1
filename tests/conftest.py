"""What all tests share: one torch thread in every process that uses torch, and nothing heavy for those that do not."""

from __future__ import annotations

import gc
import importlib.util
import os
import runpy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How fast an example runs says nothing on a busy machine.
settings.register_profile("no deadline", parent=settings.default, deadline=None)
settings.load_profile("no deadline")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch and numpy when they load, here and in child processes
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def has_torch_for_cuda() -> bool:
    """Whether the installed torch was built for CUDA, without importing it: the variables above come first."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda") is not None


if shutil.which("nvidia-smi") is None or not has_torch_for_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton loads: its kernels run on the CPU here


LONGEST = (
    "tests/consensus/test_explorer.py",
    "tests/swarm/test_kill_anywhere.py",
    "tests/swarm/test_life_of_a_swarm.py",
    "tests/swarm/test_histories.py",
    "tests/simulation/test_chooser.py",
    "tests/cli/test_processes.py",
    "tests/swarm/",
    "tests/cli/test_join.py",
    "tests/test_api.py",
    "tests/train/test_zero",
    "tests/sync/test_kill_in_memory.py",
    "tests/sync/",
    "tests/simulation/",
    "tests/experts/test_compiled_kernels.py",
)
"""What takes minutes begins first, so that no worker is left alone with it at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run what is marked `thorough`, and all variants")


def unsampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """The variants of tests marked `sampled` that are left out."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for same in variants.values():
        mark = same[0].get_closest_marker("sampled")
        assert mark is not None
        wanted, last = mark.args[0], len(same) - 1
        kept = {round(at * last / max(1, wanted - 1)) for at in range(wanted)}
        left_out |= {item for at, item in enumerate(same) if at not in kept}
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--thorough` runs, and puts the rest in the order of `LONGEST`.

    `--dist loadfile --no-loadscope-reorder` hands out files in the order of their tests.
    """
    if not config.getoption("thorough"):
        deselected = {item for item in items if item.get_closest_marker("thorough")} | unsampled(items)
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]

    def place(item: pytest.Item) -> int:
        return next((at for at, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """All that was imported stays: nobody who collects garbage needs to walk through it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What long searches have seen (`record_property("told", ...)`) is printed at the end, also where they passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(f"{report.nodeid}:\n{value}")


IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Like `tmp_path`, for swarms whose disks are synced thousands of times: in memory where the system has a place."""
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as name:
        yield Path(name)
