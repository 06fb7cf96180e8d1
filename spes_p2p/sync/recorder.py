"""The flight recorder: all that went into a peer's state machine of late, so that an incident can be played again.

Two files that take turns. Each begins with the `State` at that moment; then come events up to a size, one
frame each, with a digest of what was decided. They hold addresses of nobody, peer ids of everybody, and no
values or data. A frame that was cut off by a crash is left out. `replay` handles them again.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

import msgpack

from spes_p2p.consensus import (
    actions,
    content,
    electorate,
    heard_votes,
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
from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import Signed
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.state import Identity, State
from spes_p2p.data import leases
from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
MAX_EVENT_BYTES = 4 * 2**20
"""Events of one file. The state before them does not count: a larger one would be written anew at each event."""
NEWEST = "flight.recording"
BEFORE = "flight-before.recording"
_BEGINS = "begin "
_EVENTS: dict[str, type[on.Event]] = {kind.__name__: kind for kind in get_args(on.Event)}


class FlightRecorder:
    """Writes the events of a `Consensus`, and a digest of what it decides, into `folder`.

    `say` hears once why nothing is recorded any more.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        max_event_bytes: int = MAX_EVENT_BYTES,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._newest = str(folder / NEWEST)
        self._info = info
        self._max_event_bytes, self._say = max_event_bytes, say
        self._size = 0
        self.failed: Exception | None = None
        """Why nothing is recorded any more: a full disk, say. The peer goes on without."""

    def attach(self, core: Consensus) -> None:
        """From here on every event of `core` is recorded."""
        self._core = core
        core.observer = self._note
        self._begin()

    def _note(self, event: on.Event, now: float, decided: list[Action]) -> None:
        if self.failed is not None:
            return
        self._write(lambda: [type(event).__name__, pack(event), now, _digest(decided)])
        if self._size > self._max_event_bytes:
            self._begin()

    def _begin(self) -> None:
        """A new file, in the place of the older one."""
        try:
            newest = self._folder / NEWEST
            if newest.exists():
                newest.replace(self._folder / BEFORE)
            newest.touch()
        except OSError as error:
            self._stop(error)
            return
        self._write(lambda: [_BEGIN, pack(self._info), self._core.me, self._core.state])
        self._size = 0

    def _write(self, frame: Callable[[], list[Any]]) -> None:
        """Whatever goes wrong here ends the recording, not the peer."""
        if self.failed is not None:
            return
        try:
            data = pack_plain(frame())
            data = len(data).to_bytes(4, "big") + zlib.crc32(data).to_bytes(4, "big") + data
            file = os.open(self._newest, os.O_WRONLY | os.O_APPEND)  # each time: who removed it is told so
            try:
                if os.write(file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._newest)
            finally:
                os.close(file)
        except (OSError, TypeError, OverflowError) as error:
            self._stop(error)
            return
        self._size += len(data)

    def _stop(self, error: Exception) -> None:
        self.failed = error
        self._say(f"the flight recorder stops until the next start: {error}; training continues")


@dataclass(frozen=True)
class Frame:
    """One event, when it came (seconds of that peer's clock), and the digest of what was decided."""

    event: on.Event
    now: float
    decided: bytes


@dataclass(frozen=True)
class Recording:
    """What one file holds: `state` lacks the identity, which `replay` makes anew."""

    info: RunInfo
    me: PeerId
    state: State
    frames: list[Frame]


def load_recording(path: Path) -> Recording:
    """Raises StateError where the file is none; a torn tail is left out."""
    packed = [*_whole_frames(path.read_bytes())]
    mark = _mark_in(packed[0]) if packed else ""
    if not mark.startswith(_BEGINS):
        raise StateError(f"{path} is not a recording", fix=f"give the {NEWEST} of a peer's folder")
    if mark != _BEGIN:
        raise StateError(f"{path} was recorded by another version of spes-p2p", fix="replay it with that version")
    first, *others = map(unpack_plain, packed)
    frames = [Frame(unpack(_EVENTS[name], data), now, decided) for name, data, now, decided in others]
    return Recording(unpack(RunInfo, first[1]), first[2], first[3], frames)


