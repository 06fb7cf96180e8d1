"""What a liar may choose: what it trains on, hands in, claims, reduces, finds as an auditor, and says beside."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spes_p2p.consensus.messages import Work
from spes_p2p.data.loader import Batch
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Values
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.sync.driver import Driver


@dataclass(frozen=True)
class Scene:
    """What a liar sees of one block as it hands in. It sees more than a network would show it: the worst case."""

    base: Values
    """What the round began with."""
    trained: Values
    """What its own honest training gave."""
    honest: tuple[Values, ...]
    """What those that do not lie have trained by now, on top of the same manifest."""
    rng: np.random.Generator
    """Of this liar, round and block."""

    @property
    def change(self) -> Values:
        """Of its own honest training."""
        return self.trained - self.base

    @property
    def honest_changes(self) -> Values:
        """One row a peer; its own change where nobody else trains the block."""
        return np.stack([values - self.base for values in self.honest] or [self.change])


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
    overrides: ClassVar[tuple[str, ...]] = ()
    """What of the run's config must be so for there to be something to attack."""
    part: ClassVar[type | None] = None
    """Of its consensus the part that lies, in the place of the honest one (see `leaders`)."""
    claims_column: ClassVar[bool] = False
    """Whether each liar claims an expert column, another one each."""

    def batch(self, batch: Batch, vocab_size: int) -> Batch:
        """What is trained on."""
        return batch

    def values(self, scene: Scene) -> Values:
        """What is handed in of a block."""
        return scene.trained

    def work(self, work: Work, most_steps: int) -> Work:
        """What is claimed for it; of more than `most_steps` inner steps the rules count none."""
        return work

    def takes(self, peer: PeerId, liars: Collection[PeerId]) -> bool:
        """Whether it asks a contributor for its values; else it reports it as lost."""
        return True

    def finding(self, is_liars: bool, finding: str | None) -> str | None:
        """What it says as an auditor of work in which it finds `finding`. `is_liars`: that work is a liar's."""
        return finding

    async def beside(self, liar: Liar) -> None:
        """What it does beside the rounds, for ever."""

    def reduced(self, values: Values, base: Values, rng: np.random.Generator) -> Values:
        """What is handed out as the mean of a tile. `base`: as committed; `rng`: of this liar, round and slice."""
        return values
