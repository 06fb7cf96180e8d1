"""What happens in a peer, as a few typed events, and the bus that hands them to sinks (files, terminal, dashboards).

An event in JSON is one object with `event` (its kind) and `time` (Unix seconds) beside its fields. Numbers that are not
finite become null there. Nothing that watches may stop the training: a sink that fails is reported once and dropped,
one that has no disk space is asked again with the next event.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time as wall_time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

from spes_p2p.errors import SpesError, StorageFull


@dataclass(frozen=True)
class Step:
    """An inner step of this peer that was made, not skipped; one in `output.log_every_steps`."""

    event: ClassVar[str] = "step"
    step: int
    """Global step: the committed one plus the own steps of this round."""
    loss: float
    """Cross entropy, nats a token, without the auxiliary losses."""
    tokens: int
    """Of all steps since the event before, this one among them, all ranks of this peer together."""
    tokens_per_second: float
    """Over the same steps."""
    lr: float
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True)
class Round:
    """A certificate was applied here."""

    event: ClassVar[str] = "round"
    round: int
    step: int
    """Global step after the round."""
    roster_size: int
    commit: Literal["committed", "renewal"]
    tokens: int
    """Tokens that this round counted, all peers together."""
    bytes_sent: int
    bytes_received: int
    """`bytes_sent` and `bytes_received`: by this peer, in this round."""
    seconds: Mapping[str, float]
    """Duration of each phase."""
    model_hash: str
    """State root, hexadecimal."""
    merge_alpha: float = 0.0
    stale_columns: tuple[int, ...] = ()
    deadline_seconds: float = 0.0
    """Seconds without progress until the next leader would have taken over; adapts, see `consensus/timing.py`."""
    refused: tuple[str, ...] = ()
    """Peers whose values for some slice were not fit (not finite, far too large, of a wrong size), as known here."""
    lost_tokens: int = 0
    """Tokens of committed rounds of ours that are lost, because another history of the run won."""
    data_bytes_sent: int = 0
    data_bytes_received: int = 0
    """Token data to and from other peers; not part of `bytes_sent` and `bytes_received`."""
    handed_out: Mapping[str, int] = field(default_factory=dict)
    """Sequences of each dataset of a mixture that peers were given since the run began."""
    own_tokens: int = -1
    """Of `tokens`, those of this peer; -1 where an older version wrote the event."""
    own_share: float = -1.0
    """How much of what this peer gave counted, from 0 to 1; -1 where it is trusted, or gave nothing as yet."""


@dataclass(frozen=True)
class ExpertLoad:
    """How the router of this peer spread the tokens that it trained on for a round.

    One number for each expert: the (token, slot) pairs that went to it, over those of an even share. 1 is even, 0 is an
    expert that nothing went to.
    """

    event: ClassVar[str] = "expert_load"
    round: int
    """The round that this work was handed in for."""
    step: int
    tokens: int
    """Tokens that were counted, all ranks of this peer together."""
    mean: tuple[float, ...]
    """Over the layers."""
    highest: tuple[float, ...]
    lowest: tuple[float, ...]
    """In the layer where it is most, and least."""


@dataclass(frozen=True)
class Peer:
    """A peer came or went."""

    event: ClassVar[str] = "peer"
    change: Literal["joined", "left", "lost", "banned"]
    who: str
    round: int
    own: bool = False
    """Whether it is this peer."""


@dataclass(frozen=True)
class Columns:
    """This peer newly owns expert columns, and trains them, with fresh moments, from the round after this one on."""

    event: ClassVar[str] = "columns"
    round: int
    adopted: tuple[int, ...]


@dataclass(frozen=True)
class Pause:
    """This peer stopped training, or trains again; it serves the others all the while."""

    event: ClassVar[str] = "pause"
    paused: bool
    why: str
    """By key, schedule or battery; empty when it trains again."""


@dataclass(frozen=True)
class Eval:
    """Held-out loss of the committed model."""

    event: ClassVar[str] = "eval"
    round: int
    step: int
    loss: float
    """Cross entropy, nats a token."""
    tokens: int
    """That it was measured on."""


@dataclass(frozen=True)
class Note:
    """What a person wants to know, and is no problem."""

    event: ClassVar[str] = "note"
    message: str


@dataclass(frozen=True)
class Warning:  # noqa: A001 (the name of the event)
    """A problem that was solved without help, or that somebody should look at."""

    event: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True)
class Error:
    """A problem that was not solved by itself, with a fix."""

    event: ClassVar[str] = "error"
    message: str
    fix: str = ""

    @classmethod
    def of(cls, error: SpesError) -> Self:
        return cls(str(error), error.fix)


class LastError(Error):
    """With which the command ends, which says it itself."""


Event = Step | Round | ExpertLoad | Peer | Columns | Pause | Eval | Note | Warning | Error
KINDS: Mapping[str, type[Event]] = {kind.event: kind for kind in get_args(Event)}


def to_json(time: float, event: Event) -> str:
    """One line of `metrics.jsonl`, without the line end."""
    fields = {field.name: finite(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return json.dumps({"event": event.event, "time": time, **fields}, allow_nan=False)


def from_json(line: str | bytes) -> tuple[float, Event]:
    """(time, event) of one line. Raises ValueError where it is not an event that this version knows."""
    try:
        values = json.loads(line)
        kind = KINDS[values.pop("event")]
        time = float(values.pop("time"))
        return time, kind(**{name: _typed(name, value) for name, value in values.items()})
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an event: {line!r:.200}") from error


def finite(value: Any) -> Any:
    """`value` with every number that is not finite, which JSON cannot hold, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _typed(name: str, value: Any) -> Any:
    if value is None:  # only floats are ever written as null
        return math.nan
    return tuple(value) if isinstance(value, list) else value


