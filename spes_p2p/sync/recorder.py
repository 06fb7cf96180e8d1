"""The flight recorder: all that went into a peer's state machine of late, so that an incident can be played again.

Two files of bounded size that take turns. Each begins with all that the `Consensus` knew at that moment; then come its
inputs, one frame each, with a digest of what it decided. They hold addresses of nobody, peer ids of everybody, and no
values or data. A frame that was cut off by a crash is left out. `replay` plays a recording on a fresh `Consensus`.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spes_p2p.consensus.actions import Action
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.messages import Manifest, Signed
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.timing import Pace
from spes_p2p.errors import StateError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.plain import digest_bytes, pack_plain, state_of, unpack_plain
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
MAX_FILE_BYTES = 4 * 2**20
EVENTS = (
    *("receive", "tick", "trained", "reduced", "reduce_failed", "staged", "fetch_failed", "built", "verified"),
    *("verify_failed", "unstaged", "gone", "moved", "applied", "switched", "stays", "reborn"),
    *("catch_up_failed", "choose", "not_adopted", "disk_full", "disk_has_room", "wish", "greet", "uplink_measured"),
    "reply_to",
)
"""Methods of `Consensus` that are recorded; all others only ask. Nothing else may change a `Consensus`."""
NEWEST, BEFORE = "flight.recording", "flight-before.recording"
_BEGIN, _UNDONE = "begin 3", "undone"


class FlightRecorder:
    """Writes what a `Consensus` is given, and a digest of what it answers, into `folder`.

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
        self._answers: list[bool] = []
        self._inside = False
        self._size = 0
        self.failed: Exception | None = None
        """Why nothing is recorded any more: a full disk, say. The peer goes on without."""

    def attach(self, core: Consensus) -> None:
        """From here on every event of `core` is recorded."""
        self._core = core
        asked = core._on_chain

        def on_chain(head: Hash, round: int) -> bool:
            self._answers.append(asked(head, round))
            return self._answers[-1]

        core._on_chain = on_chain
        for name in EVENTS:
            if hasattr(core, name):
                setattr(core, name, self._recorded(name, getattr(core, name)))
        undone = core.undone

        def undo(whole: Callable[[Hash], bool]) -> None:
            before = set(core.round.verified)
            undone(whole)
            self._write([_UNDONE, list(before - core.round.verified), []])

        core.undone = undo  # type: ignore[method-assign]
        self._begin()

    def _recorded(self, name: str, event: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: Any) -> T:
            if self._inside or self.failed is not None:
                return event(*arguments)
            if self._size > self._max_file_bytes:
                self._begin()
            self._inside, self._answers = True, []
            arguments = tuple(list(a) if isinstance(a, Iterator) else a for a in arguments)
            try:
                decided = event(*arguments)
            finally:
                self._inside = False
            self._write([name, list(arguments), self._answers], decided)
            return decided

        return call

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
        self._write([_BEGIN, [pack(self._info), state_of(self._core)], []])

    def _write(self, frame: list[Any], decided: object = None) -> None:
        """Whatever goes wrong here ends the recording, not the peer."""
        if self.failed is not None:
            return
        try:
            data = pack_plain([*frame, _digest(decided)])
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
        self._say(f"the flight recorder stops until the next start: {error}; training goes on")


@dataclass(frozen=True)
class Frame:
    """One event, its arguments, what `on_chain` answered, and the digest of what was decided."""

    event: str
    arguments: list[Any]
    answers: list[bool]
    decided: bytes


@dataclass(frozen=True)
class Recording:
    """What one file holds."""

    info: RunInfo
    state: dict[str, Any]
    frames: list[Frame]


def load_recording(path: Path) -> Recording:
    """Raises StateError where the file is none; a torn tail is left out."""
    frames = [Frame(*unpack_plain(data)) for data in _whole_frames(path.read_bytes())]
    if not frames or frames[0].event != _BEGIN:
        raise StateError(f"{path} is no recording of a peer", fix=f"give a {NEWEST} of a peer's output folder")
    return Recording(unpack(RunInfo, frames[0].arguments[0]), frames[0].arguments[1], frames[1:])


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
class Played:
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


@dataclass
class _Answers:
    left: list[bool] = field(default_factory=list)

    def __call__(self, head: Hash, round: int) -> bool:
        return self.left.pop(0) if self.left else True


def replay(recording: Recording, rules: RunRules, core_class: type[Consensus] = Consensus) -> Iterator[Played]:
    """Plays a recording on a state machine that begins as the recorded one did."""
    core, answers = _core_of(recording, rules, core_class)
    for frame in recording.frames:
        if frame.event == _UNDONE:
            core.undone(lambda root: True)
            core.round.verified -= set(frame.arguments)
            continue
        before, answers.left, tip = core.fired.copy(), list(frame.answers), core.tip.round
        decided = getattr(core, frame.event)(*frame.arguments)
        fired = [name for name, count in (core.fired - before).items() for _ in range(count)]
        actions = decided if isinstance(decided, list) else []
        yield Played(frame, tip, actions, fired, _digest(decided) == frame.decided)


def _core_of(recording: Recording, rules: RunRules, core_class: type[Consensus]) -> tuple[Consensus, _Answers]:
    state, answers = recording.state, _Answers()
    tip: Manifest = state["round"].tip
    me: PeerId = state["me"]
    core = core_class(
        me, state["incarnation"], rules, _NoKeys(me), lambda *_: True, Pace(1.0), tip, 0.0, on_chain=answers
    )
    vars(core).update(state)
    return core, answers


def _digest(decided: Any) -> bytes:
    return sha256(digest_bytes(decided))[:8]
