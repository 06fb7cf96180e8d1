"""What electors vote on: a manifest with the signed statements that it follows from; and what travels between peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import (
    Commit,
    DecayOrder,
    Declaration,
    Plan,
    Report,
    Signed,
    Status,
    Votes,
)
from spes_p2p.ids import PeerId


def joined_hashes(reports: Iterable[Signed[Report]]) -> tuple[bytes, ...]:
    """Of each reported slice the hashes of its tiles, joined."""
    return tuple(b"".join(signed.value.wire_hashes) for signed in reports)


@dataclass(frozen=True)
class Statements:
    """What a manifest follows from beside its parent: slices from `reports` in their order, the next members and what
    they own from `declarations`, one each, the roster from these and, where somebody says something else by now,
    `ready`. `decay` is beside the manifest that takes it up, and later ones do without; so is `roll`.
    """

    ready: tuple[Signed[Declaration], ...]
    reports: tuple[Signed[Report], ...]
    declarations: tuple[Signed[Declaration], ...]
    decay: Signed[DecayOrder] | None = None
    roll: Signed[Roll] | None = None


@dataclass(frozen=True)
class Content:
    """A manifest that is voted on, and what its signers said that it follows from (see `statements`)."""

    manifest: Manifest
    statements: Statements

    @cached_property
    def wire_hashes(self) -> tuple[bytes, ...]:
        """Of each slice the hashes of its tiles, joined."""
        return joined_hashes(self.statements.reports)


@dataclass(frozen=True)
class Envelope:
    """One message between two peers: the sender's status and what the receiver lacks.

    `ready` is what the roster of `plan` follows from. `answers` is the life of the receiver that the sender has heard,
    0 for none.
    """

    sender: PeerId
    statuses: tuple[Signed[Status], ...] = ()
    plan: Signed[Plan] | None = None
    ready: tuple[Signed[Declaration], ...] = ()
    reports: tuple[Signed[Report], ...] = ()
    votes: tuple[Votes, ...] = ()
    contents: tuple[Content, ...] = ()
    commit: Commit | None = None
    answers: int = 0

    @property
    def has_news(self) -> bool:
        """Whether it tells of more than how peers stand."""
        return any((self.plan, self.reports, self.votes, self.contents, self.commit))
