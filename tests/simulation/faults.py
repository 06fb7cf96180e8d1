"""Faults at named steps (`spes_p2p.failpoints`), planned beforehand and repeated exactly from a seed.

A `Fault` says who is hurt, where, in which round and how. The same faults work in memory (`MemoryFaults`, on the
virtual clock) and in real processes (`faulty_peer.py`, started by `FaultySwarm.peer(..., faults=...)`). What
comes of it is for the tests to judge.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from spes_p2p import failpoints
from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.exchange.requests import kind_of, unpack_request
from spes_p2p.ids import PeerId

if TYPE_CHECKING:
    from tests.simulation.memory_swarm import MemorySwarm, PretendPeer

KILL = "kill"
"""SIGKILL, there and then."""
FREEZE = "freeze"
"""SIGSTOP; somebody else thaws it (in memory after `seconds`, and only as others see it: its own timers go on)."""
SLOW = "slow"
"""Each time `seconds` longer, or, at an inner step, `factor` times as long."""
FAIL = "fail"
"""OSError, as a broken disk gives it."""
FULL = "full"
"""StorageFull: the disk has no room."""
JUMP = "jump"
"""The wall clock jumps by `seconds` (real processes only; monotonic clocks go on)."""
MUTE = "mute"
"""For `seconds` it speaks to nobody but the leader of its round (real processes only)."""
HUSH = "hush"
"""For `seconds` it speaks to nobody (real processes only)."""
ACTIONS = (KILL, FREEZE, SLOW, FAIL, FULL, JUMP, MUTE, HUSH)
WHILE_ARMED = -1
"""Times: each time while it is armed (real processes only)."""

LEADER_STEPS = ("close", "plan", "build", "proposal")
MEMBER_STEPS = (
    "stop_training", failpoints.READY, "reduce", failpoints.COLLECTED, failpoints.STAGE, failpoints.STAGED,
    "fetch", "verify", "prevote", failpoints.PERSIST, failpoints.PERSISTED,
    "certify", "adopt", failpoints.APPENDED, failpoints.PUBLISHED, failpoints.APPLIED,
    failpoints.SERVE + "values", failpoints.STREAM + " values", failpoints.SERVE + "tiles",
    failpoints.STREAM + " tiles",
)  # fmt: skip
"""Steps that every member passes in a round; a leader also LEADER_STEPS."""


@dataclass(frozen=True)
class Fault:
    """`action` happens to `peer` (to whoever comes first, if empty) when it reaches `step` in `round` or later.

    With `to`, only at steps that serve this peer (`failpoints.SERVE`, `failpoints.STREAM`). The first `skip` times that
    the step is reached go well; `times` faults follow (0: always from then on; see also WHILE_ARMED). With `after`,
    only in rounds in which the same peer has passed that step, or another fault of that kind has happened to it:
    `Fault(COLLECTED, after="plan")` is the leader's, right after its plan.
    """

    step: str
    action: str = KILL
    peer: str = ""
    round: int = 0
    skip: int = 0
    times: int = 1
    seconds: float = 0.0
    factor: float = 1.0
    to: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"a fault of kind {self.action!r}", fix=f"use one of {', '.join(ACTIONS)}")


def schedule(
    seed: int,
    peers: Sequence[str],
    rounds: Sequence[int],
    actions: Sequence[str] = (KILL,),
    at: Sequence[str] = MEMBER_STEPS,
) -> tuple[Fault, ...]:
    """One fault in each of `rounds`, at a step and to a peer drawn by `seed`; the same every time."""
    rng = random.Random(seed)
    return tuple(
        Fault(rng.choice(at), rng.choice(actions), rng.choice(peers), round, skip=rng.choice((0, 0, 1, 2)))
        for round in rounds
    )


def to_text(faults: Iterable[Fault]) -> str:
    """For a variable of the environment; `from_text` reads it."""
    return json.dumps([asdict(fault) for fault in faults])


def from_text(text: str) -> tuple[Fault, ...]:
    """Raises ConfigError for what `to_text` did not write."""
    try:
        return tuple(Fault(**fault) for fault in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{text[:80]!r} are no faults ({error})", fix="write them with faults.to_text") from error


Act = Callable[[Fault, str, Mapping[str, Any]], None]
Fits = Callable[[Fault, str], bool]


class Faults:
    """The listener: watches the steps go by and acts at those that were planned. A context manager.

    `me`: all steps are those of this peer, by this name. `fits(fault, peer)` may refuse a victim, before the step is
    counted as passed unharmed; `claim(fault, peer)` has the last word.
    """

    def __init__(
        self,
        planned: Iterable[Fault],
        act: Act,
        me: str = "",
        fits: Fits = lambda fault, peer: True,
        claim: Fits = lambda fault, peer: True,
    ) -> None:
        self._left = {fault: fault.times or -1 for fault in planned}
        self._skip = {fault: fault.skip for fault in self._left}
        self._act = act
        self._me = me
        self._fits = fits
        self._claim = claim
        self.rounds: dict[str, int] = {}
        """The round that each peer was making when it was last seen."""
        self._passed: dict[str, set[str]] = {}
        """Steps by peer, of the present round."""
        self._lock = threading.Lock()
        self.done: list[tuple[Fault, str]] = []
        """(fault, its victim), in the order in which they happened."""

    def __call__(self, step: str, facts: Mapping[str, Any]) -> None:
        if step == failpoints.STREAM:
            step = f"{step} {kind_of(unpack_request(facts['request']))}"
        peer = self._me or str(facts.get("peer", ""))
        for fault in self._due(step, peer, facts):
            self._act(fault, peer, facts)

    def _due(self, step: str, peer: str, facts: Mapping[str, Any]) -> list[Fault]:
        with self._lock:
            round, passed = self._enter(peer, facts)
            passed.add(step)
            due = []
            for fault in [fault for fault, left in self._left.items() if left and fault.step == step]:
                if (fault.peer and fault.peer != peer) or round < fault.round or not self._fits(fault, peer):
                    continue
                if (fault.to and fault.to not in (facts.get("to"), facts.get("caller"))) or not {fault.after} <= passed:
                    continue
                if self._skip[fault]:
                    self._skip[fault] -= 1
                    continue
                if not self._claim(fault, peer):
                    continue
                self._left[fault] -= 1
                passed.add(fault.action)
                self.done.append((fault, peer))
                due.append(fault)
            return due

    def _enter(self, peer: str, facts: Mapping[str, Any]) -> tuple[int, set[str]]:
        """(round that it is in, steps that it has passed there)."""
        before = self.rounds.get(peer, 0)
        round = self.rounds[peer] = facts.get("round", before)
        if round != before or peer not in self._passed:
            self._passed[peer] = {""}
        return round, self._passed[peer]

    def __enter__(self) -> Self:
        self._before = failpoints.listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        failpoints.listen(self._before)


# ---- real processes ----


PLANNED_VARIABLE = "SPES_P2P_FAULTS"
NAME_VARIABLE = "SPES_P2P_FAULTS_NAME"
FOLDER_VARIABLE = "SPES_P2P_FAULTS_FOLDER"


class ArmedFaults:
    """A folder shared by the processes of a swarm that says which faults are armed, and which process each has hit.

    A one-time fault must be armed, and hits the first process that reaches its step; a permanent one needs no arming,
    and one WHILE_ARMED is armed and disarmed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arm(self, fault: Fault) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(fault, "armed").touch()

    def is_armed(self, fault: Fault) -> bool:
        return self._path(fault, "armed").exists()

    def disarm(self) -> None:
        """Nothing more happens."""
        for path in self.folder.glob("*.armed"):
            path.unlink(missing_ok=True)

    def claim(self, fault: Fault, peer: str) -> bool:
        """Whether it is `peer` that it happens to; true for one caller only."""
        try:
            self._path(fault, "armed").rename(self._path(fault, f"hit-{peer}"))
        except FileNotFoundError:
            return False
        return True

    def victim(self, fault: Fault) -> str | None:
        """Whom it has hit."""
        hit = sorted(self.folder.glob(self._path(fault, "hit-*").name))
        return hit[0].suffix.removeprefix(".hit-") if hit else None

    def struck_at(self, fault: Fault) -> float:
        """When it happened: Unix seconds. Raises FileNotFoundError before that."""
        return self._path(fault, f"hit-{self.victim(fault)}").stat().st_ctime

    def _path(self, fault: Fault, state: str) -> Path:
        who, when = fault.peer or "anybody", f"{fault.after} {fault.round}".strip()
        return self.folder / f"{fault.action} at {fault.step} {who} {when}.{state}"