class Sink(Protocol):
    """Where events go. `write` may raise StorageFull or OSError (asked again later), or anything else (dropped)."""

    def write(self, time: float, event: Event) -> None: ...

    def close(self) -> None: ...


MOST_EARLY = 256
"""Events that are kept for a screen which is not up yet."""


class EventBus:
    """Hands every event to all sinks, in one order, from any thread."""

    def __init__(self, *sinks: Sink, clock: Callable[[], float] = wall_time.time) -> None:
        self._sinks = list(sinks)
        self._early: deque[tuple[float, Event]] | None = deque(maxlen=MOST_EARLY)
        self._full: set[int] = set()
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, sink: Sink, with_early: bool = False) -> None:
        """`with_early`: the sink also gets the events emitted so far; works only for the first such sink."""
        with self._lock:
            early, self._early = (self._early or (), None) if with_early else ((), self._early)
            self._sinks.append(sink)
            said = [word for time, event in early if sink in self._sinks for word in self._write(sink, time, event)]
        for event in said:
            self.emit(event)

    def emit(self, event: Event) -> None:
        """Never raises."""
        with self._lock:
            time, waiting = self._clock(), deque([event])
            while waiting:
                current = waiting.popleft()
                if self._early is not None:
                    self._early.append((time, current))
                for sink in list(self._sinks):
                    waiting.extend(self._write(sink, time, current))

    def close(self) -> None:
        """Closes all sinks; later events go nowhere."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 (a sink's own trouble must not hide how the run ended)
                logging.getLogger(__name__).warning("%s did not close: %s", type(sink).__name__, error)

    def _write(self, sink: Sink, time: float, event: Event) -> list[Event]:
        """What there is to say of this sink afterwards."""
        name = type(sink).__name__
        try:
            sink.write(time, event)
        except (StorageFull, OSError) as error:
            known = id(sink) in self._full
            self._full.add(id(sink))
            fix = error.fix if isinstance(error, StorageFull) else ""
            return [] if known else [Error(f"{name} is losing events: {error}", fix)]
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on without this sink)
            self._sinks.remove(sink)
            return [Warning(f"{name} failed and has been turned off: {type(error).__name__}: {error}")]
        if id(sink) in self._full:
            self._full.discard(id(sink))
            return [Warning(f"{name} is working again")]
        return []
