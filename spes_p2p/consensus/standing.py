"""How far members are on probation: by what audits found, by how long they waited, and where they return. Pure.

Audits may fail to come about: too few electors can reach a newcomer, or have its text, or a round is too small to pay
for any. So who does its work for long, and has nothing found against it, comes to count half all the same: nobody else
would let it in. But keys cost nothing, and so does waiting with many of them: who came in so is few beside those who
count in full, however many there are and however long they wait. In full counts only who has passed audits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spes_p2p.consensus.ledger import MAX_ACCOUNTS, Account, Ledger
from spes_p2p.consensus.manifest import Audited, Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import (
    FAILED,
    FEWEST_AUDITORS,
    HALF,
    MOST_PROBATION,
    PASSED,
    PROBATION,
    WITHHELD,
    Member,
    able_auditors,
    rank,
    trainers,
)
from spes_p2p.ids import Hash, PeerId

PATIENCE = 20
"""Rounds that count somebody's work and are worth an audit passed. In twice as many, a newcomer among ten peers is
audited ten times as a rule, so that who fakes its work is found out before it counts half."""
LONGEST_WAIT = (PROBATION - HALF) * PATIENCE
PROVEN_EACH = 8
"""For so many that count in full one may count half by waiting; one in any case. With one in five of the others lying,
fewer than a third do then: as many as centered clipping bears."""

WITHHELD_COSTS = 4
"""So many audits passed does one that it showed nothing to cost who returns: who leaves is no longer there for the
audit of its last round, now and then, and who leaves again and again to be spared an audit comes to be a newcomer."""


def findings_of(audited: Iterable[Audited]) -> dict[PeerId, str]:
    return {found.peer: found.finding for found in audited}


def judged(members: Iterable[Member], findings: Mapping[PeerId, str]) -> tuple[Member, ...]:
    """Members as they stand after audits, by what these found."""
    return tuple(_judged(member, findings.get(member.peer)) for member in members)


def _judged(member: Member, finding: str | None) -> Member:
    if finding == PASSED:
        return replace(member, probation=max(0, member.probation - 1))
    if finding == FAILED:
        return replace(member, probation=member.probation + PROBATION, waited=0)
    if finding == WITHHELD:  # a link may be broken: nobody is banned for it
        return replace(member, probation=max(member.probation, min(member.probation + 1, PROBATION)), waited=0)
    return member


def failed_too_often(members: Iterable[Member], findings: Mapping[PeerId, str]) -> frozenset[PeerId]:
    """Who is banned for what audits have found."""
    return frozenset(member.peer for member in judged(members, findings) if member.probation > MOST_PROBATION)


def with_standing(
    parent: Manifest,
    ledger: Ledger,
    members: Iterable[Member],
    roster: Sequence[Contribution],
    audited: Collection[Audited],
) -> tuple[Member, ...]:
    """`members` of a child of `parent` that counts `roster` and lists `audited`, as far as they are on probation.

    `ledger`: up to `parent`. It knows those who were members before, whoever has left them out since.
    """
    findings = findings_of(audited)
    known = {member.peer: member for member in judged(parent.members, findings)}
    counted = {entry.peer for entry in roster}
    is_audited = len(able_auditors(parent.members)) >= FEWEST_AUDITORS

    def stands(member: Member) -> Member:
        account, before = ledger.of(member.peer), known.get(member.peer)
        if before is None:
            return _newcomer(member, account, is_audited)
        probation, waited = before.probation, before.waited + (member.peer in counted)
        is_known = account.rounds > 0 or len(ledger.accounts) < MAX_ACCOUNTS  # of others nobody knows what they failed
        hopes = 0 < probation <= PROBATION and is_known and not account.failed
        is_blamed = findings.get(member.peer) in (FAILED, WITHHELD)
        return replace(member, probation=probation, waited=waited if hopes and not is_blamed else 0)

    return _with_who_waited([stands(member) for member in members], manifest_hash(parent))


def _newcomer(member: Member, account: Account, is_audited: bool) -> Member:
    """It begins where all newcomers do, or, if it was here before, where it could be by now.

    Leaving clears nothing: who failed an audit has the most to pass. Where nobody can be audited, nobody else is on
    probation.
    """
    if account.failed:
        return replace(member, probation=MOST_PROBATION, waited=0)
    if not is_audited:
        return replace(member, probation=0, waited=0)
    passed = max(0, account.passed - WITHHELD_COSTS * account.withheld)
    waited = 0 if account.withheld else account.rounds
    return replace(member, probation=max(HALF, PROBATION - passed), waited=waited)


def _with_who_waited(members: Sequence[Member], head: Hash) -> tuple[Member, ...]:
    """After those who waited have stepped down: to half only as many as there is room for, the longest wait first."""
    stepped = [replace(member, probation=_by_waiting(member)) for member in members]
    training = trainers(stepped)
    room = max(1, sum(not member.probation for member in training) // PROVEN_EACH)
    room -= sum(member.probation == HALF for member in training)
    line = [m for m in training if m.probation == HALF + 1 and m.waited >= LONGEST_WAIT]
    line.sort(key=lambda member: (-member.waited, rank(head, member.peer)))
    let_in = {member.peer for member in line[: max(0, room)]}
    return tuple(replace(m, probation=HALF) if m.peer in let_in else m for m in stepped)


def _by_waiting(member: Member) -> int:
    """Its probation, less what it has waited for, but never so little that its work counts."""
    steps = min(member.waited // PATIENCE, PROBATION - HALF - 1)
    return min(member.probation, PROBATION - steps) if steps else member.probation
