"""Reducers are checked: what one reports of a slice is made again by others, who tell all where it is not the mean.

Everybody makes a few slices again that nobody else can foresee, those that are unlike what it trained itself, and those
of which somebody says that they are false: so all who are honest come to know of a lie that one of them finds. Who
reported it has had its turns in this round, and nobody votes for a state with a slice of its making.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high

from spes_p2p.consensus.actions import Audit
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.events import Finding
from spes_p2p.consensus.manifest import content_hash
from spes_p2p.consensus.messages import Accusation, Plan, Report, Signed
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.state import Key, State
from spes_p2p.ids import sha256

MOST_DOUBTS = 2
"""Slices of a round that are made again since they are unlike our own: each costs what a slice's reducer fetches."""
FAR = 2.0
"""Times what we trained ourselves: a mean is shorter than what it is made of. In `scripts/bench_attacks.py` honest ones
go 1.2 times as far at most, and noise as large as the weights 2.3 to 15."""
_WHAT = {
    Finding.FALSE: "is not the mean of what its contributors committed to",
    Finding.LOSES_MANY: "leaves out many who are there, as lost",
}
MOST_ACCUSED = 4
"""Slices of a round of which one peer may say that they are false."""


def most_lost(contributors: int) -> int:
    """How many contributors of a slice an honest reducer may fail to reach that others reach: some may lie to it."""
    return max(1, contributors // 3)


def drawn(state: State, plan: Plan) -> frozenset[int]:
    """The slices of a plan that this peer makes again: on average so many that `audited_share` of all are."""
    shared = [index for index, piece in enumerate(plan.slices) if len(piece.contributors) > 1]
    if not shared or not state.rules.audited_share:
        return frozenset()
    mark = sha256(state.own.secret, plan.parent)
    chance = int.from_bytes(mark[:4], "big") / 2**32
    number = int(state.rules.audited_share * len(shared) / max(1, len(plan.roster)) + chance)
    ordered = sorted(shared, key=lambda index: sha256(mark, index.to_bytes(4, "big")))
    return frozenset(ordered[:number])


@dataclass(eq=False)
class Audits(Part):
    """What is made again, and what follows where it comes out differently."""

    _proposals: Proposals

    def audit(self, now: float) -> bool:
        """Makes again what is due, one slice after the other."""
        current = self._state.round
        due = self._due()
        if due is None or current.auditing is not None or current.plan is None:
            return False
        current.auditing = due
        self._state.out.append(Audit(current.plan, due))
        return True

    def is_pending(self) -> bool:
        """Whether something is to be made again before we build or vote for a state with it."""
        current = self._state.round
        return current.decided is None and (current.auditing is not None or self._due() is not None)

    def _due(self) -> Signed[Report] | None:
        """The next report to look at; what somebody accuses first."""
        current = self._state.round
        for name, accusations in current.accusations.items():
            report = next(iter(accusations.values())).value.report
            if name not in current.audited and report.author not in current.barred:
                return report
        for index in (*sorted(current.doubted), *sorted(current.drawn)):
            known = current.reports.get(index)
            if known is None or known.author == self._state.me or content_hash(known.value) in current.audited:
                continue
            if current.staged.get(known.value.piece.key) == b"".join(known.value.wire_hashes):
                return known
        return None

    def staged(self, key: Key, times_ours: float) -> None:
        """A slice has come. It is doubtful where it goes farther than what was trained here, or leaves many out."""
        current = self._state.round
        index = current.index_of.get(key)
        if index is None or current.plan is None or not self._state.rules.audited_share:
            return
        report = current.reports.get(index)
        leaves_many = report is not None and self._leaves_out_many(report.value)
        if (leaves_many or self._goes_far(index, times_ours)) and len(current.doubted) < MOST_DOUBTS:
            current.doubted.add(index)

    def _goes_far(self, index: int, times_ours: float) -> bool:
        """Whether it goes farther than its contributors can have come, if they train as we do.

        By the tokens of the one in the middle: what a few claim allows nothing.
        """
        plan, work = self._state.round.plan, self._state.round.work
        assert plan is not None
        contributors = plan.value.slices[index].contributors
        tokens = median_high(entry.tokens for entry in plan.value.roster if entry.peer in contributors)
        return times_ours > FAR * max(1.0, tokens / max(1, work.tokens))

    def _leaves_out_many(self, report: Report) -> bool:
        """Whether so many are not in a mean of our plan, for whatever reason it gives, that it must be looked at."""
        plan = self._state.round.plan
        assert plan is not None
        contributors = plan.value.slices[report.index].contributors
        return len(contributors) - len(report.contributors) > most_lost(len(contributors))

    def audited(self, signed: Signed[Report], finding: Finding, now: float) -> None:
        """How it went. What could not be made again is as good as sound, but nobody was wrong to doubt it."""
        current, report = self._state.round, signed.value
        if current.auditing != signed:
            return
        name, current.auditing = content_hash(report), None
        current.audited.add(name)
        if finding is Finding.SOUND:
            accused = current.accusations.get(name, {})
            false = {author for author, said in accused.items() if not said.value.loses_many}
            self._state.others.false_accusers |= false
            for some in self._state.others.evidence.values():
                for author in false & some.keys():
                    del some[author]
        elif finding is not Finding.OPEN:
            self._accuse(signed, finding)
        self._state.note_progress(now)

    def note_unfit(self, signed: Signed[Report]) -> None:
        """What a reducer handed out cannot be a mean: nobody needs to make it again."""
        if self._state.rules.audited_share:
            self._state.round.audited.add(content_hash(signed.value))
            self._accuse(signed, Finding.FALSE)

    def _accuse(self, signed: Signed[Report], finding: Finding) -> None:
        """Tells all, and takes nothing more of this reducer in this round."""
        report, loses_many = signed.value, finding is Finding.LOSES_MANY
        kind = "left out" if loses_many else "refused"  # it may be its links
        self._state.notify(kind, f"slice {report.piece.key} {_WHAT[finding]}", report.reducer)
        own = self._state.identity.sealer.seal(Accusation(self._state.rules.fingerprint, signed, loses_many))
        self._state.round.accusations.setdefault(content_hash(report), {})[self._state.me] = own
        if not loses_many:
            self._state.others.evidence.setdefault(report.reducer, {})[self._state.me] = own
        self._state.own.has_news = True
        self._bar(signed)

    def hear(self, signed: Signed[Accusation], is_of_our_plan: bool) -> bool:
        """Takes in what a member says of a report; whether there is something to look at."""
        current, others, said = self._state.round, self._state.others, signed.value
        report, members = said.report.value, {member.peer for member in current.tip.members}
        if said.fingerprint != self._state.rules.fingerprint or not self._state.rules.audited_share:
            return False
        if signed.author == self._state.me or signed.author in others.false_accusers:
            return False
        if report.reducer == self._state.me or not {signed.author, report.reducer} <= members:
            return False
        if not said.loses_many and sum(signed.author in some for some in others.evidence.values()) < MOST_ACCUSED:
            others.evidence.setdefault(report.reducer, {})[signed.author] = signed
        if not is_of_our_plan or sum(signed.author in some for some in current.accusations.values()) >= MOST_ACCUSED:
            return False
        if said.loses_many and not self._leaves_out_many(report):  # nobody could be proven wrong who says it of any
            return False
        known = current.accusations.setdefault(content_hash(report), {})
        if signed.author in known:
            return False
        known[signed.author] = signed
        return True

    def is_barred(self, content: Content) -> bool:
        """Whether a state has a slice of one who is known to have lied in this round."""
        return any(signed.author in self._state.round.barred for signed in content.statements.reports)

    def _bar(self, signed: Signed[Report]) -> None:
        """All that it reported is void, and done by the next in order."""
        current, reducer = self._state.round, signed.author
        current.barred.add(reducer)
        for index, report in [(i, r) for i, r in current.reports.items() if r.author == reducer]:
            key = report.value.piece.key
            del current.reports[index]
            current.empty_reports.setdefault(index, {})[reducer] = report
            current.staged.pop(key, None)
            current.fetching.pop(key, None)
        current.building = current.outcome = None
        for name, content in list(current.contents.items()):
            if self.is_barred(content):
                self._proposals.refuse(name)
