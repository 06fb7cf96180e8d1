"""Objects of the state machine as plain values and back, for the flight recorder: state, inputs, actions.

Only classes of the list below are ever made from bytes; messages are packed and read as on the wire, which is much
quicker. Leaves out what is not the state machine's own: rules, keys, callables.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import msgpack

from spes_p2p.consensus import (
    actions,
    content,
    electorate,
    heard_votes,
    ledger,
    liveness,
    manifest,
    membership,
    messages,
    rules,
    state,
    timing,
    vote,
    vote_events,
    vote_record,
)
from spes_p2p.data import leases
from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.wire import pack, unpack

NOT_KEPT = frozenset({"identity"})
"""Fields of the state machine's `State` that are given to it: rules and keys."""
_SIGNATURES = frozenset({"signature", "public_key", "ready_signature"})
_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_SEQUENCES: dict[str, Any] = {"t": tuple, "l": list, "s": set, "f": frozenset}
_MARKS = {kind: mark for mark, kind in _SEQUENCES.items()}


def _classes(*modules: ModuleType) -> dict[str, type]:
    named = [item for module in modules for item in vars(module).values() if dataclasses.is_dataclass(item)]
    return {kind.__name__: kind for kind in (*named, timing.Pace, timing.Window) if isinstance(kind, type)}


_CLASSES = _classes(
    vote_events,
    manifest,
    messages,
    content,
    ledger,
    electorate,
    heard_votes,
    vote,
    vote_record,
    actions,
    rules,
    state,
    liveness,
    membership,
    leases,
)
_ENUMS = {kind.__name__: kind for kind in (electorate.Faults, vote_events.Step, vote_events.Verdict)}
_MESSAGES = {
    name: _CLASSES[name]
    for name in _classes(manifest, messages, content, ledger)
    if name not in ("Signed", "Pace", "Window")
}
_MESSAGE_KINDS = frozenset(_MESSAGES.values())
_ON_THE_WIRE = "w"


def pack_plain(value: Any) -> bytes:
    """The bytes of a value; the same for equal ones."""
    packed: bytes = msgpack.packb(_plain(value), use_bin_type=True)
    return packed


def digest_bytes(value: Any) -> bytes:
    """Bytes to tell values apart by, the same for equal ones; signatures and keys do not count."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_digest_parts)
    return packed


def unpack_plain(data: bytes) -> Any:
    """Raises StateError for what `pack_plain` never wrote."""
    try:
        return _value(msgpack.unpackb(data, raw=False, strict_map_key=True))
    except (
        ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
        RemoteProtocolError, msgpack.exceptions.UnpackException,
    ) as error:  # fmt: skip
        what = f"{type(error).__name__}: {error}"  # its repr may hold all that was read, nested too deeply to be shown
        raise StateError(f"not a recorded protocol state: {what}", fix="use another recording") from error


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind in _MESSAGE_KINDS:
        return [_ON_THE_WIRE, kind.__name__, pack(value)]
    if kind in _ENUMS.values():
        return ["e", kind.__name__, value.value]
    if mark := _MARKS.get(kind):
        items = [item if type(item) in _SCALARS else _plain(item) for item in value]
        return [mark, *(sorted(items, key=repr) if kind in (set, frozenset) else items)]
    if isinstance(value, dict):
        mark = "c" if isinstance(value, Counter) else "d"
        return [mark, *([_plain(key), _plain(item)] for key, item in value.items())]
    if isinstance(value, deque):
        return ["q", value.maxlen, *(_plain(item) for item in value)]
    name = kind.__name__
    if _CLASSES.get(name) is not kind:
        raise TypeError(f"{name} is not recorded")
    pairs = [(at, getattr(value, at)) for at in _names_of(kind) or vars(value) if at not in NOT_KEPT]
    return [name, *[[at, item if type(item) in _SCALARS else _plain(item)] for at, item in pairs]]


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; none of another class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _digest_parts(value: Any) -> Any:
    """What msgpack has no kind for: dataclasses by what counts of them, sets in an order."""
    kind: Any = type(value)
    return sorted(value, key=repr) if kind in (set, frozenset) else _counting(kind)(value)


@cache
def _counting(kind: type) -> Callable[[Any], Any]:
    """What gives the name of a dataclass and the fields that count."""
    names = [name for name in _names_of(kind) if name not in _SIGNATURES]
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not recorded")
    if len(names) < 2:
        return lambda value: [kind.__name__, *(getattr(value, name) for name in names)]
    fields = attrgetter(*names)
    return lambda value: [kind.__name__, *fields(value)]


def _value(plain: Any) -> Any:
    if type(plain) is not list:
        return plain
    mark, *items = plain
    if mark == _ON_THE_WIRE:
        return unpack(_MESSAGES[items[0]], items[1])
    if mark == "e":
        return _ENUMS[items[0]](items[1])
    if mark in _SEQUENCES:
        return _SEQUENCES[mark](_value(item) for item in items)
    if mark in ("d", "c"):
        pairs = {_value(key): _value(item) for key, item in items}
        return Counter(pairs) if mark == "c" else pairs
    if mark == "q":
        return deque((_value(item) for item in items[1:]), maxlen=items[0])
    made: Any = object.__new__(_CLASSES[mark])
    for name, item in items:
        object.__setattr__(made, name, _value(item))
    return made
