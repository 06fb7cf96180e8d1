"""What a peer must remember of the protocol over a restart: the chain of commits, its votes, its incarnation.

One file a commit, so that headers are served without parsing; the voting record in a file of its own, replaced at each
vote. Another history can take the place of ours at any time: who reads by number, in another thread than the one that
writes, asks for what may not be there any more. Tensors are the state store's business.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.child_checks import check_commit
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Certificate, Commit
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError, StateError, StorageFull
from spes_p2p.files import sync, write_whole
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.sync.genesis import RunInfo, check_genesis
from spes_p2p.wire import pack, unpack, unpack_first

_COMMIT = re.compile(r"(\d{8,})\.commit")
READ_AT_START = 64
"""So many of the newest commits are read at a start: what is damaged of them can be had from others then."""
_JOIN_AGAIN = (
    "start it again while others of the run are up, or copy the file from another node's folder; a peer may also "
    "remove the run's folder and join again, but the organiser's node would begin the run a second time"
)


class CommitFiles:
    """The folder of a chain: a file a commit, by round, and a switch of the last of them that survives a crash."""

    def __init__(self, directory: Path, mends: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._switch = directory / "switch"
        if mends:
            self.end_switch()

    def count(self) -> int:
        """How many commits there are. Raises StateError where one is missing in the middle."""
        paths = self._directory.iterdir()
        rounds = sorted(int(found[1]) for path in paths if (found := _COMMIT.fullmatch(path.name)))
        if rounds != list(range(len(rounds))):
            missing = next(at for at, round in enumerate(rounds) if at != round)
            raise StateError(f"{self._directory} lacks the commit of round {missing}", fix=_JOIN_AGAIN)
        return len(rounds)

    def read(self, round: int) -> bytes:
        """Raises StateError."""
        with _reading(self._path(round)) as path:
            return path.read_bytes()

    def parsed(self, round: int) -> Commit:
        """Raises StateError where the file is damaged, also where it can be read all the same: its hash says so."""
        with _reading(self._path(round)) as path:
            commit = unpack(Commit, path.read_bytes())
            manifest, certificate = commit.manifest, commit.certificate
            if (manifest.parent, manifest_hash(manifest)) != (certificate.parent, certificate.manifest):
                raise RemoteProtocolError("the manifest is not the one that its certificate names")
            return commit

    def certificate(self, round: int) -> Certificate:
        """Without a look at the manifest, which may be large. Raises StateError as `parsed` does."""
        with _reading(self._path(round)) as path:
            return unpack_first(Certificate, path.read_bytes())

    def written_at(self, round: int) -> float:
        """Unix seconds."""
        return self._path(round).stat().st_mtime

    def write(self, commit: Commit) -> None:
        """Raises StorageFull."""
        write_whole(self._path(commit.manifest.round), pack(commit))

    def remove(self, first: int, length: int) -> None:
        """The commits from round `first` on, of `length` in all; the last first, so that a crash leaves no gap."""
        for round in range(length - 1, first - 1, -1):
            self._path(round).unlink()
        sync(self._directory)

    def prepare_switch(self, line: Sequence[Commit]) -> None:
        """Decides that `line` takes the place of everything from its first round on. Raises StorageFull."""
        try:
            for commit in line:
                write_whole(self._path(commit.manifest.round).with_suffix(".next"), pack(commit))
            write_whole(self._switch, str(line[-1].manifest.round).encode())
        except StorageFull:
            self._forget_next()
            raise

    def end_switch(self) -> None:
        """Carries out a switch that was decided, and forgets one that was not. Takes no room. Raises StateError."""
        if self._switch.exists():
            with _reading(self._switch) as path:
                last = int(path.read_bytes())
            for path in sorted(self._directory.glob("*.next")):
                os.rename(path, path.with_suffix(".commit"))
            for path in sorted(self._directory.glob("*.commit"), reverse=True):
                if int(path.stem) > last:
                    path.unlink()
            sync(self._directory)
            self._switch.unlink()
        self._forget_next()

    def _forget_next(self) -> None:
        for path in self._directory.glob("*.next"):
            path.unlink()
        sync(self._directory)

    def _path(self, round: int) -> Path:
        return self._directory / f"{round:08d}.commit"


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Raises StateError where the file cannot be read, or proves to be damaged."""
    try:
        yield path
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}", fix=_JOIN_AGAIN) from error
    except (RemoteProtocolError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}", fix=_JOIN_AGAIN) from error


