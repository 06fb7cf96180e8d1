"""Small helpers for numbers over time and numbers for people: averages, and short texts with units."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Ema:
    """Exponential moving average whose first value is exact. `weight` is that of a new value.

    Leaves out values that are not finite, of which it would never recover.
    """

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight
        self.value: float | None = None

    def add(self, value: float) -> float | None:
        if math.isfinite(value):
            self.value = value if self.value is None else self.value + self.weight * (value - self.value)
        return self.value


def amount_text(number: int, what: str) -> str:
    """(1, "peer") to "1 peer", (2, "peer") to "2 peers"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def count_text(count: float) -> str:
    """12345 to "12.3k"."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def bytes_text(count: float) -> str:
    """12345678 to "12.3 MB"."""
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def bytes_texts(*counts: float) -> list[str]:
    """All in the unit of the largest: 20200 and 4.7e6 to "0.02 MB" and "4.7 MB"."""
    unit = bytes_text(max(counts)).rpartition(" ")[2]
    size = 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
    if size == 1:
        return [bytes_text(count) for count in counts]
    return [f"{count / size:.{1 if count >= 0.1 * size else 2}f} {unit}" for count in counts]


def seconds_text(seconds: float) -> str:
    """75 to "1:15", 3700 to "1:01:40", 4.2 to "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span_text(numbers: Sequence[int]) -> str:
    """Rising numbers in short: (0, 1, 2, 5) to "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _scaled(count: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(count):
        return str(count)
    for unit in units[:-1]:
        if abs(count) < 999.5:
            return f"{count:.0f}{unit}" if unit == units[0] else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}{units[-1]}"
