"""The section `sync`: how what peers trained becomes one state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import field_validator, model_validator

from spes_p2p.codecs.sizes import Codec
from spes_p2p.config.sections import Positive, Schedule, Section, agreed
from spes_p2p.errors import ConfigError

MOST_TILE_VALUES = 2**26
MOST_ROUND_STEPS = 10**6
"""Weeks of steps of a second each: such a round would never end."""


class SyncConfig(Section):
    """The exchange that ends each round."""

    enabled: bool = agreed("False: peers never exchange anything (only for a control experiment).", True)
    steps_per_round: Positive | Schedule = agreed(
        "H, or a schedule [[until step, H], ..., [0, H]], where 0 means until the end."
    )
    codec: Codec = agreed(
        "How values are sent: fp32 sends them as they are; the others send changes, rounded to bf16, to 8 or 4 bits in "
        "small blocks, or to 1.7 bits (ternary: -1, 0 or 1 times a scale), and send later what was left out.",
        "fp32",
    )
    expert_codec: Codec = agreed("Codec for the values of expert columns (default: codec).")
    expert_rounds: Positive = agreed(
        "A column is handed out once in this many rounds, in turns; in between, its owners keep their own values "
        "and the others keep the last committed ones. Shared parameters are averaged in every round.",
        1,
    )
    vocabulary_rounds: Positive = agreed(
        "Embedding and head are averaged a part at a time, each value once in this many rounds; in between, each peer "
        "goes on from its own values. Other shared parameters are averaged in every round.",
        1,
    )
    overlap: bool = agreed(
        "Keep training while a round is synced; what was trained since its snapshot is added to the result. At "
        "most one round is in flight.",
        False,
    )
    merge_interval: Positive = agreed("Steps between two merges of similar experts.", 500)
    merge_alpha: float = agreed(
        "How far an expert moves towards its neighbours in a merge at step 0; 0 turns merges off.", 0.05, ge=0, le=1
    )
    merge_decay_steps: Positive = agreed("Step at which the merge has faded out.", 10_000)
    merge_top_k: Positive = agreed("Neighbours of an expert in a merge (at most E - 1 are taken).", 4)
    tile_values: Positive = agreed("Values of one tile, the unit of transfer and hashing.", 2**20, le=MOST_TILE_VALUES)
    slice_tiles: Positive = agreed("Most tiles that are reduced together.", 16)
    outer: Literal["none", "nesterov"] = agreed(
        "Outer optimizer for a round's averaged change, as in DiLoCo: none applies it as it is; nesterov is SGD with "
        "Nesterov momentum, which doubles the size of the state.",
        "none",
    )
    outer_lr: float = agreed("Learning rate of the outer optimizer (only with nesterov).", 0.7, gt=0, le=10)
    outer_momentum: float = agreed("Momentum of the outer optimizer (only with nesterov).", 0.9, ge=0, lt=1)

    @field_validator("steps_per_round")
    @classmethod
    def _is_no_endless_round(cls, value: int | Schedule) -> int | Schedule:
        longest = value if isinstance(value, int) else max((steps for _, steps in value), default=0)
        if longest > MOST_ROUND_STEPS:
            raise ConfigError(
                f"sync.steps_per_round is {longest} steps, more than a round can ever make",
                fix=f"set it to at most {MOST_ROUND_STEPS}",
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return {"expert_codec": data.get("codec", "fp32")} | data if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> SyncConfig:
        if isinstance(self.steps_per_round, tuple):
            _check_schedule(self.steps_per_round)
        if self.outer != "none" and self.vocabulary_rounds > 1:
            raise ConfigError(
                f"sync.outer is {self.outer}, whose steps are alike for all shared parameters, but "
                f"sync.vocabulary_rounds is {self.vocabulary_rounds}",
                fix="set sync.vocabulary_rounds=1, or sync.outer=none",
            )
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether a round leaves out values that are trained: who trains them is ahead of what is committed."""
        return max(self.expert_rounds, self.vocabulary_rounds) > 1


def _check_schedule(schedule: tuple[tuple[int, int], ...]) -> None:
    shown = [list(entry) for entry in schedule]
    if not schedule or schedule[-1][0] != 0:
        raise ConfigError(
            f"sync.steps_per_round is {shown}, but a schedule must not end",
            fix="make the last entry [0, H]: H for ever",
        )
    ends = [0, *(until for until, _ in schedule[:-1])]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise ConfigError(
            f"sync.steps_per_round is {shown}, but its steps must increase",
            fix="order it by step, for example [[100, 5], [300, 10], [0, 50]]",
        )
