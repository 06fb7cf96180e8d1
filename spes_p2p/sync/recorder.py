"""The flight recorder: all that went into a peer's state machine of late, so that an incident can be played again.

Two files of bounded size that take turns. Each begins with the `State` at that moment; then come the
events, one frame each, with a digest of what was decided. They hold addresses of nobody, peer ids of everybody, and no
values or data. A frame that was cut off by a crash is left out. `replay` handles them again.
"""

from __future__ import annotations

import copy
import errno
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from spes_p2p.consensus import events as on
from spes_p2p.consensus.actions import Action
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import Signed
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.state import Identity, State
from spes_p2p.errors import StateError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.plain import digest_bytes, pack_plain, unpack_plain
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
MAX_FILE_BYTES = 4 * 2**20
NEWEST, BEFORE = "flight.recording", "flight-before.recording"
_BEGIN = "begin 4"
_EVENTS: dict[str, type[on.Event]] = {kind.__name__: kind for kind in get_args(on.Event)}


class FlightRecorder:
    """Writes the events of a `Consensus`, and a digest of what it decides, into `folder`.

    `say` hears once why nothing is recorded any more.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        max_file_bytes: int = MAX_FILE_BYTES,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._newest = str(folder / NEWEST)
        self._info = info
        self._max_file_bytes, self._say = max_file_bytes, say
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
        if self._size > self._max_file_bytes:
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
        self._size = 0
        self._write(lambda: [_BEGIN, pack(self._info), self._core.me, self._core.state])

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
    first, *others = [unpack_plain(data) for data in _whole_frames(path.read_bytes())] or [None]
    if not isinstance(first, list) or first[0] != _BEGIN:
        raise StateError(f"{path} is not a recording", fix=f"give the {NEWEST} of a peer's folder")
    frames = [Frame(unpack(_EVENTS[name], data), now, decided) for name, data, now, decided in others]
    return Recording(unpack(RunInfo, first[1]), first[2], first[3], frames)


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
