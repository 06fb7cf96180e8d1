"""Histories of one run that stand apart: which one somebody has chosen, and what they are from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import ConfigError
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.observe.metrics import amount_text, seconds_text

if TYPE_CHECKING:
    from spes_p2p.sync.catch_up import ForkPoint

LEAST_DIGITS = 6
"""Of a child's hash, so that no other has them by chance."""
MOST_NAMED = 6
"""Peers, in a line."""


def checked_prefix(text: str, what: str) -> str:
    """The first digits of a child's hash. Raises ConfigError that names `what` was given wrongly."""
    digits = text.lower()
    if not LEAST_DIGITS <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            f"{what} is {text[:80]!r}, not the first digits of a manifest's hash",
            fix="give the ten hexadecimal digits that peers print when the run has split",
        )
    return digits


class Choices:
    """Which child of a manifest to follow, as chosen by this peer's user (`follow`: first digits) or the organiser."""

    def __init__(self, follow: str = "") -> None:
        self._follow = follow
        self._own: dict[Hash, Hash] = {}
        self._organisers: dict[Hash, Hash] = {}

    def told(self, children: Mapping[Hash, Hash]) -> None:
        """What the organiser has chosen, by parent."""
        self._organisers = dict(children)

    def meet(self, meeting: ForkPoint) -> bool:
        """Whether `--follow` names a child of this fork for the first time. If so, keeps it as the choice here."""
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


@dataclass(frozen=True)
class Side:
    """One of several histories after the same manifest; plain values, for people and for scripts."""

    child: str
    """Its first manifest, in hex: by its first digits it is chosen."""
    kind: str
    """Of the first manifest's certificate."""
    round: int
    """Its newest one."""
    rounds: int
    """Since the manifest that all have."""
    tokens: int
    """Counted in these rounds."""
    members: int
    electors: int
    """Of the newest manifest, both."""
    peers: tuple[PeerId, ...]
    """Who announces it: nobody else has said so."""
    seen_at: float
    """When the newest manifest was first seen, Unix seconds by the clock of who announces it; 0 where nobody says."""

    @property
    def name(self) -> str:
        return short(bytes.fromhex(self.child))

    def with_other(self, other: Side) -> Side:
        """Two looks at the same history: the longer one counts, and all who announce a part of it."""
        longer = max(self, other, key=lambda side: side.round)
        return replace(longer, peers=tuple(sorted({*self.peers, *other.peers})))


def side_of(common: Manifest, first: Commit, tip: Commit, peers: Iterable[PeerId], seen_at: float = 0.0) -> Side:
    """The history that begins with `first` on top of `common`, and ends with `tip`."""
    newest = tip.manifest
    return Side(
        first.certificate.manifest.hex(), first.certificate.label, newest.round, newest.round - common.round,
        newest.tokens - common.tokens, len(newest.members), len(electors(newest.members)), tuple(peers), seen_at,
    )  # fmt: skip


@dataclass(frozen=True)
class Fork:
    """A manifest after which a run has gone on more than once, with the histories on top of it by their first child."""

    parent: str
    """Its hash, in hex."""
    round: int
    sides: dict[str, Side] = field(default_factory=dict)

    @classmethod
    def after(cls, common: Manifest) -> Fork:
        return cls(manifest_hash(common).hex(), common.round)

    def add(self, side: Side) -> None:
        known = self.sides.get(side.child)
        self.sides[side.child] = side if known is None else known.with_other(side)

    def texts(self, now: float) -> list[str]:
        """For a person: what each history has, and what it costs to choose it, the one with most tokens first."""
        found = [f"the run has {len(self.sides)} histories since round {self.round}; one must give way or be chosen:"]
        for side in sorted(self.sides.values(), key=lambda side: (-side.tokens, side.child)):
            age = f", newest {seconds_text(max(0.0, now - side.seen_at))} old" if side.seen_at else ""
            who = ", ".join(short(peer) for peer in side.peers[:MOST_NAMED])
            more = f" and {len(side.peers) - MOST_NAMED} more" if len(side.peers) > MOST_NAMED else ""
            found += [
                f"  {side.name}: rounds {self.round + 1} to {side.round} (first certificate: {side.kind}), "
                f"{side.tokens:,} tokens{age}",
                f"    {amount_text(side.members, 'member')}, {amount_text(side.electors, 'elector')}; "
                f"announced by {who}{more}",
                *(f"    choosing it loses {text}" for text in self.lost_texts(side.child)),
                f"    spes-p2p run choose {side.name}",
            ]
        return found

    def lost_texts(self, child: str) -> list[str]:
        """What choosing `child` costs, of each other history."""
        return [
            f"{amount_text(side.rounds, 'round')} with {side.tokens:,} tokens of {side.name}: "
            f"{amount_text(side.members, 'member')} of it would switch"
            for other, side in sorted(self.sides.items())
            if other != child
        ]


def choose_child(forks: Iterable[Fork], digits: str) -> tuple[Fork, Side]:
    """The history whose child begins with `digits`. Raises ConfigError where none does, several do, or all is one."""
    known = [(fork, side) for fork in forks for side in fork.sides.values()]
    if not known:
        raise ConfigError(
            "the run has one history: there is nothing to choose",
            fix="choose while peers of both histories can be reached; their messages name both",
        )
    fitting = [(fork, side) for fork, side in known if side.child.startswith(digits)]
    if len(fitting) != 1:
        names = ", ".join(side.name for _, side in fitting or known)
        raise ConfigError(
            f"{'several histories begin' if fitting else 'no history begins'} with {digits}; there are {names}",
            fix="give the digits of exactly one of them",
        )
    return fitting[0]
