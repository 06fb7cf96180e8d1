"""A swarm of real processes (`spes_p2p.quickstart.processes`) whose peers have planned faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from spes_p2p.quickstart.processes import BOOTSTRAP, Host, LocalSwarm, Process
from tests.simulation.faults import JUMP, ArmedFaults, Fault, in_environment

FAULTY_PROGRAM = "tests.simulation.faulty_peer"
ROOT = Path(__file__).parents[2]


class FaultySwarm(LocalSwarm):
    """`LocalSwarm` whose peers may be given faults. Those that happen once wait until `armed_faults.arm`."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        super().__init__(folder, environment, hosts)
        self.armed_faults = ArmedFaults(folder / "faults")

    def peer(
        self,
        name: str,
        data: Path | None = None,
        arguments: Sequence[str] = (),
        initial_peer: str | None = None,
        faults: Sequence[Fault] = (),
    ) -> Process:
        command = self.join_command(name, data, arguments, initial_peer)
        if not faults:
            return self._start(name, command)
        paths = [str(ROOT), *filter(None, [self._environment.get("PYTHONPATH")])]
        more = in_environment(name, self.armed_faults, faults) | {"PYTHONPATH": os.pathsep.join(paths)}
        return self._start(name, command, FAULTY_PROGRAM, more, any(fault.action == JUMP for fault in faults))

    def node(self, name: str, data: Path, arguments: Sequence[str], has_key: bool) -> Process:
        """Starts another node of the config, as on another machine: at most the organiser's key is in its folder."""
        folder = self.folder / name
        folder.mkdir()
        if has_key:
            shutil.copy(self.folder / BOOTSTRAP / "identity.key", folder)
        command = ["bootstrap", "--config", "tiny", "--output", str(folder), "--data", str(data)]
        return self._start(name, [*command, *arguments])
