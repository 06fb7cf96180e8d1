"""What the fields of a record may hold, said beside their types: `round: Annotated[int, between(0, MAX_ROUND)]`.

Everybody can send a record, so one that is out of bounds is refused when it is made and when it is read (`wire.unpack`
turns the ValueError into a RemoteProtocolError).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

Check = Callable[[str, Any], None]
"""Is given a field's name and value; raises ValueError."""


def between(low: float, high: float) -> Check:
    """A number from `low` to `high`."""

    def check(name: str, value: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, not between {low} and {high}")

    return check


def length(low: int, high: int) -> Check:
    """So many bytes, characters or items."""
    in_range = between(low, high)
    return lambda name, value: in_range(f"the length of {name}", len(value))


def matching(pattern: str) -> Check:
    """A text that this regular expression describes as a whole."""

    def check(name: str, value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{name} is {value[:80]!r}, which is not allowed")

    return check


class Bounded:
    """Base of frozen dataclasses: raises ValueError for a field that is not within the bounds of its annotation."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks_of(kind):
            check(name, getattr(self, name))


@cache
def _checks_of(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, check) for name, hint in hints.items() for check in _checks_in(hint))


def _checks_in(hint: Any) -> Iterator[Check]:
    """Those of a value with this annotation; of a tuple its own first, then those of its items."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        hint = hint.__origin__
    if get_origin(hint) is tuple and get_args(hint)[1:] == (Ellipsis,):
        yield from (partial(_check_each, check) for check in _checks_in(get_args(hint)[0]))


def _check_each(check: Check, name: str, items: tuple[Any, ...]) -> None:
    for item in items:
        check(f"one of {name}", item)
