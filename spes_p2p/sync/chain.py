"""What a peer must remember of the protocol over a restart: the chain of commits, its votes, its incarnation.

One file a commit, so that headers are served without parsing; the voting record in a file of its own, replaced at each
vote. Tensors are the state store's business.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from spes_p2p.errors import RemoteProtocolError, StateError
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.state.files import write_whole
from spes_p2p.sync.genesis import RunInfo, check_genesis
from spes_p2p.sync.messages import Commit
from spes_p2p.sync.rules import CheckSignature, RunRules, check_certificate, check_child
from spes_p2p.sync.votes import VoteRecord
from spes_p2p.wire import pack, unpack

_COMMIT = re.compile(r"(\d{8,})\.commit")


class Chain:
    """The commits of a run from genesis on, in `directory`. What is appended was checked before."""

    def __init__(self, directory: Path) -> None:
        """Raises StateError where a commit is damaged or missing in the middle."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        rounds = sorted(int(m[1]) for path in directory.iterdir() if (m := _COMMIT.fullmatch(path.name)))
        if rounds and rounds != list(range(len(rounds))):
            missing = next(at for at, round in enumerate(rounds) if at != round)
            raise StateError(f"{directory} lacks the commit of round {missing}", fix="remove the folder and join again")
        self._length = len(rounds)
        self._newest = self.commit(self._length - 1) if rounds else None

    @property
    def newest(self) -> Commit | None:
        """The last commit, None before genesis."""
        return self._newest

    @property
    def length(self) -> int:
        return self._length

    def commit(self, round: int) -> Commit:
        """The commit of a round. Raises StateError where its file is damaged."""
        path = self._path(round)
        try:
            return unpack(Commit, path.read_bytes())
        except (OSError, RemoteProtocolError) as error:
            raise StateError(f"{path} is damaged: {error}", fix="remove the run's folder and join again") from error

    def append(self, commit: Commit) -> None:
        """Adds the next commit, durably. Raises StorageFull."""
        write_whole(self._path(commit.manifest.round), pack(commit))
        self._length = max(self._length, commit.manifest.round + 1)
        self._newest = commit

    def part(self, first: int, count: int) -> tuple[Commit, ...]:
        """Up to `count` commits from round `first` on."""
        return tuple(self.commit(round) for round in range(first, min(first + count, self._length)))

    def _path(self, round: int) -> Path:
        return self.directory / f"{round:08d}.commit"


def check_links(
    commits: tuple[Commit, ...], before: Commit | None, info: RunInfo, rules: RunRules, check: CheckSignature
) -> None:
    """Raises RemoteProtocolError unless each commit follows from the one before it (`before`, or genesis)."""
    for commit in commits:
        if before is None:
            check_genesis(commit, info, check)
        else:
            check_child(rules, before.manifest, commit.manifest)
            check_certificate(before.manifest, commit.manifest, commit.certificate, check)
        before = commit


class VoteBook:
    """The incarnation of this peer and its voting record, in two files of `directory`."""

    def __init__(self, directory: Path) -> None:
        """Takes up the record on disk; without one this is a new incarnation, a newcomer to the run."""
        directory.mkdir(parents=True, exist_ok=True)
        self._incarnation_path = directory / "incarnation"
        self._votes_path = directory / "votes"
        self.record = self._read()
        if self.record is None or not self._incarnation_path.exists():
            write_whole(self._incarnation_path, str(time.time_ns() // 1000).encode())
            self.write(VoteRecord(NO_HASH))
        self.incarnation = int(self._incarnation_path.read_bytes())

    def write(self, record: VoteRecord) -> None:
        """fsyncs the record. Raises StorageFull."""
        write_whole(self._votes_path, pack(record))
        self.record = record

    def _read(self) -> VoteRecord | None:
        try:
            return unpack(VoteRecord, self._votes_path.read_bytes())
        except FileNotFoundError:
            return None
        except RemoteProtocolError:  # unreadable is as good as lost: never vote on a guess
            return None


def own_work_of(commit: Commit, peer: PeerId) -> bool:
    """Whether the round counted work of `peer`."""
    return any(entry.peer == peer for entry in commit.manifest.roster)
