"""The held-out loss of the committed model: one peer measures it, in its turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import leader_order, trainers
from spes_p2p.data.loader import Batch, held_out_batches
from spes_p2p.errors import DataNotReady
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Eval, Event, Warning
from spes_p2p.peer.resume import TrainingSetup

WAIT_SECONDS = 10.0
"""Longest wait for held-out data that comes from other peers."""


class Evaluator:
    """Runs in the training thread; `is_stopping` says that the peer wants to end."""

    def __init__(
        self,
        me: PeerId,
        learning: TrainingSetup,
        emit: Callable[[Event], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._me = me
        self._config = learning.config
        self._trainer = learning.trainer
        self._dataset = learning.dataset
        self._emit = emit
        self._is_stopping = is_stopping

    def is_due(self, manifest: Manifest, has_it: bool) -> bool:
        """Whether this peer evaluates `manifest`; `has_it`: the model that it would load is the committed one."""
        every = self._config.eval.every_rounds
        return bool(every) and manifest.round % every == 0 and self._is_ours(manifest, has_it)

    def evaluate(self, manifest: Manifest) -> None:
        """The held-out loss of the model as it is loaded."""
        until = time.monotonic() + WAIT_SECONDS
        batches = held_out_batches(
            self._dataset,
            self._trainer.learner.config,  # with the micro-batch that fits by now
            self._config.eval.sequences,
            lambda: self._is_stopping() or time.monotonic() > until,
        )
        tokens = 0

        def counted() -> Iterator[Batch]:
            nonlocal tokens
            for batch in itertools.takewhile(lambda batch: not self._is_stopping(), batches):
                tokens += batch.tokens.size
                yield batch

        try:
            loss = self._trainer.evaluate(counted())
        except DataNotReady as error:
            if not self._is_stopping():
                self._emit(Warning(f"round {manifest.round} was not evaluated: {error}"))
            return
        if np.isfinite(loss) and not self._is_stopping():
            self._emit(Eval(manifest.round, manifest.step, loss, tokens))

    def _is_ours(self, manifest: Manifest, has_it: bool) -> bool:
        """Whether it is this peer's turn; without exchange it always is, since each peer has its own model."""
        if not self._config.sync.enabled:
            return True
        order = leader_order(manifest_hash(manifest), trainers(manifest.members))
        return order[:1] == (self._me,) and has_it
