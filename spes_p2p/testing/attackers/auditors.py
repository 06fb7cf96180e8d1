"""Attacks by who audits what others have trained: verdicts that do not say what was found."""

from __future__ import annotations

from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.testing.attackers.attack import Attack
from spes_p2p.testing.attackers.contributions import Idle


class FailsHonest(Attack):
    """Trains honestly, and says of all honest work that it was not done."""

    name = "fails-honest"

    def finding(self, is_liars: bool, finding: str | None) -> str | None:
        return finding if is_liars else FAILED


class PassesLiars(Idle):
    """Trains nothing, claims what it may, says of liars' work that it was done, and of honest work that it was not."""

    name = "passes-liars"

    def finding(self, is_liars: bool, finding: str | None) -> str | None:
        return PASSED if is_liars else FAILED
