"""Who may take part in a run, as a peer finds out for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.membership import Roll
from spes_p2p.errors import PermanentError
from spes_p2p.ids import NO_HASH
from spes_p2p.peer.entrance import check_not_banned
from tests.sync.chains import A, B, MadeRun


def test_a_peer_is_told_who_has_banned_it_and_who_can_lift_it() -> None:
    made = MadeRun()
    rules, info, genesis = made.rules, made.info, made.genesis(NO_HASH).manifest
    by_organiser = Roll(info.fingerprint, 1, banned=(A,))
    known = Roll(info.fingerprint, 2, vouched=(A,))
    check_not_banned(rules, info, genesis, A)
    check_not_banned(rules, info, replace(genesis, banned=(B,)), A)
    check_not_banned(rules, info, replace(genesis, roll=known), A)
    with pytest.raises(PermanentError, match="the organiser of run tiny has banned this peer") as error:
        check_not_banned(rules, info, replace(genesis, roll=by_organiser), A)
    assert f"run ban --undo {A}" in error.value.fix
    for roll in (None, known):
        with pytest.raises(PermanentError, match="the electors of run tiny have banned this peer") as error:
            check_not_banned(rules, info, replace(genesis, banned=(A,), roll=roll), A)
        assert f"run vouch {A}" in error.value.fix
