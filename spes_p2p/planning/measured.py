"""What a setting that saves bytes or memory costs in held-out loss, where that was measured.

`measured.json` is written by scripts/make_measured.py from docs/savings.json; docs/results.md has the same as a table.
The model was small and its training short: an order in which to try things, and no promise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Effect:
    """Of one setting on the held-out loss, against the same run without it."""

    percent: float
    half_interval: float | None
    """Half of the 95% interval (Student's t) of `percent`; None of a single pair."""
    pairs: int
    """Seeds that were run with and without it."""

    def __str__(self) -> str:
        sure = "" if self.half_interval is None else f" ± {self.half_interval:.1f}"
        return f"{round(self.percent, 1) + 0.0:+.1f}{sure}%"  # + 0.0: no minus before a zero


@cache
def effects() -> Mapping[str, Effect]:
    """By the name that scripts/make_measured.py gives a setting."""
    told = json.loads(Path(__file__).with_name("measured.json").read_text())
    return {name: Effect(**effect) for name, effect in told.items()}
