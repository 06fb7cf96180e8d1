"""Copies and names of what one simulated peer knows, for a search that tries every continuation of a state.

A copy is as deep as what can change; frozen messages are shared, one object for each content. A name is equal exactly
where the knowledge is: times count from the present moment and status sequences from the present heartbeat, so that a
state that comes again later is the same state. Leaves out what a peer does (`small_peer`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import types
from collections import Counter
from collections.abc import Collection
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import msgpack

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import Signed, Status
from spes_p2p.consensus.state import Others
from spes_p2p.consensus.timing import Pace
from spes_p2p.consensus.vote_record import VoteRecord

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
BEAT_SECONDS = 1.0625
"""A little more than a heartbeat, and exact in binary: times do not drift however often they are shifted."""
OLDEST_SECONDS = 96 * BEAT_SECONDS
"""What is longer ago makes no difference any more: above every wait that a search can reach."""
SEQUENCES_A_BEAT = 1000
FIRST_SEQUENCE = 1_000_000
"""The sequence of a peer at the start of the present heartbeat."""
LOWEST_SEQUENCE = FIRST_SEQUENCE - 8 * SEQUENCES_A_BEAT

_SHARED = frozenset({"identity", "pace"})
_UNNAMED = _SHARED | {"last_broadcast", "statements"}
"""What no decision hangs on: `last_broadcast` repeats what the status said last; a manifest follows from many words."""


_WHEN_HEARD = {"at", "direct_at", "heard_at", "newest", "quorum_at"}
_SCALARS = frozenset((int, str, float, bool, type(None)))
_ATOMS = _SCALARS | {bytes, frozenset, types.FunctionType}


class FixedPace(Pace):
    """Deadlines that stay at their floors: what is learnt from a search in which time hardly passes means nothing."""

    def _learn(self, window: object, seconds: float) -> None:
        return

    def observe_round(self, seconds: float) -> None:
        return


class Frozen:
    """One object and one digest for each content of a frozen dataclass."""

    def __init__(self) -> None:
        self._by_content: dict[bytes, Any] = {}
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def one(self, value: T) -> T:
        """The object that stands for all equal ones."""
        known: T = self._by_content[self.digest(value)]
        return known

    def digest(self, value: Any) -> bytes:
        """Names the content of `value`."""
        known = self._digests.get(id(value))
        if known is not None:
            return known[1]
        name = hashlib.blake2b(type(value).__name__.encode() + _pack(value), digest_size=16).digest()
        if self._by_content.setdefault(name, value) is value:
            self._digests[id(value)] = (value, name)  # held for good: its id is not given to another
        return name


class Snapshots:
    """Copies, names and shifts states that are made of dictionaries, sets, dataclasses and `Consensus`s."""

    def __init__(self) -> None:
        self.frozen = Frozen()
        self._aged: dict[int, Any] = {}

    def clone(self, value: Any) -> Any:
        """A copy that shares only what never changes; dictionaries are in the order of their keys."""
        kind: Any = type(value)
        if kind in _ATOMS:
            return value
        how = _how(kind)
        if how == "frozen":
            return self.frozen.one(value)
        if how == "table":
            return kind({key: self.clone(value[key]) for key in sorted(value)}) if value else kind()
        if how == "list":
            return kind([self.clone(item) for item in value]) if value else kind()
        if how == "set":
            return set(value)
        return value if how == "scalar" else self._clone_object(value)

    def _clone_object(self, value: Any) -> Any:
        if isinstance(value, Consensus):
            return type(value)(self.clone(value.state))
        twin = object.__new__(type(value))
        for name, item in vars(value).items():
            twin.__dict__[name] = item if type(item) in _ATOMS or name in _SHARED else self.clone(item)
        return twin

    def name(self, value: Any, timeless: bool = False) -> bytes:
        """Equal for two values exactly where a peer that knows them would do the same.

        `timeless`: whatever was heard when.
        """
        parts: list[bytes] = []
        self._write(value, parts, timeless)
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()

    def _write(self, value: Any, parts: list[bytes], timeless: bool) -> None:
        kind: Any = type(value)
        how = _how(kind)
        if how == "scalar":
            parts.append(b"%a;" % (value,))
        elif how == "frozen":
            parts.append(self.frozen.digest(self._unnumbered(value) if timeless else value))
        elif how == "bytes":
            parts.append(b"%d:" % len(value))
            parts.append(value)
        elif how == "list":
            parts.append(b"(")
            for item in value:
                self._write(item, parts, timeless)
            parts.append(b")")
        elif how == "table":
            self._write_sorted(b"{", value.items(), parts, timeless)
        elif how == "set":
            self._write_sorted(b"<", value, parts, timeless)
        else:
            self._write_object(value, parts, timeless)

    def _write_object(self, value: Any, parts: list[bytes], timeless: bool) -> None:
        if isinstance(value, Consensus):
            value = value.state
        if not hasattr(value, "__dict__"):
            raise TypeError(f"a search cannot name {type(value).__name__} {value!r}")
        hidden = _UNNAMED | _WHEN_HEARD if timeless else _UNNAMED
        parts.append(type(value).__name__.encode() + b"[")
        for name, item in vars(value).items():
            if name in hidden:
                continue
            if type(item) in _SCALARS:
                parts.append(b"%a;" % (item,))
            else:
                self._write(item, parts, timeless)

    def _write_sorted(self, mark: bytes, items: Collection[Any], parts: list[bytes], timeless: bool) -> None:
        if not items:
            parts.append(mark + b">")
            return
        written = []
        for item in items:
            one: list[bytes] = []
            self._write(item, one, timeless)
            written.append(b"".join(one))
        parts += [mark, *sorted(written), b">"]

    def _unnumbered(self, value: Any) -> Any:
        if isinstance(value, Signed) and isinstance(value.value, Status):
            return dataclasses.replace(value, value=dataclasses.replace(value.value, sequence=0))
        return value

    # ---------------------------------------------------------------- time

    def age(self, core: Consensus) -> None:
        """Lets one heartbeat pass for a copy, in place: all that was, is so much longer ago."""
        core.state.own.sequence = FIRST_SEQUENCE
        self._age(core.state)

    def _age(self, value: Any) -> None:
        kind: Any = type(value)
        times = times_of(kind)
        for name, item in vars(value).items():
            if name in times:
                setattr(value, name, _older(item))
            elif name in _SHARED:
                continue
            elif isinstance(item, Signed | VoteRecord):
                setattr(value, name, self.aged(item))
            elif not _is_frozen(item.__class__) and dataclasses.is_dataclass(item):
                self._age(item)
        if isinstance(value, Others):
            for contact in value.contacts.values():
                self._age(contact)

    def aged(self, value: T) -> T:
        """A message as it reads a heartbeat later: sequences count from the present one."""
        value = self.frozen.one(value)
        if id(value) not in self._aged:
            self._aged[id(value)] = self.frozen.one(_with_earlier_sequences(value))
        known: T = self._aged[id(value)]
        return known


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_plain)
    return packed


def _plain(value: Any) -> list[Any]:
    if isinstance(value, Enum):
        return [value.name]
    if isinstance(value, frozenset):
        return sorted(value)
    return [getattr(value, name) for name in _fields(value.__class__)]


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in _UNNAMED)


@cache
def _how(kind: Any) -> str:
    """In which of seven ways values of a type are copied and named."""
    if kind is bytes:
        return "bytes"
    if kind in _SCALARS or issubclass(kind, Enum):
        return "scalar"
    if kind in (tuple, list):
        return "list"
    if kind in (dict, Counter):
        return "table"
    if kind in (set, frozenset):
        return "set"
    return "frozen" if _is_frozen(kind) else "object"


@cache
def _is_frozen(kind: Any) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


@cache
def times_of(kind: Any) -> frozenset[str]:
    """The fields of a dataclass that hold times. Raises TypeError for a float that is neither time nor duration."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name, annotation in kinds.items():
        if re.search(r"\bfloat\b", annotation):
            raise TypeError(f"a search does not know whether {kind.__name__}.{name} is a Moment or Seconds")
    return frozenset(name for name, annotation in kinds.items() if re.search(r"\bMoment\b", annotation))


def _older(time: Any) -> Any:
    if isinstance(time, dict):
        return {key: _older(at) for key, at in time.items()}
    return None if time is None else max(time - BEAT_SECONDS, -OLDEST_SECONDS) if time > float("-inf") else time


def _earlier(sequence: int) -> int:
    return max(sequence - SEQUENCES_A_BEAT, LOWEST_SEQUENCE)


def _with_earlier_sequences(value: Any) -> Any:
    """Statuses carry sequences."""
    if isinstance(value, Envelope):
        return dataclasses.replace(
            value,
            statuses=tuple(map(_with_earlier_sequences, value.statuses)),
        )
    if isinstance(value, Signed):
        said: Any = value.value
        if isinstance(said, Status):
            return dataclasses.replace(value, value=dataclasses.replace(said, sequence=_earlier(said.sequence)))
    return value