class ProcessFaults:
    """What faults do to the process that they happen in, once they are armed.

    `jump(seconds)` moves its wall clock, `mute(seconds, but_to_leader)` keeps it from speaking.
    """

    def __init__(
        self, armed_faults: ArmedFaults, jump: Callable[[float], None], mute: Callable[[float, bool], None]
    ) -> None:
        self._armed_faults = armed_faults
        self._jump = jump
        self._mute = mute

    def claim(self, fault: Fault, peer: str) -> bool:
        if fault.times == WHILE_ARMED:
            return self._armed_faults.is_armed(fault)
        return fault.times != 1 or self._armed_faults.claim(fault, peer)

    def __call__(self, fault: Fault, peer: str, facts: Mapping[str, Any]) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(fault.seconds + (fault.factor - 1) * facts.get("seconds", 0.0))
            case "jump":
                self._jump(fault.seconds)
            case "mute" | "hush":
                self._mute(fault.seconds, fault.action == MUTE)
            case _:
                raise_planted(fault)


def in_environment(name: str, armed_faults: ArmedFaults, planned: Iterable[Fault]) -> dict[str, str]:
    """Variables with which `tests/simulation/faulty_peer.py` is peer `name` with these faults."""
    return {PLANNED_VARIABLE: to_text(planned), NAME_VARIABLE: name, FOLDER_VARIABLE: str(armed_faults.folder)}


