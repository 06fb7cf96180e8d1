"""Which history of a run a peer stands on: the one that has counted most. Pure, and the same for all who know the same.

Every manifest says what its chain has counted: tokens of trusted peers, each at most twice the lower median of them in
its round. Of two manifests the one with more goes first; of equal ones that of the longer chain, then the lower hash.
One thing stands above that order: where a renewal names a roll that bans somebody, a sibling of it that needs a banned
signature does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import Admission, electors
from spes_p2p.consensus.messages import QUORUM, RENEWAL, Commit, Status
from spes_p2p.ids import Hash, short

Line = tuple[Commit, ...]
"""Commits on top of a common manifest, oldest first; an empty one stands for that manifest itself."""
Place = tuple[int, int, bytes]
"""(counted by its chain, rounds, a name that is higher the lower its hash): of two manifests the higher goes first."""
MOST_TIMES_MEDIAN = 2
_OTHER_WAY_ROUND = bytes(range(255, -1, -1))


def place_at(counted: int, round: int, head: Hash) -> Place:
    """The place of the manifest `head` of `round`, whose chain has counted so much."""
    return counted, round, head.translate(_OTHER_WAY_ROUND)


def place_of(manifest: Manifest) -> Place:
    return place_at(manifest.counted, manifest.round, manifest_hash(manifest))


def claimed_place(status: Status) -> Place:
    """Where a peer says that it stands; nobody has checked it."""
    return place_at(status.counted, status.round, status.head)


def roll_number(manifest: Manifest) -> int:
    """That of the newest roll that its chain has taken up, 0 for none."""
    return 0 if manifest.roll is None else manifest.roll.number


def counted_in(roster: Sequence[Contribution], admission: Admission) -> int:
    """What a round with this roster counts for its history: one member that claims a lot is worth two others."""
    trusted = sorted(
        entry.tokens for entry in roster if admission.is_trusted(entry.peer) and not admission.is_banned(entry.peer)
    )
    most = MOST_TIMES_MEDIAN * trusted[(len(trusted) - 1) // 2] if trusted else 0
    return sum(min(tokens, most) for tokens in trusted)


def goes_before(theirs: Line, ours: Line, common: Manifest, faults: Faults) -> bool:
    """Whether who stands at the end of `ours` goes over to the end of `theirs`; both begin on top of `common`."""
    if not theirs or not ours:
        return bool(theirs)
    if dislodges(theirs[0], ours[0], common, faults):
        return True
    if dislodges(ours[0], theirs[0], common, faults):
        return False
    return place_of(theirs[-1].manifest) > place_of(ours[-1].manifest)


def dislodges(renewal: Commit, sibling: Commit, parent: Manifest, faults: Faults) -> bool:
    """Whether the roll of a renewal bans somebody whose signature its sibling needs."""
    roll = renewal.manifest.roll
    if renewal.certificate.kind != RENEWAL or sibling.certificate.kind != QUORUM or roll is None:
        return False
    voters = tuple(member.peer for member in electors(parent.members))
    good = {seal.peer for seal in sibling.certificate.seals} & set(voters) - set(roll.banned)
    return len(good) < Electorate(voters, faults).quorum


def tokens_lost(common: Manifest, left: Line) -> int:
    """Tokens that were committed on a line that is left."""
    return left[-1].manifest.tokens - common.tokens if left else 0


def twins_text(common: Manifest, ours: Line, theirs: Line) -> str:
    """What a person should know where two quorums have signed children of one manifest: "" where they have not."""
    if not (ours and theirs) or {ours[0].certificate.kind, theirs[0].certificate.kind} != {QUORUM}:
        return ""
    both = [{seal.peer for seal in line[0].certificate.seals} for line in (ours, theirs)]
    names = ", ".join(short(peer) for peer in sorted(both[0] & both[1]))
    return (
        f"two children of round {common.round} have been signed by quorums: {names} signed both, so they lie, run in "
        "two places, or run from a copy of their disk"
    )
