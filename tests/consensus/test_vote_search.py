"""Everything that electors can say in a few ballots, every order of hearing it, and planted faults that must be found.

With `--thorough` more ballots: minutes of CPU time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_record import VoteRecord
from tests.consensus import planted_votes as planted
from tests.consensus.vote_gossip import GossipSearch, Walk
from tests.consensus.vote_search import Found, VoteSearch
from tests.simulation.judge import Violation

CRASH, BYZANTINE = Faults.CRASH, Faults.BYZANTINE
Record = Callable[[str, object], None]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("electors", "faults", "liars", "ballots", "states"),
    [
        (3, CRASH, (), 3, 8_554),
        (4, CRASH, (), 2, 3_158),
        (4, BYZANTINE, (0,), 2, 1_759),
        (4, BYZANTINE, (1,), 2, 5_704),
        (4, BYZANTINE, (3,), 2, 839),
        pytest.param(4, CRASH, (), 3, 49_056, marks=pytest.mark.thorough),
        *(pytest.param(4, BYZANTINE, (liar,), 3, 8_554, marks=pytest.mark.thorough) for liar in range(4)),
    ],
)
def test_nothing_that_can_be_said_decides_two_values(
    electors: int, faults: Faults, liars: tuple[int, ...], ballots: int, states: int, record_property: Record
) -> None:
    report = VoteSearch(electors, faults, liars).run(ballots)
    record_property("told", str(report))
    assert report.states >= states
    assert report.decisions > 0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("electors", "faults", "down", "ballots", "states"),
    [
        (3, CRASH, 0, 1, 10_000),
        (3, CRASH, 1, 3, 200),
        (4, BYZANTINE, 1, 1, 8_000),
        pytest.param(4, BYZANTINE, 1, 2, 100_000, marks=pytest.mark.thorough),
    ],
)
def test_from_every_state_those_who_hear_each_other_decide(
    electors: int, faults: Faults, down: int, ballots: int, states: int, record_property: Record
) -> None:
    report = GossipSearch(electors, faults, down).run(ballots)
    record_property("told", str(report))
    assert report.states >= states
    assert report.longest_ballots <= electors


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_late_words_full_disks_and_liars_at_random(count: int) -> None:
    assert max(Walk(seed).run() for seed in range(count)) <= 8


@pytest.mark.parametrize(
    ("planted_in", "electors", "faults", "liars", "kind"),
    [
        (planted.ForgetsItsLock, 3, CRASH, (), "lock"),
        (planted.VotesTwice, 3, CRASH, (), "equivocation"),
        (planted.PrecommitsWithoutPolka, 3, CRASH, (), "polka"),
        (planted.PrecommitsWithoutTiles, 3, CRASH, (), "tiles"),
        (planted.CountsNil, 3, CRASH, (), "polka"),
        (planted.UnlocksForAnyPolka, 3, CRASH, (), "agreement"),
        (planted.SmallQuorum, 4, BYZANTINE, (0,), "agreement"),
        pytest.param(planted.TakesAPolkaOfAnotherBallot, 4, BYZANTINE, (2,), "agreement", marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_fault_is_found(
    planted_in: type[Tendermint] | type[Electorate] | type[VoteRecord],
    electors: int,
    faults: Faults,
    liars: tuple[int, ...],
    kind: str,
) -> None:
    search = VoteSearch(
        electors,
        faults,
        liars,
        planted_in if issubclass(planted_in, Tendermint) else Tendermint,
        planted_in if issubclass(planted_in, Electorate) else Electorate,
        planted_in if issubclass(planted_in, VoteRecord) else VoteRecord,
    )
    with pytest.raises(Found) as found:
        search.run(3)
    assert found.value.kind == kind


@pytest.mark.parametrize(("electors", "faults", "liars"), [(3, CRASH, (0,)), (4, BYZANTINE, (0, 1))])
def test_more_liars_than_the_run_allows_for_can_decide_two_values(
    electors: int, faults: Faults, liars: tuple[int, ...]
) -> None:
    """What `swarm.faults` promises, and no more."""
    with pytest.raises(Found, match="2 values are decided"):
        VoteSearch(electors, faults, liars).run(1)


def test_where_f_and_one_more_were_needed_to_go_on_a_crash_could_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `Electorate.believed` is one without liars, and why who has gone on counts (`HeardVotes.passed`)."""
    monkeypatch.setattr(Electorate, "believed", property(lambda self: len(self.order) - self.quorum + 1))
    with pytest.raises(Violation, match="stall"):
        GossipSearch(3, CRASH, elector_class=planted.CountsOnlyThisBallot).run(2, 60_000)
