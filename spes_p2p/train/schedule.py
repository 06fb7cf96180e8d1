"""Numbers that follow from the step alone: learning rate, ramp of newly owned columns, auxiliary loss factor.

Pure functions. Steps count from 1: the first inner step of a run is step 1, so that no step is taken with rate zero.
"""

from __future__ import annotations

import math

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Decay

RAMP_STEPS = 10
"""Optimizer steps over which the learning rate of fresh moments rises to the schedule's."""

_LOWEST_BALANCE = 0.7
_BALANCE_PART = 0.2
_BALANCE_INTERVAL = 500


def learning_rate(config: Config, step: int, decay: Decay | None = None) -> float:
    """Linear warm-up to `optimizer.lr`, then down to `min_ratio` of it at `total_steps`, where it stays.

    By a cosine, or with `wsd` linearly over the last `decay_steps`. With a `decay` from its first step on linearly from
    the rate that was planned for that step, and never above what is planned.
    """
    planned = _planned_rate(config, step)
    if decay is None or step <= decay.begin_step:
        return planned
    first = _planned_rate(config, decay.begin_step)
    lowest = min(first, config.scheduler.min_ratio * config.optimizer.lr)
    done = min(1.0, (step - decay.begin_step) / decay.steps)
    return min(planned, first + (lowest - first) * done)


def _planned_rate(config: Config, step: int) -> float:
    schedule, highest = config.scheduler, config.optimizer.lr
    if step < schedule.warmup_steps:
        first = schedule.warmup_ratio
        return highest * (first + (1.0 - first) * step / schedule.warmup_steps)
    is_cosine = schedule.name == "cosine"
    begin = schedule.warmup_steps if is_cosine else schedule.total_steps - schedule.decay_steps
    done = min(1.0, max(0.0, (step - begin) / (schedule.total_steps - begin)))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if is_cosine else 1.0 - done
    return highest * (schedule.min_ratio + (1.0 - schedule.min_ratio) * left)


def ramp(optimizer_steps: int) -> float:
    """Factor on the learning rate of moments that have seen `optimizer_steps` steps."""
    return min(1.0, (optimizer_steps + 1) / RAMP_STEPS)


def owned_balance_factor(config: Config, step: int) -> float:
    """Factor on the load-balancing term of owned experts (`decayed_aux_loss` of the SPES code, arXiv 2602.11543).

    Rises linearly from 0.7 to 1 over the first 20% of the run, in jumps every 500 steps.
    """
    if not config.optimizer.decayed_aux_loss:
        return 1.0
    done = step // _BALANCE_INTERVAL * _BALANCE_INTERVAL / (_BALANCE_PART * config.scheduler.total_steps)
    return min(1.0, _LOWEST_BALANCE + (1.0 - _LOWEST_BALANCE) * done)
