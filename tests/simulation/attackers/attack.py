"""What a liar may choose: what it hands in, claims, takes from others, and says beside."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from spes_p2p.consensus.messages import Work
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.sync.driver import Driver


@dataclass(frozen=True)
class Liar:
    """A lying peer as it goes on, with all that it may use."""

    name: PeerId
    driver: Driver
    network: MemoryNetwork
    honest: tuple[PeerId, ...]
    heartbeat_seconds: float


class Attack:
    """An honest peer. Each attack changes what it must."""

    name: ClassVar[str]
    part: ClassVar[type | None] = None
    """Of its consensus the part that lies, in the place of the honest one (see `leaders`)."""

    def values(self, trained: Values, base: Values) -> Values:
        """What is handed in of a block. `trained`: by its own honest training; `base`: what the round began with."""
        return trained

    def work(self, work: Work, most_steps: int) -> Work:
        """What is claimed for it; of more than `most_steps` inner steps the rules count none."""
        return work

    def takes(self, peer: PeerId, liars: Collection[PeerId]) -> bool:
        """Whether it asks a contributor for its values; else it reports it as lost."""
        return True

    async def beside(self, liar: Liar) -> None:
        """What it does beside the rounds, for ever."""
