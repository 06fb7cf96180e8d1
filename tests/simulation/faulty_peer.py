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
    """While it lasts, nobody hears of a driver, by its calls or its answers; the leader of its start may."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._but_to_leader = True
        self._leader: PeerId | None = None

    def last(self, seconds: float, but_to_leader: bool) -> None:
        self._until, self._but_to_leader, self._leader = time.monotonic() + seconds, but_to_leader, None

    def put_on(self) -> None:
        from spes_p2p.consensus.actions import Send
        from spes_p2p.errors import PeerClosed
        from spes_p2p.sync.driver import Answers, Driver

        send, on_call = Driver.send, Answers.on_call

        def send_unless_mute(driver: Driver, action: Send) -> None:
            if self._may_speak_to(action.to, driver.core):
                send(driver, action)

        async def answer_unless_mute(answers: Answers, caller: PeerId, request: bytes) -> bytes:
            answer = await on_call(answers, caller, request)
            if not self._may_speak_to(caller, answers._core):
                raise PeerClosed("it is mute")
            return answer

        Driver.send = send_unless_mute  # type: ignore[assignment, method-assign]
        Answers.on_call = answer_unless_mute  # type: ignore[assignment, method-assign]

    def _may_speak_to(self, peer: PeerId, core: Consensus) -> bool:
        if time.monotonic() >= self._until:
            return True
        if not self._but_to_leader:
            return False
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
