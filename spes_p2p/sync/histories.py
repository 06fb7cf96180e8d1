"""Histories of one run that stand apart: which one somebody has chosen, and what they are from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spes_p2p.errors import ConfigError
from spes_p2p.ids import Hash, short
from spes_p2p.sync.catch_up import Meeting
from spes_p2p.sync.core.forks import Line, tokens_lost
from spes_p2p.sync.core.messages import Manifest, manifest_hash

LEAST_DIGITS = 6
"""Of a child's hash, so that no other has them by chance."""


def checked_prefix(text: str, what: str) -> str:
    """The first digits of a child's hash. Raises ConfigError that names `what` was given wrongly."""
    digits = text.lower()
    if not LEAST_DIGITS <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            f"{what} is {text[:80]!r}, not the first digits of a manifest's hash",
            fix="give the ten hexadecimal digits that the peers print where the run has gone on twice",
        )
    return digits


class Choices:
    """After which manifest which child counts: by this peer's own word (`follow`: first digits) or the organiser's."""

    def __init__(self, follow: str = "") -> None:
        self._follow = follow
        self._own: dict[Hash, Hash] = {}
        self._organisers: dict[Hash, Hash] = {}

    def told(self, children: Mapping[Hash, Hash]) -> None:
        """What the organiser has chosen, by parent."""
        self._organisers = dict(children)

    def meet(self, meeting: Meeting) -> bool:
        """Whether this peer's own word, which names a child by its first digits, speaks of this meeting for once."""
        parent = manifest_hash(meeting.common)
        names = [line[0].certificate.manifest for line in (meeting.ours, meeting.theirs) if line]
        named = [name for name in names if self._follow and name.hex().startswith(self._follow)]
        if not named or parent in self._own:
            return False
        self._own[parent] = named[0]
        return True

    @property
    def children(self) -> frozenset[Hash]:
        return frozenset({**self._organisers, **self._own}.values())


@dataclass
class Fork:
    """A manifest after which a run has gone on more than once, with each history on top of it, by its first child."""

    common: Manifest
    lines: dict[Hash, Line] = field(default_factory=dict)

    @property
    def parent(self) -> Hash:
        return manifest_hash(self.common)

    def add(self, line: Line) -> None:
        """The longest one that was seen of a history counts."""
        child = line[0].certificate.manifest
        self.lines[child] = max(self.lines.get(child, ()), line, key=len)

    def has(self, head: Hash) -> bool:
        """Whether one of the histories contains this manifest."""
        return any(commit.certificate.manifest == head for line in self.lines.values() for commit in line)

    def texts(self) -> list[str]:
        """For a person: what each history has, the one with most tokens first."""
        after = self.common.round
        lines = sorted(self.lines.items(), key=lambda item: (-tokens_lost(self.common, item[1]), item[0]))
        found = [f"since round {after} the run has gone on {len(lines)} times:"]
        for child, line in lines:
            tip, kind = line[-1].manifest, line[0].certificate.label
            found.append(
                f"  {short(child)}: rounds {after + 1} to {tip.round} ({len(line)}, the first by {kind}), "
                f"{tokens_lost(self.common, line):,} tokens, {len(tip.members)} members now"
            )
        return found

    def lost_texts(self, child: Hash) -> list[str]:
        """What choosing `child` costs."""
        return [
            f"of {short(other)}, {len(line)} rounds with {tokens_lost(self.common, line):,} tokens are lost; its "
            f"{len(line[-1].manifest.members)} members come over"
            for other, line in sorted(self.lines.items())
            if other != child
        ]


def choose_child(forks: Iterable[Fork], digits: str) -> tuple[Fork, Hash]:
    """The child whose hash begins with `digits`. Raises ConfigError where none does, or several, or nothing parted."""
    known = [(fork, child) for fork in forks for child in fork.lines]
    if not known:
        raise ConfigError(
            "the run has one history: there is nothing to choose",
            fix="choose while peers of both histories can be reached; what they print names both",
        )
    fitting = [(fork, child) for fork, child in known if child.hex().startswith(digits)]
    if len(fitting) != 1:
        names = ", ".join(short(child) for _, child in fitting or known)
        raise ConfigError(
            f"{'several histories begin' if fitting else 'no history begins'} with {digits}, of {names}",
            fix="give one of these",
        )
    return fitting[0]
