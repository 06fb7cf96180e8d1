"""`python -m tests.simulation.faulty_peer join ...`: the installed program, with faults that its environment plans.

See `tests/simulation/faults.py`; `FaultySwarm.peer(..., faults=...)` starts it.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spes_p2p.consensus.machine import Consensus
    from spes_p2p.ids import PeerId


class ShiftedClock:
    """Stands in for `time.time`, from before anybody imports it by name."""

    def __init__(self) -> None:
        self._real = time.time
        self._ahead_seconds = 0.0

    def __call__(self) -> float:
        return self._real() + self._ahead_seconds

    def jump(self, seconds: float) -> None:
        self._ahead_seconds += seconds


class Mute:
    """While it lasts, what a driver sends is lost, unless it goes to or comes from the leader of when it began."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._leader: PeerId | None = None

    def last(self, seconds: float) -> None:
        self._until, self._leader = time.monotonic() + seconds, None

    def put_on(self) -> None:
        from spes_p2p.consensus.actions import Send
        from spes_p2p.sync.driver import Driver

        send = Driver.send

        def send_unless_mute(driver: Driver, action: Send) -> None:
            if self._may_speak_to(action.to, driver.core):
                send(driver, action)

        Driver.send = send_unless_mute  # type: ignore[assignment, method-assign]

    def _may_speak_to(self, peer: PeerId, core: Consensus) -> bool:
        if time.monotonic() >= self._until:
            return True
        order = core.state.round.order
        self._leader = self._leader or order[core.state.round.vote.ballot % len(order)]
        return self._leader in (peer, core.me)


def main() -> None:
    clock = ShiftedClock()
    time.time = clock
    from tests.simulation import faults

    armed_faults = faults.ArmedFaults(Path(os.environ[faults.FOLDER_VARIABLE]))
    planned = faults.from_text(os.environ[faults.PLANNED_VARIABLE])
    mute = Mute()
    mute.put_on()
    acts = faults.ProcessFaults(armed_faults, clock.jump, mute.last)
    with faults.Faults(planned, acts, os.environ[faults.NAME_VARIABLE], claim=acts.claim):
        runpy.run_module("spes_p2p.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