def raise_planted(fault: Fault) -> None:
    """The errors that a fault stands for."""
    if fault.action == FULL:
        raise StorageFull(f"no room at {fault.step!r} (planted)", fix="it is a test")
    if fault.action == FAIL:
        raise OSError(f"broken at {fault.step!r} (planted)")


# ---- in memory ----


class MemoryFaults(Faults):
    """Faults in a MemorySwarm. Await `settled` before the swarm is stopped or a victim comes back.

    `beside(victim)` names peers that die at the same moment.
    """

    def __init__(
        self,
        swarm: MemorySwarm,
        planned: Iterable[Fault],
        fits: Fits = lambda fault, peer: True,
        beside: Callable[[str], Iterable[str]] = lambda victim: (),
    ) -> None:
        def may_hit(fault: Fault, peer: str) -> bool:
            life = swarm.peers.get(PeerId(peer))
            return life is not None and life.is_up and life.joined and fits(fault, peer)

        super().__init__(planned, self._hurt, fits=may_hit)
        self._swarm = swarm
        self._beside = beside
        self._ending: list[asyncio.Task[None]] = []
        self.struck = asyncio.Event()
        """Set by the first fault."""
        self.struck_at = 0.0

    def __call__(self, step: str, facts: Mapping[str, Any]) -> None:
        if "folder" in facts:  # steps of a checkpoint know no peer
            place = Path(facts["folder"]).relative_to(self._swarm.folder)
            facts = {**facts, "peer": place.parts[0]}
        super().__call__(step, facts)

    async def settled(self) -> None:
        """All victims have ended."""
        await asyncio.gather(*self._ending)

    def _hurt(self, fault: Fault, peer: str, facts: Mapping[str, Any]) -> None:
        life = self._swarm.peers[PeerId(peer)]
        if not self.struck.is_set():
            self.struck_at = self._swarm.clock.now()
            self.struck.set()
        match fault.action:
            case "kill":
                for name in self._beside(peer):
                    self._kill(self._swarm.peers[PeerId(name)])
                self._kill(life)
                raise asyncio.CancelledError  # nothing after this point was ever done
            case "freeze":
                self._swarm.network.freeze(peer)
                asyncio.get_running_loop().call_later(fault.seconds, self._swarm.network.thaw, peer)
            case "slow":
                life.work.step_seconds *= fault.factor
            case _:
                raise_planted(fault)

    def _kill(self, life: PretendPeer) -> None:
        life.die()
        self._ending.append(asyncio.get_running_loop().create_task(life.kill()))
