"""Audits of who trained: whose work is looked at, by whom, and what follows for how much it counts. Pure functions.

Once a manifest is certified it draws, by its own hash, some of those whose work it counts, and for each a few electors.
So nobody knows beforehand, and what is looked at was committed to before. Each auditor signs what it has found
(`Verdict`); the next manifest lists an outcome where more than two thirds of those drawn say the same, so that neither
a few who lie nor a few who err decide anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import FAILED, FEWEST_AUDITORS, LINK_PUBLIC, PASSED, WITHHELD, able_auditors, rank
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.standing import LONGEST_WAIT
from spes_p2p.ids import PeerId, sha256

MOST_AUDITORS = 9
"""Of one peer's work. Of nine seven must agree, and so many liars are seldom drawn where one in five lies."""
SEQUENCES = 64
"""Most sequences of a kind that an auditor looks at; there are as many of four kinds (see `train.work_judge`)."""
MOST_POSITIONS = 256
"""Of each sequence the first ones are looked at: more of them tell little more, and cost as much as more sequences."""
TILES_SHARE = 1 / 8
"""Of the shared tiles, how many an auditor fetches."""
TEXT_SHARE = 1 / 8
"""Of the bytes of those, what it may fetch of the peer's text where that is not on its disk, and as much of its own."""
COST_OF_TRAINING = 2 * 4 / 3
"""What the sequences of a kind cost an auditor, in training on them: two models go forward over four kinds."""


def drawn_work(rules: RunRules, manifest: Manifest) -> tuple[Contribution, ...]:
    """The work counted by `manifest` that is audited, sorted.

    So many that auditing takes no more than `audited_work` of the round's training, or of its bytes. Every other place
    is for somebody on probation, if there is one: newcomers need not wait for long, and cannot take all places. Of
    these comes first who has waited longest; but after `LONGEST_WAIT` all are alike, so that one of whom auditors can
    say nothing is not drawn again and again in the place of others.
    """
    if not rules.audited_work or not manifest.roster:
        return ()
    members, pool = {member.peer: member for member in manifest.members}, _Pool(manifest)
    auditors = min(MOST_AUDITORS, len(pool.able))
    left = [entry for entry in manifest.roster if entry.peer in members and pool.is_enough_for(entry.peer)]
    if not left:
        return ()
    name = manifest_hash(manifest)
    mark = sha256(name, b"audited work")
    chance = int.from_bytes(mark[:4], "big") / 2**32
    left.sort(key=lambda entry: rank(mark, entry.peer))
    found: list[Contribution] = []
    for place in range(int(_affordable(rules, manifest, auditors) + chance)):
        if not left:
            break
        waiting = [entry for entry in left if members[entry.peer].probation]
        is_for_waiting = bool(waiting) and (place + mark[4]) % 2 == 0
        longest = max(waiting, key=lambda entry: min(members[entry.peer].waited, LONGEST_WAIT), default=left[0])
        found.append(longest if is_for_waiting else left[0])
        left.remove(found[-1])
    return tuple(sorted(found))


class _Pool:
    """Who could audit work that `manifest` counts: electors who trained in the same round, and whom they can reach."""

    def __init__(self, manifest: Manifest) -> None:
        links = {member.peer: member.link_class for member in manifest.members}
        trained = {entry.peer for entry in manifest.roster}
        self.able = sorted(trained & set(able_auditors(manifest.members)))
        self._public = [peer for peer in self.able if links[peer] == LINK_PUBLIC]
        self._is_public = {peer for peer, link in links.items() if link == LINK_PUBLIC}

    def of(self, peer: PeerId) -> list[PeerId]:
        """Of two peers one must be reachable from outside."""
        return [one for one in (self.able if peer in self._is_public else self._public) if one != peer]

    def is_enough_for(self, peer: PeerId) -> bool:
        able = self.able if peer in self._is_public else self._public
        return len(able) - (peer in able) >= FEWEST_AUDITORS


def drawn_auditors(rules: RunRules, manifest: Manifest) -> dict[PeerId, tuple[PeerId, ...]]:
    """Of each peer whose work `manifest` counts and that is audited, who does that."""
    return {entry.peer: auditors_of(manifest, entry.peer) for entry in drawn_work(rules, manifest)}


def _affordable(rules: RunRules, manifest: Manifest, auditors: int) -> float:
    """How many may be audited in a round, on average."""
    sequences = sum(entry.sequences for entry in manifest.roster)
    of_each = min(1.0, MOST_POSITIONS / rules.sequence_tokens)
    by_training = sequences / (auditors * COST_OF_TRAINING * SEQUENCES * of_each)
    of_each_auditor = TILES_SHARE * (1 + 2 * TEXT_SHARE)
    by_bytes = 2 * len(manifest.roster) / (auditors * of_each_auditor) * rules.shared_share
    return rules.audited_work * min(by_training, by_bytes)


def auditors_of(manifest: Manifest, peer: PeerId) -> tuple[PeerId, ...]:
    """Who audits the work of `peer` that `manifest` counts, sorted; who could not reach it has no part in that."""
    mark = sha256(manifest_hash(manifest), peer.encode())
    able = sorted(_Pool(manifest).of(peer), key=lambda auditor: rank(mark, auditor))
    return tuple(sorted(able[:MOST_AUDITORS]))


def outcome_of(manifest: Manifest, peer: PeerId, findings: Mapping[PeerId, str]) -> str | None:
    """What came of auditing the work of `peer`, by what its auditors found; None where too few say the same."""
    auditors = auditors_of(manifest, peer)
    said = [findings[auditor] for auditor in auditors if auditor in findings]
    quorum = Electorate(auditors, Faults.BYZANTINE).quorum
    if len(auditors) < FEWEST_AUDITORS or len(said) < quorum:
        return None
    for finding in (FAILED, PASSED):
        if said.count(finding) >= quorum:
            return finding
    return WITHHELD if said.count(FAILED) + said.count(WITHHELD) >= quorum else None


AuditNews = Literal["failed an audit", "showed auditors nothing", "counts in full"]
_TEXTS: Mapping[str, AuditNews] = {FAILED: "failed an audit", WITHHELD: "showed auditors nothing"}


def audit_news(waited: Collection[PeerId], manifest: Manifest) -> list[tuple[PeerId, AuditNews]]:
    """For people: who failed audits, and who of those who `waited` on probation does no more."""
    found = [(one.peer, _TEXTS[one.finding]) for one in manifest.audited if one.finding in _TEXTS]
    return found + [(m.peer, "counts in full") for m in manifest.members if m.peer in waited and not m.probation]


def on_probation(manifest: Manifest) -> tuple[tuple[PeerId, int], ...]:
    """Who is, and how many audits it must pass yet."""
    return tuple((member.peer, member.probation) for member in manifest.members if member.probation)
