"""Vitals: a few numbers of bounded size that a peer publishes in its own record for others to watch.

No decision rests on them, and nobody checks that they are true. 0 and "" mean unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PHASES = ("train", "close", "reduce", "vote", "apply")
"""The parts of a round, in their order; `phase_seconds` has one number for each."""
MAX_LOSS = 1e6
MAX_SECONDS = 1e9
MAX_BYTES = 2**60
MAX_ROUND = 2**40
MAX_EXPERTS = 4096
MAX_LOAD_PERCENT = 100 * MAX_EXPERTS
"""Of an even share: all tokens to one of the most experts."""
MAX_WARNINGS = 3
MAX_WARNING_CHARACTERS = 160
WARNING_KINDS = ("warning", "error")
_PHASE = re.compile(r"[a-z ]{0,24}")
_DEVICE = re.compile(r"[ -~]{0,64}")


@dataclass(frozen=True)
class PeerWarning:
    """A warning or an error of a peer, in short."""

    at_seconds: float
    """By its wall clock, seconds since 1970."""
    kind: str
    """One of WARNING_KINDS."""
    message: str
    """Printable: neither line ends nor signs that turn the direction of text."""

    def __post_init__(self) -> None:
        if not 0 <= self.at_seconds <= 2**40:
            raise ValueError(f"at_seconds is {self.at_seconds}, not between 0 and {2**40}")
        if self.kind not in WARNING_KINDS:
            raise ValueError(f"kind is {self.kind[:40]!r}, not one of {WARNING_KINDS}")
        if not 0 < len(self.message) <= MAX_WARNING_CHARACTERS or not self.message.isprintable():
            raise ValueError(f"message is {self.message[:80]!r}, which is not allowed")


@dataclass(frozen=True)
class Vitals:
    """How one peer fares. Losses are nats a token, bytes are counted since it was started."""

    phase: str = ""
    """What it does right now."""
    device: str = ""
    """What it trains on, for people."""
    loss: float = 0.0
    """Training loss, a moving mean over the newest steps."""
    timed_round: int = 0
    """The newest round that it applied; the times, `round_loss` and the load of experts are of that round."""
    applied_at_seconds: float = 0.0
    """By its wall clock, seconds since 1970."""
    phase_seconds: tuple[float, ...] = ()
    """As in PHASES, or nothing."""
    round_loss: float = 0.0
    """Mean training loss of its steps in that round."""
    bytes_sent: int = 0
    bytes_received: int = 0
    held_out_round: int = 0
    """The newest round whose model it evaluated."""
    held_out_loss: float = 0.0
    load_percent: tuple[int, ...] = ()
    """Of each expert: the tokens that went to it in percent of an even share, mean over the layers; or nothing."""
    highest_load_percent: tuple[int, ...] = ()
    lowest_load_percent: tuple[int, ...] = ()
    """As `load_percent`, but in the layers with the highest (above) and the lowest load of each expert."""
    warnings: tuple[PeerWarning, ...] = ()
    """The newest, the oldest of them first."""

    def __post_init__(self) -> None:
        if not _PHASE.fullmatch(self.phase):
            raise ValueError(f"phase is {self.phase[:40]!r}, which is not allowed")
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device is {self.device[:80]!r}, which is not allowed")
        if len(self.phase_seconds) not in (0, len(PHASES)):
            raise ValueError(f"phase_seconds has {len(self.phase_seconds)} numbers, not {len(PHASES)}")
        if len(self.warnings) > MAX_WARNINGS:
            raise ValueError(f"{len(self.warnings)} warnings, more than {MAX_WARNINGS}")
        loads = (self.load_percent, self.highest_load_percent, self.lowest_load_percent)
        if len({len(load) for load in loads}) > 1 or len(self.load_percent) > MAX_EXPERTS:
            raise ValueError(
                f"the loads are of {[len(load) for load in loads]} experts, but these numbers must be equal"
            )
        for name, value, most in (
            ("loss", self.loss, MAX_LOSS),
            ("round_loss", self.round_loss, MAX_LOSS),
            ("held_out_loss", self.held_out_loss, MAX_LOSS),
            ("timed_round", self.timed_round, MAX_ROUND),
            ("held_out_round", self.held_out_round, MAX_ROUND),
            ("applied_at_seconds", self.applied_at_seconds, 2**40),
            ("bytes_sent", self.bytes_sent, MAX_BYTES),
            ("bytes_received", self.bytes_received, MAX_BYTES),
            *(("phase_seconds", seconds, MAX_SECONDS) for seconds in self.phase_seconds),
            *(("a load", percent, MAX_LOAD_PERCENT) for load in loads for percent in load),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}, not between 0 and {most}")
