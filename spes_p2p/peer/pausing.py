"""When a peer trains: not while its owner pauses it, outside of the hours given, or on battery.

A paused peer gives up its expert columns and goes on as a seed: it votes, and serves what it has. `PauseSwitch`
collects the reasons, `PauseTriggers` looks at clock and battery. What a pause means for training is in `training.py`.
"""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import ConfigError

BY_KEY, SCHEDULE, BATTERY = "key", "schedule", "battery"
LOOK_SECONDS = 5.0
MINUTES = 24 * 60
_SPAN = re.compile(r"\s*(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)\s*", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """Spans of a day in minutes, local time; one that ends before it begins goes over midnight."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """`22:00-08:00`, or several with commas. Raises ConfigError."""
        spans = []
        for part in text.split(","):
            found = _SPAN.fullmatch(part)
            hours = [int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])] if found else [-1]
            fits = found and max(int(found[2]), int(found[4])) < 60 and max(hours) <= MINUTES
            if not fits:
                fix = "write it as 22:00-08:00, or 12:00-13:00,22:00-08:00"
                raise ConfigError(f"--schedule {text!r} is not a list of hours", fix=fix)
            if hours[0] == hours[1]:
                raise ConfigError(
                    f"--schedule {text!r} has hours that end when they begin",
                    fix="leave --schedule out to train all day, or give another end, as in 22:00-08:00",
                )
            spans.append((hours[0] % MINUTES, hours[1] % MINUTES))
        return cls(tuple(spans))

    def allows(self, minute: int) -> bool:
        """Whether to train in this minute of the day."""
        return any(
            first <= minute < last if first < last else minute >= first or minute < last for first, last in self.spans
        )

    def next_start(self, minute: int) -> str:
        """When training goes on, as HH:MM."""
        first = min((first for first, _ in self.spans), key=lambda first: (first - minute) % MINUTES)
        return f"{first // 60:02}:{first % 60:02}"


class PauseSwitch:
    """Collects the reasons why this peer is paused, if it is. Thread-safe; listeners run in the thread that changes it.

    Resuming by hand overrides the reasons that hold at that moment, until they no longer do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._why: dict[str, str] = {}
        self._overridden: set[str] = set()
        self.since = float("-inf")
        """When it last changed, monotonic seconds."""
        self._listeners: list[Callable[[str], None]] = []

    @property
    def why(self) -> str:
        """The reasons for the pause, as text for people; "" while the peer trains."""
        return ", ".join(text for name, text in self._why.items() if name not in self._overridden)

    @property
    def active(self) -> bool:
        return bool(self.why)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener` gets `why` whenever training should stop or go on."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Removes the listener, whose peer is about to end."""
        self._listeners = []

    def set(self, name: str, why: str) -> None:
        """A reason comes (`why` is what people read), or goes (empty)."""
        with self._lock:
            before = self.active
            if why:
                self._why = {**self._why, name: why}
            else:
                self._why = {known: text for known, text in self._why.items() if known != name}
                self._overridden.discard(name)
            now, text = self.active, self.why
        if now != before:
            self._tell(text)

    def toggle(self) -> None:
        """Pauses or resumes by hand, when the user presses the key."""
        with self._lock:
            if self.active:
                self._overridden = set(self._why) - {BY_KEY}
                self._why = {name: text for name, text in self._why.items() if name != BY_KEY}
            else:
                self._why = {**self._why, BY_KEY: "by key"}
            text = self.why
        self._tell(text)

    def wait(self, seconds: float) -> None:
        """Until something changes, no longer than `seconds`."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _tell(self, why: str) -> None:
        self.since = time.monotonic()
        self._changed.set()
        for listener in tuple(self._listeners):
            listener(why)


def minute_of_day() -> int:
    """By this machine's local time."""
    now = datetime.datetime.now().time()
    return now.hour * 60 + now.minute


def on_battery() -> bool | None:
    """None: this machine has no battery, or does not tell."""
    import psutil  # here, since who only looks at a run needs none

    battery = psutil.sensors_battery()
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


class PauseTriggers:
    """Sets the reasons of a switch by clock and battery: once when it is made, then every few seconds until closed."""

    def __init__(
        self,
        switch: PauseSwitch,
        schedule: Schedule | None,
        heed_battery: bool,
        minute: Callable[[], int] = minute_of_day,
        battery: Callable[[], bool | None] = on_battery,
    ) -> None:
        self._switch, self._schedule, self._heed_battery = switch, schedule, heed_battery
        self._minute, self._battery = minute, battery
        self._ended = threading.Event()
        self.look()
        if schedule is not None or heed_battery:
            threading.Thread(target=self._run, name="pauses", daemon=True).start()

    def look(self) -> None:
        if self._schedule is not None:
            minute = self._minute()
            allowed = self._schedule.allows(minute)
            self._switch.set(SCHEDULE, "" if allowed else f"until {self._schedule.next_start(minute)} (--schedule)")
        if self._heed_battery:
            self._switch.set(BATTERY, "on battery (--pause-on-battery)" if self._battery() else "")

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()
