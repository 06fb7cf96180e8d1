"""Audits of who trained, as one peer takes part in them: it looks at the work that it was drawn for, and tells all.

Beside the round: nobody waits for it, and what comes too late for the next manifest is of no use any more.
"""

from __future__ import annotations

from spes_p2p.consensus.actions import AuditWork
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.messages import Signed, Verdict
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.probation import drawn_auditors
from spes_p2p.consensus.statements import is_of_auditor


class WorkAudits(Part):
    """What is looked at, and what others have found."""

    def enter(self) -> None:
        """A new tip has drawn whose work is looked at."""
        tip = self._state.tip
        self._state.round.auditors = auditors = drawn_auditors(self._state.rules, tip)
        self._state.round.to_audit = tuple(e for e in tip.roster if self._state.me in auditors.get(e.peer, ()))

    def audit(self, now: float) -> bool:
        """Looks at the next that we were drawn for."""
        current = self._state.round
        if current.at_work_of is not None or not current.to_audit:
            return False
        current.at_work_of, *rest = current.to_audit
        current.to_audit = tuple(rest)
        self._state.out.append(AuditWork(current.at_work_of))
        return True

    def audited(self, entry: Contribution, finding: str | None) -> None:
        """How it went."""
        current, rules = self._state.round, self._state.rules
        if current.at_work_of != entry:
            return
        current.at_work_of = None
        if finding is not None:
            said = Verdict(rules.fingerprint, current.tip_hash, entry.peer, finding)
            current.verdicts.setdefault(entry.peer, {})[self._state.me] = self._state.identity.sealer.seal(said)
            self._state.own.has_news = True

    def hear(self, signed: Signed[Verdict]) -> None:
        """Keeps the first word of each auditor; no rule looks at it."""
        known = self._state.round.verdicts.get(signed.value.peer, {})
        is_new = signed.author not in known and signed.author != self._state.me
        if is_new and is_of_auditor(self._state.rules, self._state.tip, self._state.round.auditors, signed):
            self._state.round.verdicts.setdefault(signed.value.peer, {})[signed.author] = signed
