"""Whether a change was trained on the text that its author says: what was trained on is remembered.

A model with another's change predicts the text that this was trained on better than text that nobody saw, and one with
our change our own text. The two models are alike in all else, so that on one sequence the difference of their losses
tells whose change remembers it, and how hard the sequence is hardly matters. What was not trained on that text (a copy
of another's work, noise, nothing at all, other labels) does not remember it, and a turned sign forgets it. How much is
to be expected shows in our own change: the same tiles, after the same round. Where that is not to be seen, nothing is
said. The sequences of a run come in a random order, so those of three leases differ by nothing else.

Over membership inference by a reference model (Carlini et al., arXiv 2112.03570) it has the data beforehand, and asks
for many sequences at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spes_p2p.config.schema import Config
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.consensus.probation import MOST_POSITIONS, SEQUENCES
from spes_p2p.data.leases import Ranges, count, take
from spes_p2p.data.loader import AnyDataset, leased_tokens
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.sync.surroundings import Text
from spes_p2p.train.judge import Samples, Trial

LEAST = 0.25
"""Of what our own change remembers, how much another's must: who trained a quarter of what it claims is not found."""
VISIBLE, SURE = 1.5, 3.0
"""Standard errors that our own memory must show for another to pass, and to fail: by chance no honest one must."""
FEWEST_SEQUENCES = 8


class Memory(NamedTuple):
    """How much better, in nats a token, a change predicts what it was trained on than text that nobody was: another's
    change and ours, and the standard error of ours."""

    theirs: float
    own: float
    error: float


class MemoryJudge:
    """The `WorkJudge` of a peer with a model of the run's own kind, on the CPU."""

    def __init__(self, config: Config, dataset: AnyDataset) -> None:
        self._config = config
        self._dataset = dataset

    def finding(self, base: BlockSource, theirs: Values, own: Values, text: Text) -> str | None:
        """See `WorkJudge`."""
        rng = np.random.default_rng(list(text.mark))
        kinds = [self._tokens(spans, most, rng, text.most_bytes) for spans, most in _looked_at(text)]
        if min(map(len, kinds)) < FEWEST_SEQUENCES:
            return None
        trial = Trial(self._config.model, base, torch.from_numpy(np.concatenate(kinds)))
        with_theirs, with_own = trial.losses({0: theirs}), trial.losses({0: own})
        if not np.isfinite(with_own).all():
            return None
        return verdict_on(memory_of(with_own - with_theirs, [len(kind) for kind in kinds]))

    def _tokens(self, spans: Ranges, most: int, rng: np.random.Generator, most_bytes: int) -> NDArray[np.int64]:
        """Of some of these positions [at most `most`, S]."""
        places = np.sort(rng.choice(count(spans), min(most, count(spans)), replace=False))
        starts = [take(spans, int(place))[1][0][0] for place in places]
        tokens = leased_tokens(self._dataset, self._config, np.array(starts, np.int64), most_bytes)
        return tokens[:, :MOST_POSITIONS]


def _looked_at(text: Text) -> tuple[tuple[Ranges, int], ...]:
    """Twice as many that nobody trained on: both memories are measured against those."""
    return (text.theirs, SEQUENCES), (text.own, SEQUENCES), (text.fresh, 2 * SEQUENCES)


def memory_of(differences: Samples, sizes: list[int]) -> Memory:
    """From the loss with our change less that with another's, on its text, ours, and what nobody trained on."""
    theirs, own, fresh = np.split(differences, np.cumsum(sizes)[:-1])
    error = math.sqrt(own.var(ddof=1) / len(own) + fresh.var(ddof=1) / len(fresh))
    return Memory(float(theirs.mean() - fresh.mean()), float(fresh.mean() - own.mean()), error)


def verdict_on(memory: Memory) -> str | None:
    """None where our own change shows no memory either."""
    if not math.isfinite(memory.theirs):
        return FAILED
    if memory.theirs > LEAST * memory.own:
        return PASSED if memory.own > VISIBLE * memory.error else None
    return FAILED if memory.own > SURE * memory.error else None