class Chain:
    """The commits of a run from genesis on, in `directory`. What is appended was checked before.

    Threads write one after the other: a commit may be heard of while it is fetched, too. Readers see the chain before
    or after, never between.
    """

    def __init__(self, directory: Path, mends: bool = True) -> None:
        """`mends`: whether a switch that was broken off is ended; not by who looks at the chain of a running node.

        Raises StateError where a commit is damaged or missing in the middle.
        """
        self.directory = directory
        self._files = CommitFiles(directory, mends)
        self._writing = threading.Lock()
        self._lock = threading.RLock()
        self.length = self._files.count()
        self.newest_received: tuple[Commit, float] | None = None
        """The last commit, and when it came here (see `received_at`)."""
        self.problems: deque[str] = deque()
        """Of rounds that could not be read, each once; whoever says one takes it out."""
        self._unreadable = set[int]()
        self._members = frozenset[PeerId]()
        for round in range(max(0, self.length - READ_AT_START), self.length):
            self._files.parsed(round)
        self._end_with(self.length)

    @property
    def newest(self) -> Commit | None:
        """The last commit, None before genesis."""
        newest = self.newest_received
        return newest[0] if newest is not None else None

    def names(self, peer: PeerId) -> bool:
        """Whether the last commit names `peer` as a member."""
        return peer in self._members

    def commit(self, round: int) -> Commit:
        """The commit of a round that is here. Raises StateError where its file is damaged."""
        with self._lock:
            return self._files.parsed(round)

    def find(self, round: int) -> Commit | None:
        """The commit of a round, None where the chain has none (any more)."""
        with self._lock:
            return self.commit(round) if 0 <= round < self.length else None

    def commit_of(self, manifest: Manifest) -> Commit | None:
        """The commit of this very manifest, None where it is not of our history (any more)."""
        found = self.find(manifest.round)
        return found if found is not None and found.manifest == manifest else None

    def parent_of(self, manifest: Manifest) -> Manifest | None:
        """The manifest that this one follows, None where that is not of our history (any more)."""
        found = self.find(manifest.round - 1)
        return found.manifest if found is not None and manifest_hash(found.manifest) == manifest.parent else None

    def child_of(self, manifest: Manifest) -> Manifest | None:
        """The manifest that follows this one, None where our history has none (any more)."""
        found = self.find(manifest.round + 1)
        return found.manifest if found is not None and found.manifest.parent == manifest_hash(manifest) else None

    def received_at(self, round: int) -> float:
        """When the commit of a round that is here came: Unix seconds by the wall clock of that time."""
        with self._lock:
            return self._files.written_at(round)

    def received_of(self, manifest: Manifest) -> float | None:
        """The same of this very manifest, None where it is not of our history (any more)."""
        with self._lock:
            return self.received_at(manifest.round) if self.commit_of(manifest) is not None else None

    def append(self, commit: Commit) -> None:
        """Adds the next commit, durably; nothing is done for one that is here. Raises StorageFull.

        Another one in the place of one that is here ends the branch that it belongs to.
        """
        round = commit.manifest.round
        with self._writing:
            if round > self.length:
                raise LocalProtocolError(f"the commit of round {round} does not follow {self.length} commits")
            if round < self.length:
                if self.commit(round).manifest == commit.manifest:
                    return
                self._cut(round)
            self._files.write(commit)
            with self._lock:
                self._end_with(round + 1, commit)

    def switch(self, line: Sequence[Commit]) -> None:
        """Puts `line` in the place of everything from its first round on: wholly, also where a crash comes between.

        Raises StorageFull, and then nothing has changed.
        """
        with self._writing:
            self._files.prepare_switch(line)
            with self._lock:
                self._files.end_switch()
                self._end_with(line[-1].manifest.round + 1, line[-1])

    def go_back(self, round: int) -> None:
        """Ends with the commit of `round`."""
        with self._writing:
            self._cut(round + 1)

    def _cut(self, round: int) -> None:
        with self._lock:
            before = self.length
            self._end_with(round)
            self._files.remove(round, before)

    def _end_with(self, length: int, newest: Commit | None = None) -> None:
        last = length - 1
        self.newest_received = (newest or self.commit(last), self.received_at(last)) if length else None
        members = self.newest_received[0].manifest.members if self.newest_received is not None else ()
        self._members = frozenset(member.peer for member in members)
        self.length = length

    def part(self, first: int, count: int, max_bytes: int) -> tuple[bytes, ...]:
        """The packed commits from round `first` on: up to `count`, as long as they have no more than `max_bytes`.

        The first one is given whatever its size. Raises StateError where one cannot be read.
        """
        found: list[bytes] = []
        with self._lock:  # commits of two histories must not follow each other
            for round in range(first, min(first + count, self.length)):
                data = self._files.read(round)
                max_bytes -= len(data)
                if found and max_bytes < 0:
                    break
                found.append(data)
        return tuple(found)

    def has(self, head: Hash, round: int) -> bool:
        """Whether `head` names the commit of that round, as far as it is here. Cheap: strangers ask for many."""
        with self._lock:
            return 0 <= round < self.length and self._name(round) == head

    def _name(self, round: int) -> Hash | None:
        """The hash of a manifest, from its child where it cannot be read; None where that cannot be, either."""

        def note(round: int, error: StateError) -> None:
            if round not in self._unreadable:
                self._unreadable.add(round)
                self.problems.append(
                    f"{error}; the run goes on, but this node cannot give round {round} to others ({error.fix})"
                )

        try:
            return self._files.certificate(round).manifest
        except StateError as error:
            note(round, error)
        newest = self.newest
        if newest is not None and newest.manifest.round == round:
            return newest.certificate.manifest
        try:
            return self._files.certificate(round + 1).parent
        except StateError as error:
            note(round + 1, error)
            return None

    def knows(self, head: Hash, round: int) -> bool:
        """Whether `head` names one of the commits up to `round`."""
        return any(self.has(head, at) for at in range(round, -1, -1))


