"""What one peer looks like right now, folded from its events: the model behind every live display. Pure."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.observe.events import Error, Eval, Event, Note, Peer, Round, Step, Warning
from spes_p2p.observe.metrics import Ema
from spes_p2p.observe.text import line

_MESSAGES_KEPT = 5


class PeerView:
    """The newest numbers of one peer. None where nothing was heard yet.

    `steps_per_round(step)` is H of a round that starts at `step`; without it there is no time to the next sync.
    """

    def __init__(self, steps_per_round: Callable[[int], int] | None = None) -> None:
        self._steps_per_round = steps_per_round
        self.step = 0
        self.smooth_loss = Ema()
        self.tokens_per_second = Ema(0.3)
        self.round = 0
        self.round_step = 0
        """Global step at which the present round began."""
        self.roster_size: int | None = None
        self.commit: str | None = None
        self.model_hash = ""
        self.deadline_seconds: float | None = None
        """Seconds without progress that the newest round allowed its leader; it adapts, so it reflects the network."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.eval_loss: float | None = None
        self.eval_round = 0
        self.messages: tuple[str, ...] = ()
        """The newest last. Replaced as a whole, since a display may read it from another thread."""
        self._step_seconds = Ema(0.2)
        self._last_step_time: float | None = None

    def apply(self, time: float, event: Event) -> None:
        match event:
            case Step():
                self._apply_step(time, event)
            case Round():
                self._apply_round(event)
            case Eval():
                self.eval_loss, self.eval_round = event.loss, event.round
            case Peer() | Note() | Warning() | Error():
                self.messages = (*self.messages, line(event))[-_MESSAGES_KEPT:]

    def seconds_to_sync(self) -> float | None:
        """At the present speed; 0 while the sync is due."""
        if self._steps_per_round is None or self._step_seconds.value is None:
            return None
        left = self.round_step + self._steps_per_round(self.round_step) - self.step
        return max(0, left) * self._step_seconds.value

    def _apply_step(self, time: float, event: Step) -> None:
        if self._last_step_time is not None and event.step > self.step:
            self._step_seconds.add((time - self._last_step_time) / (event.step - self.step))
        self._last_step_time = time
        self.step = event.step
        self.smooth_loss.add(event.loss)
        self.tokens_per_second.add(event.tokens_per_second)

    def _apply_round(self, event: Round) -> None:
        self.round, self.round_step, self.step = event.round, event.step, event.step
        self.roster_size, self.commit, self.model_hash = event.roster_size, event.commit, event.model_hash
        self.deadline_seconds = event.deadline_seconds
        self.bytes_sent += event.bytes_sent
        self.bytes_received += event.bytes_received
        self._last_step_time = None  # the pause of the sync is not a step
