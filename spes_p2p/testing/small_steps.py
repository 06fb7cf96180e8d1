"""What each event makes of each state of one peer, worked out once: the exhaustive search looks it up from then on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.messages import Commit
from spes_p2p.testing.small_peer import Local, Setting, SmallStep
from spes_p2p.testing.snapshots import Snapshots


@dataclass(frozen=True)
class Step:
    """What one event does to one peer.

    `sends` are (receiver, message); `crashes` where the peer may die on the way: (what is left of it, how many of the
    sends had left). `plain`: a message that told nothing new; `quiet`: a status that moved nothing at its receiver.
    """

    after: int
    sends: tuple[tuple[int, int], ...]
    crashes: tuple[tuple[int, int], ...]
    commits: tuple[int, ...]
    plain: bool = False
    quiet: bool = False


class StepTable:
    """Peers' states (`locals`) and messages (`things`) by number, and the steps between them, each judged once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.snapshots = Snapshots()
        self.fired: Counter[str] = Counter()
        self.locals: list[Local] = []
        self.things: list[Any] = []
        self._local_ids: dict[bytes, int] = {}
        self._thing_ids: dict[bytes, int] = {}
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._received: dict[tuple[int, int], Step] = {}
        self._deaths: dict[int, int] = {}
        self._commits: dict[tuple[Any, ...], int] = {}
        self._judged: set[tuple[int, ...]] = set()

    @property
    def size(self) -> tuple[int, int]:
        """(different states of one peer, different steps of one peer) that were worked out so far."""
        return len(self.locals), len(self._steps) + len(self._received)

    def keep(self, local: Local) -> int:
        """The number of what a peer knows."""
        name = self.snapshots.name(local)
        known = self._local_ids.setdefault(name, len(self.locals))
        if known == len(self.locals):
            self.locals.append(self.snapshots.clone(local))
        return known

    def id_of(self, thing: Any) -> int:
        """The number of a message or a commit."""
        name = self.snapshots.frozen.digest(thing)
        known = self._thing_ids.setdefault(name, len(self.things))
        if known == len(self.things):
            self.things.append(self.snapshots.frozen.one(thing))
        return known

    def judge_commits(self, commits: tuple[int, ...]) -> None:
        """All that were ever made in one history must go together."""
        if commits in self._judged:
            return
        judge = self.setting.fresh_judge()
        for commit in commits:
            judge.saw_commit(self.things[commit])
        self._judged.add(commits)

    def receive(self, at: int, peer: int, message: int) -> Step:
        """A peer that knows what `at` names hears a message."""
        key = (at, message)
        known = self._received.get(key)
        if known is None:
            known = self._received[key] = self._work_out(at, peer, ("receive", message))
        return known

    def step(self, at: int, peer: int, what: tuple[Any, ...]) -> Step:
        """Anything else happens to it."""
        key = (at, *(part if isinstance(part, int | str) else self.snapshots.name(part) for part in what))
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._work_out(at, peer, what)
        return known

    def _work_out(self, at: int, peer: int, what: tuple[Any, ...]) -> Step:
        before = self.locals[at]
        local: Local = self.snapshots.clone(before)
        if local.core is None and what[0] != "start":
            return Step(at, (), (), ())
        given = ("receive", self.things[what[1]]) if what[0] == "receive" else what
        taken = SmallStep(self.setting, self.snapshots, local, lambda: self._remains(local))
        taken.take(given)
        sends = [(self.setting.names.index(to), self.id_of(envelope)) for to, envelope in taken.sends]
        core = local.core
        assert core is not None
        self.fired.update(core.fired)
        decided = [commit for commit in (core.state.round.decided, core.state.own.commit) if commit is not None]
        after = self.keep(local)
        silent = what[0] == "receive" and not taken.acted and not core.fired
        quiet = silent and not _says_more(self.things[what[1]])
        plain = silent and self._is_plain(before, local)
        return Step(after, tuple(sends), tuple(taken.crashes), tuple(map(self._id_of_commit, decided)), plain, quiet)

    def _id_of_commit(self, commit: Commit) -> int:
        """Certificates of one kind by the same set of electors, or by any majority, are alike to the judge."""
        one = self.id_of(commit)
        self.judge_commits((one,))
        certificate = commit.certificate
        return self._commits.setdefault((certificate.manifest, certificate.kind, certificate.heard), one)

    def _is_plain(self, before: Local, after: Local) -> bool:
        """Whether nothing has changed but when somebody was heard last."""
        return self.snapshots.name(before, timeless=True) == self.snapshots.name(after, timeless=True)

    def dead(self, at: int) -> int:
        """What is left of a peer that dies now."""
        if at not in self._deaths:
            self._deaths[at] = self._remains(self.locals[at])
        return self._deaths[at]

    def _remains(self, local: Local) -> int:
        """What a crash leaves: the disk, and which sequences were used."""
        core = local.core
        used = core.state.own.sequence if core is not None else local.sequence
        disk = self.snapshots.clone(local.disk)
        return self.keep(Local(local.name, None, disk, lives=local.lives, sequence=used))


def _says_more(envelope: Envelope) -> bool:
    return (
        bool(envelope.plan or envelope.reports or envelope.votes or envelope.contents)
        or bool(envelope.degraded_proposals or envelope.degraded_votes)
        or envelope.commit is not None
    )
