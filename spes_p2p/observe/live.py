"""What a volunteer sees of a running peer on one screen: a state, and a pure function from it to what rich draws.

Leaves out where the numbers come from (`LiveModel` folds events; `Facts` are asked of the peer) and the terminal itself
(`screen.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time as wall_time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spes_p2p.observe.events import Columns, Eval, Event, ExpertLoad, Pause, Round, Step
from spes_p2p.observe.metrics import bytes_text, count_text, seconds_text, span_text
from spes_p2p.observe.text import line, share_text
from spes_p2p.observe.view import PeerView

TRAINING, WAITING, READY, EXCHANGING, VOTING = "training", "waiting", "ready", "exchanging", "voting"
PHASES = {
    WAITING: "catching up; training begins at the end of a round, usually within minutes",
    TRAINING: "training",
    READY: "waiting for the others",
    EXCHANGING: "exchanging values",
    VOTING: "agreeing on the new state",
}
MESSAGES_SHOWN = 6
LOSSES_KEPT = 640
"""The newest steps, of which the curve is drawn."""
SPARK_CHARACTERS = 24
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Facts:
    """What the peer knows of itself and of its run right now, apart from its events.

    `done` of `total` of a phase: slices while values are exchanged. `rank` among `contributors` by tokens that were
    counted in the newest rounds (0: none yet). `swarm_tokens`: counted in the whole run.
    """

    phase: str = WAITING
    done: int = 0
    total: int = 0
    members: int = 0
    heard: int = 0
    columns: int = 0
    covered: int = 0
    owned: tuple[int, ...] = ()
    counted_rounds: int = 0
    rank: int = 0
    contributors: int = 0
    """Of this peer, in the whole run."""
    shares: tuple[float, float] | None = None
    """How much of what this peer gave counted, in the newest round and on average; None where it is trusted."""
    round: int = 0
    step: int = 0
    swarm_tokens: int = 0
    swarm_tokens_per_second: float = 0.0
    leaving: bool = False


@dataclass(frozen=True)
class LiveState:
    """All that the screen shows. `paused`: why, empty while it is not."""

    version: str
    run_id: str
    peer: str
    uptime_seconds: float = 0.0
    paused: str = ""
    facts: Facts = field(default_factory=Facts)
    step: int = 0
    round: int = 0
    round_steps: int = 0
    """Own steps of this round, of `steps_per_round`."""
    steps_per_round: int = 0
    tokens: int = 0
    """Trained here since the start."""
    tokens_per_second: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_round: int = 0
    losses: tuple[float, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_to_sync: float | None = None
    messages: tuple[str, ...] = ()
    keys: bool = False
    """Whether key presses are read, so that the screen may offer them."""
    invite: str = ""
    """The command that prints the newest invitation."""


def render_live(state: LiveState) -> RenderableType:
    """The screen, for any width from about 70 characters on."""
    return Group(
        _head(state),
        Rule(style="dim"),
        _two_columns(_share(state), _swarm(state)),
        Text(),
        _sync(state),
        Text(),
        *_messages(state),
        _foot(state),
    )


def sparkline(values: Sequence[float], characters: int = SPARK_CHARACTERS) -> str:
    """A line of blocks: the mean of each of `characters` stretches, from the lowest to the highest."""
    if not values:
        return ""
    count = min(characters, len(values))
    edges = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def _head(state: LiveState) -> RenderableType:
    left = Text.assemble((f"spes-p2p {state.version}", "bold"), f"   run {state.run_id}   peer {state.peer}")
    word, style = ("paused", "yellow") if state.paused else (state.facts.phase, "green")
    if state.facts.leaving:
        word, style = "leaving", "yellow"
    table = Table.grid(expand=True)
    table.add_column()
    table.add_column(justify="right")
    table.add_row(left, Text.assemble((word, style), f"   up {seconds_text(state.uptime_seconds)}"))
    return table


def _two_columns(left: RenderableType, right: RenderableType) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 2))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _facts_table(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row(Text(title, style="bold"), "")
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def _share(state: LiveState) -> RenderableType:
    facts, speed = state.facts, None if state.paused else state.tokens_per_second
    rank = f", rank {facts.rank} of {facts.contributors}" if facts.rank else ""
    if facts.shares is not None:
        rank = f", {facts.shares[0]:.0%} counted (mean {facts.shares[1]:.0%})"
    owned = f"{len(facts.owned)} of {facts.columns}" + (f": {span_text(facts.owned)}" if facts.owned else "")
    tokens = count_text(state.tokens)
    rows = [
        ("tokens", tokens + (f", {count_text(speed)} per second" if speed is not None else "")),
        ("rounds", f"{facts.counted_rounds} credited{rank}"),
        ("experts", owned if facts.columns else "-"),
        ("loss", "-" if state.loss is None else f"{state.loss:.4f} {sparkline(state.losses)}"),
        ("bytes", f"{bytes_text(state.bytes_sent)} sent, {bytes_text(state.bytes_received)} received"),
    ]
    return _facts_table("this peer", rows)


def _swarm(state: LiveState) -> RenderableType:
    facts = state.facts
    without = facts.columns - facts.covered
    cover = f"all {facts.columns} have an owner" if not without else f"{without} of {facts.columns} without owner"
    tokens = f"{count_text(facts.swarm_tokens)}, {count_text(facts.swarm_tokens_per_second)} per second"
    is_known, joins = bool(facts.columns), facts.phase == WAITING and not facts.leaving
    peers = f"{facts.members}, {facts.heard} online" + ("; this one is coming" if joins else "")
    rows = [
        ("peers", peers if is_known else "-"),
        ("round", f"{max(state.round, facts.round)}, step {max(state.step, facts.step):,}" if is_known else "-"),
        ("experts", cover if facts.columns else "-"),
        ("tokens", tokens if is_known else "-"),
        ("held-out", "-" if state.eval_loss is None else f"loss {state.eval_loss:.4f} (round {state.eval_round})"),
    ]
    return _facts_table("the swarm", rows)


def _sync(state: LiveState) -> RenderableType:
    facts, wait = state.facts, state.seconds_to_sync
    if facts.phase == TRAINING and not state.paused:
        done, total, unit = state.round_steps, state.steps_per_round, "steps"
        title = "next sync" if wait is None else "next sync now" if wait == 0 else f"next sync in {seconds_text(wait)}"
    else:
        done, total, unit, title = facts.done, facts.total, "slices", "this sync"
    what = f"paused: {state.paused}" if state.paused and facts.phase in (TRAINING, READY) else PHASES[facts.phase]
    what = "the others continue without this peer" if facts.leaving and facts.phase == WAITING else what
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=28)
    table.add_row(Text(title, style="bold"), "", "")
    if total:
        bar = ProgressBar(total=total, completed=min(done, total), width=32, style="dim", complete_style="green")
        table.add_row(f"  {what}", bar, f"{min(done, total)} of {total} {unit}")
    else:
        table.add_row(f"  {what}", "", "")
    return table


def _messages(state: LiveState) -> list[RenderableType]:
    if not state.messages:
        return []
    lines = [Text(f"  {message}", style="dim", overflow="ellipsis", no_wrap=True) for message in state.messages]
    return [Text("recent messages", style="bold"), *lines, Text()]


def _foot(state: LiveState) -> RenderableType:
    if state.facts.leaving:
        return Text("Ctrl-C: exit at once", style="dim")
    pause = "resume training" if state.paused else "pause training but keep serving others"
    keys = f"p: {pause}    q: leave" if state.keys else "Ctrl-C: leave"
    return Text(f"{keys}\nothers join with: {state.invite}" if state.invite else keys, style="dim")


@dataclass(eq=False)
class LiveModel:
    """Folds a peer's events into LiveStates. `write` is called by any thread, `state` by the one that draws."""

    _base: LiveState
    """What does not change."""
    _steps_per_round: Callable[[int], int]
    _facts: Callable[[], Facts]
    _clock: Callable[[], float] = wall_time.monotonic

    def __post_init__(self) -> None:
        self._view = PeerView(self._steps_per_round)
        self._started = self._clock()
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._tokens = 0
        self._paused = ""
        self.messages: tuple[str, ...] = ()
        """The newest ones, with their times."""
        self._is_round_newest = False
        """Whether the newest message is of a round: the next one takes its place."""

    def write(self, time: float, event: Event) -> None:
        self._view.apply(time, event)
        if isinstance(event, Step):
            self._tokens += event.tokens
            if math.isfinite(event.loss):
                self._losses.append(event.loss)
        if isinstance(event, Pause):
            self._paused = event.why if event.paused else ""
        if isinstance(event, Round) and event.own_tokens > 0:
            self.messages = self.messages[:-1] if self._is_round_newest else self.messages
            told = f"your {count_text(event.own_tokens)} tokens counted"
            told = told if event.own_share < 0 else f"{share_text(event.own_share)} of what you gave counted"
            self._note(time, f"round {event.round} committed, {told}")
            self._is_round_newest = True
        # what these tell is on the screen, or for those who read metrics
        if not isinstance(event, Step | Round | Eval | Columns | ExpertLoad):
            self._note(time, line(event))

    def say(self, text: str) -> None:
        """Adds a line of text that is not an event to the messages."""
        self._note(wall_time.time(), text)

    def last_words(self) -> str:
        """The summary that stays on the terminal after the screen is closed."""
        view = self._view
        trained = f"{count_text(self._tokens)} tokens trained here in {seconds_text(self._clock() - self._started)}"
        return f"round {view.round}, step {view.step:,}: {trained}"

    def state(self) -> LiveState:
        view = self._view
        return dataclasses.replace(
            self._base,
            uptime_seconds=self._clock() - self._started,
            paused=self._paused,
            facts=self._facts(),
            step=view.step,
            round=view.round,
            round_steps=view.step - view.round_step,
            steps_per_round=self._steps_per_round(view.round_step),
            tokens=self._tokens,
            tokens_per_second=view.tokens_per_second.value,
            loss=view.smooth_loss.value,
            eval_loss=view.eval_loss,
            eval_round=view.eval_round,
            losses=tuple(self._losses),
            bytes_sent=view.bytes_sent,
            bytes_received=view.bytes_received,
            seconds_to_sync=view.seconds_to_sync(),
            messages=self.messages,
        )

    def _note(self, time: float, text: str) -> None:
        self._is_round_newest = False
        clock = wall_time.strftime("%H:%M:%S", wall_time.localtime(time))
        self.messages = (*self.messages, f"{clock} {text}")[-MESSAGES_SHOWN:]
