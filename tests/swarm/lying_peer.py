"""The program as a liar runs it: `spes-p2p`, but what it hands in or hands out is what the attack named in LIE makes.

It sees only what a real peer sees: its own training, and the state that the round began with.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterable
from typing import Any

import numpy as np

from spes_p2p.ids import Hash
from spes_p2p.quickstart.processes import PROGRAM
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.state.staging import TileData
from spes_p2p.sync.candidate_state import CandidateState
from spes_p2p.train.trainer import Trainer
from tests.simulation.attackers.attack import Scene
from tests.simulation.attackers.reducers import altered
from tests.simulation.attackers.trial import ATTACKS

LIE = "SPES_P2P_TEST_LIE"


def lie(name: str) -> None:
    """From now on this process attacks."""
    attack, rng = ATTACKS[name](), np.random.default_rng(0)
    adopt, contribution, write = Trainer.adopt, Trainer.contribution, CandidateState.write
    bases: list[BlockSource] = []

    def adopted(self: Trainer, owned: tuple[int, ...], values: BlockSource, *more: Any, **others: Any) -> None:
        bases[:] = [values]
        adopt(self, owned, values, *more, **others)

    def handed_in(self: Trainer, block: int) -> Values:
        trained = contribution(self, block)
        others = () if block else (trained,)  # who trains a column, it does not know; shared parameters all do
        return attack.values(Scene(np.array(bases[0].block(block)), trained, others, rng))

    def handed_out(self: CandidateState, first_tile: int, tiles: Iterable[TileData]) -> tuple[Hash, ...]:
        return write(self, first_tile, altered(attack, self, first_tile, tiles, rng))

    vars_of: Any = Trainer
    vars_of.adopt, vars_of.contribution = adopted, handed_in
    candidate: Any = CandidateState
    candidate.write = handed_out


if __name__ == "__main__":
    lie(os.environ[LIE])
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
