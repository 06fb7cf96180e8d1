"""What a liar may choose: the values it hands in, the work it claims, the tiles it hands out as a reducer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spes_p2p.consensus.messages import Work
from spes_p2p.state.layout import Values


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


class Attack:
    """An honest peer. Each attack changes what it must."""

    name: ClassVar[str]

    def values(self, scene: Scene) -> Values:
        """What is handed in of a block."""
        return scene.trained

    def work(self, work: Work, most_steps: int) -> Work:
        """What is claimed for it; of more than `most_steps` inner steps the rules count none."""
        return work

    def reduced(self, tile_id: int, values: Values, rng: np.random.Generator) -> Values:
        """What is handed out as the mean of a tile. `rng`: of this liar, round and slice."""
        return values
