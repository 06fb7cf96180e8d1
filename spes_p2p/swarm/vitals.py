"""Vitals: a few numbers of bounded size that a peer publishes in its own record for others to watch.

No decision rests on them, and nobody checks that they are true. 0 and "" mean unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spes_p2p.bounds import Bounded, between, length, matching

PHASES = ("train", "close", "reduce", "vote", "apply")
"""The parts of a round, in their order; `phase_seconds` has one number for each."""
LEAVING, LEFT = "leaving", "left"
"""Phases of a peer that goes, and in the last record that it publishes."""
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
Loss = Annotated[float, between(0, MAX_LOSS)]
Round = Annotated[int, between(0, MAX_ROUND)]
WallSeconds = Annotated[float, between(0, 2**40)]
"""Since 1970."""
Bytes = Annotated[int, between(0, MAX_BYTES)]
Loads = Annotated[tuple[Annotated[int, between(0, MAX_LOAD_PERCENT)], ...], length(0, MAX_EXPERTS)]


@dataclass(frozen=True)
class PeerWarning(Bounded):
    """A warning or an error of a peer, in short."""

    at_seconds: WallSeconds
    """By its clock."""
    kind: Annotated[str, matching("|".join(WARNING_KINDS))]
    message: Annotated[str, length(1, MAX_WARNING_CHARACTERS)]
    """Printable: neither line ends nor signs that turn the direction of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.message.isprintable():
            raise ValueError(f"message is {self.message[:80]!r}, which is not allowed")


@dataclass(frozen=True)
class Vitals(Bounded):
    """How one peer fares. Losses are nats a token, bytes are counted since it was started."""

    phase: Annotated[str, matching(r"[a-z ]{0,24}")] = ""
    """What it does right now."""
    device: Annotated[str, matching(r"[ -~]{0,64}")] = ""
    """What it trains on, for people."""
    loss: Loss = 0.0
    """Training loss, a moving mean over the newest steps."""
    timed_round: Round = 0
    """The newest round that it applied; the times, `round_loss` and the load of experts are of that round."""
    applied_at_seconds: WallSeconds = 0.0
    """By its clock."""
    phase_seconds: tuple[Annotated[float, between(0, MAX_SECONDS)], ...] = ()
    """As in PHASES, or nothing."""
    round_loss: Loss = 0.0
    """Mean training loss of its steps in that round."""
    bytes_sent: Bytes = 0
    bytes_received: Bytes = 0
    held_out_round: Round = 0
    """The newest round whose model it evaluated."""
    held_out_loss: Loss = 0.0
    load_percent: Loads = ()
    """Of each expert: the tokens that went to it in percent of an even share, mean over the layers; or nothing."""
    highest_load_percent: Loads = ()
    lowest_load_percent: Loads = ()
    """As `load_percent`, but in the layers with the highest (above) and the lowest load of each expert."""
    warnings: Annotated[tuple[PeerWarning, ...], length(0, MAX_WARNINGS)] = ()
    """The newest, the oldest of them first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.phase_seconds) not in (0, len(PHASES)):
            raise ValueError(f"phase_seconds has {len(self.phase_seconds)} numbers, not {len(PHASES)}")
        loads = (self.load_percent, self.highest_load_percent, self.lowest_load_percent)
        if len({len(load) for load in loads}) > 1:
            raise ValueError(
                f"the loads are of {[len(load) for load in loads]} experts, but these numbers must be equal"
            )