def _mark_in(frame: bytes) -> str:
    """The mark in a first frame, whose other values may be of classes that this version lacks."""
    try:
        found = msgpack.unpackb(frame, raw=False)
    except ValueError:
        return ""
    return str(found[1]) if isinstance(found, list) and len(found) > 1 else ""


def _whole_frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 8 <= len(data):
        size, check = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
        frame = data[at + 8 : at + 8 + size]
        if len(frame) != size or zlib.crc32(frame) != check:
            return
        yield frame
        at += 8 + size


@dataclass
class ReplayedEvent:
    """One event that was played again. `same`: the state machine decided what it did then."""

    frame: Frame
    round: int
    actions: list[Action]
    rules: list[str]
    same: bool


@dataclass
class _NoKeys:
    """Seals in the name of the peer that was recorded: signatures are not compared."""

    author: PeerId

    def seal(self, value: T) -> Signed[T]:
        return Signed(value, self.author, b"", b"")


def replay(recording: Recording, rules: RunRules, core_class: type[Consensus] = Consensus) -> Iterator[ReplayedEvent]:
    """Handles the events of a recording again, on a state machine that begins as the recorded one did."""
    state = copy.deepcopy(recording.state)
    state.identity = Identity(recording.me, rules, _NoKeys(recording.me), lambda *_: True)
    core = core_class(state)
    for frame in recording.frames:
        before, tip = core.fired.copy(), core.tip.round
        actions = core.handle(frame.event, frame.now)
        fired = [name for name, count in (core.fired - before).items() for _ in range(count)]
        yield ReplayedEvent(frame, tip, actions, fired, _digest(actions) == frame.decided)


def _digest(decided: Any) -> bytes:
    return sha256(digest_bytes(decided))[:8]


# ---- objects of the state machine as plain values and back ----
# Only classes of the list below are ever made from bytes; messages are packed and read as on the wire, which is much
# quicker. What is not the state machine's own (rules, keys, callables) is left out.

NOT_KEPT = frozenset({"identity"})
"""Fields of the state machine's `State` that are given to it: rules and keys."""
_SIGNATURES = frozenset({"signature", "public_key"})
_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_SEQUENCES: dict[str, Any] = {"t": tuple, "l": list, "s": set, "f": frozenset}
_MARKS = {kind: mark for mark, kind in _SEQUENCES.items()}


def _classes(*modules: ModuleType) -> dict[str, type]:
    named = [item for module in modules for item in vars(module).values() if dataclasses.is_dataclass(item)]
    return {kind.__name__: kind for kind in (*named, timing.Pace, timing.Window) if isinstance(kind, type)}


_CLASSES = _classes(
    vote_events, manifest, messages, content, electorate, heard_votes, vote, vote_record, actions,
    rules, state, liveness, membership, leases,
)  # fmt: skip
_ENUMS = {kind.__name__: kind for kind in (electorate.Faults, vote_events.Step, vote_events.Verdict)}
_MESSAGES = {
    name: _CLASSES[name] for name in _classes(manifest, messages, content) if name not in ("Signed", "Pace", "Window")
}
_MESSAGE_KINDS = frozenset(_MESSAGES.values())
_ON_THE_WIRE = "w"


def _mark_of(kinds: Iterable[type]) -> str:
    """How a recording begins: with the fields of all classes, since a state that lacks one is of another version."""
    fields = [[kind.__name__, *([field.name, str(field.type)] for field in dataclasses.fields(kind))] for kind in kinds]
    learnt = [sorted(vars(one)) for one in (timing.Pace(1.0), timing.Window())]
    return _BEGINS + sha256(msgpack.packb([sorted(fields, key=repr), learnt])).hex()[:16]


_BEGIN = _mark_of(kind for kind in {*_CLASSES.values(), *_EVENTS.values()} if dataclasses.is_dataclass(kind))


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
