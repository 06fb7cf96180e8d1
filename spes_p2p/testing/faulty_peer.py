"""`python -m spes_p2p.testing.faulty_peer join ...`: the installed program, with faults that its environment plans.

See `testing/faults.py`; `LocalSwarm.peer(..., faults=...)` starts it.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path


class ShiftedClock:
    """Stands in for `time.time`, from before anybody imports it by name."""

    def __init__(self) -> None:
        self._real = time.time
        self._ahead_seconds = 0.0

    def __call__(self) -> float:
        return self._real() + self._ahead_seconds

    def jump(self, seconds: float) -> None:
        self._ahead_seconds += seconds


def main() -> None:
    clock = ShiftedClock()
    time.time = clock
    from spes_p2p.testing import faults

    armoury = faults.Armoury(Path(os.environ[faults.FOLDER_VARIABLE]))
    planned = faults.from_text(os.environ[faults.PLANNED_VARIABLE])
    acts = faults.ProcessFaults(armoury, clock.jump)
    with faults.Faults(planned, acts, os.environ[faults.NAME_VARIABLE], claim=acts.claim):
        runpy.run_module("spes_p2p.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