def check_links(
    commits: tuple[Commit, ...],
    before: Commit | None,
    info: RunInfo,
    rules: RunRules,
    check: CheckSignature,
) -> None:
    """Raises RemoteProtocolError unless each commit follows from the one before it (`before`, or genesis)."""
    for commit in commits:
        if before is None:
            check_genesis(commit, info, check)
        else:
            check_commit(rules, before.manifest, commit, check)
        before = commit


def wall_clock_microseconds() -> int:
    """An incarnation that is above all earlier ones of this peer."""
    return time.time_ns() // 1000


class VoteBook:
    """The incarnation of this peer and its voting record, in two files of `directory`."""

    def __init__(self, directory: Path, new_incarnation: Callable[[], int] = wall_clock_microseconds) -> None:
        """Takes up the record on disk; without one this is a new incarnation, a newcomer to the run."""
        directory.mkdir(parents=True, exist_ok=True)
        self._incarnation_path = directory / "incarnation"
        self._votes_path = directory / "votes"
        self._new_incarnation = new_incarnation
        record, incarnation = self._read(), self._read_incarnation()
        if record is None or incarnation is None:
            self.forget()
        else:
            self.record, self.incarnation = record, incarnation

    def forget(self, above: int = 0) -> None:
        """Begins an incarnation above `above`, which is not bound by what was signed before. Raises StorageFull."""
        self.incarnation, self.record = max(self._new_incarnation(), above + 1), VoteRecord(NO_HASH)
        # both, and first: the new one must never meet the old record, nor (on a full disk) the old one a new record
        self._votes_path.unlink(missing_ok=True)
        self._incarnation_path.unlink(missing_ok=True)
        write_whole(self._incarnation_path, str(self.incarnation).encode())
        self.write(VoteRecord(NO_HASH))

    def write(self, record: VoteRecord) -> None:
        """fsyncs the record. Raises StorageFull."""
        write_whole(self._votes_path, pack(record))
        self.record = record

    def _read(self) -> VoteRecord | None:
        try:
            return unpack(VoteRecord, self._votes_path.read_bytes())
        except (FileNotFoundError, RemoteProtocolError):  # unreadable is as good as lost: never vote on a guess
            return None

    def _read_incarnation(self) -> int | None:
        try:
            return int(self._incarnation_path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
