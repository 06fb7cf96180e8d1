"""From looks to history: who came and went, another history that wins, lies, a swarm that dies and returns."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from spes_p2p.consensus.manifest import Decay, manifest_hash
from spes_p2p.consensus.messages import RENEWAL
from spes_p2p.dashboard.follow import MOST_FAILURES, MOST_PEERS, MOST_WARNINGS, Follower, follow
from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.source import NOTHING, Look, Source
from spes_p2p.dashboard.web import page_state
from spes_p2p.errors import ClockSkewed, ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.vitals import LEAVING, LEFT, PeerWarning, Vitals
from tests.dashboard.made_run import NOW, PEERS, MadeSource
from tests.dashboard.test_history import filled
from tests.simulation.virtual_time import run_virtual


def messages(history: History) -> list[str]:
    return [event["message"] for event in reversed(page_state(history, NOW)["events"])]


def test_who_comes_and_goes_is_an_event() -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    follower.apply(source.look_at(0, NOW, follower.known()), NOW)
    look = source.look_at(1, NOW, follower.known())
    manifest = look.commits[-1].manifest
    ownership = ((), *manifest.ownership[1:])
    left = replace(manifest, members=manifest.members[1:], ownership=ownership)
    certificate = replace(look.commits[-1].certificate, kind=RENEWAL)
    follower.apply(Look(look.report, (replace(look.commits[-1], manifest=left, certificate=certificate),)), NOW)
    assert messages(history) == [
        "round 1 is a renewal, by the organiser's key",
        "Nanna1 is no longer a member from round 1 on",
        "expert columns without an owner: 0",
    ]


def test_of_two_dashboards_with_one_file_the_slower_adds_nothing() -> None:
    history, source = History(), MadeSource()
    both = Follower(history), Follower(history)
    looks = [source.look_at(round, NOW, both[0].known()) for round in (0, 1)]
    looks[1] = replace(looks[1], commits=looks[1].commits[-1:])
    last = looks[1].commits[0]
    left = replace(last.manifest, members=last.manifest.members[1:])
    renewed = replace(last.certificate, kind=RENEWAL)
    looks.append(Look(looks[1].report, (replace(last, manifest=replace(left, round=2), certificate=renewed),)))
    for look in looks:
        both[0].apply(look, NOW)
    told, kept = messages(history), history.rows("SELECT * FROM peer_rounds")
    assert len(told) == 2
    for look in looks:
        both[1].apply(look, NOW)
    assert messages(history) == told
    assert [*map(tuple, history.rows("SELECT * FROM peer_rounds"))] == [*map(tuple, kept)]


def test_who_leaves_during_a_pause_does_not_resume() -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    for at, phase in enumerate(("train", "paused", LEAVING, LEFT)):
        look = source.look_at(0, NOW + at, follower.known())
        line = replace(look.report.peers[1], vitals=Vitals(phase=phase))
        follower.apply(replace(look, report=replace(look.report, peers=(line,))), NOW + at)
    assert messages(history) == ["Nanna1 is paused"]


def test_another_history_takes_the_place_of_ours() -> None:
    history = History()
    filled(history, 0, 9)
    follower, source = Follower(history), MadeSource()
    look = source.look_at(5, NOW, NOTHING)
    other = replace(look.commits[5].manifest, tokens=7)
    follower.apply(Look(look.report, (replace(look.commits[5], manifest=other),)), NOW)
    assert page_state(history, NOW)["rounds"]["round"] == [0, 1, 2, 3, 4, 5]
    assert follower.name_of(5) == manifest_hash(other)
    assert messages(history)[-1] == "the run goes on with a history that counts more: rounds from 5 on were replaced"


def test_the_falling_learning_rate_and_the_end_are_events() -> None:
    history, source = History(), MadeSource()
    follower, look = Follower(history), source.look_at(1, NOW, NOTHING)
    follower.apply(source.look_at(0, NOW, NOTHING), NOW)
    last = look.commits[-1]
    falling = replace(last, manifest=replace(last.manifest, decay=Decay(last.manifest.step, 60)))
    ending = replace(look.report, last_round=4)
    for report in (look.report, ending, ending, replace(ending, round=5), replace(ending, last_round=None)):
        follower.apply(Look(report, (falling,)), NOW)
    assert messages(history) == [
        "the learning rate falls over 60 steps from round 1 on",
        "the organiser ends the run with round 4",
        "the run is over: round 5 was its last",
    ]


def test_rounds_that_only_one_peer_tells_of_are_not_drawn() -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    look = source.look_at(2, NOW, follower.known())
    liar = look.report.peers[1]
    vitals = replace(liar.vitals, timed_round=10**9, held_out_round=10**9)
    peers = (look.report.peers[0], replace(liar, vitals=vitals))
    follower.apply(Look(replace(look.report, peers=peers), look.commits), NOW)
    state = page_state(history, NOW)
    assert (state["timeline"], state["held_out"]["round"]) == ([], [])


def test_strangers_are_bounded_and_nothing_that_only_they_say_is_drawn() -> None:
    history = History()
    follower = Follower(history)
    look = MadeSource().look_at(2, NOW, follower.known())
    strangers = tuple(
        replace(look.report.peers[1], peer=PeerId(f"stranger{at}"), state="joining") for at in range(MOST_PEERS + 50)
    )
    follower.apply(Look(replace(look.report, peers=strangers), look.commits), NOW)
    state = page_state(history, NOW)
    assert (len(state["peers"]), state["timeline"], state["held_out"]["round"]) == (MOST_PEERS, [], [])


def test_the_first_word_about_a_held_out_loss_stands() -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    look = source.look_at(2, NOW, follower.known())
    follower.apply(look, NOW)
    liar = replace(look.report.peers[2], vitals=replace(look.report.peers[1].vitals, held_out_loss=0.001))
    follower.apply(Look(replace(look.report, peers=(liar,)), ()), NOW + 9)
    assert page_state(history, NOW)["held_out"]["loss"] == [look.report.peers[1].vitals.held_out_loss]


def test_whose_record_is_gone_stays_in_the_list() -> None:
    history = History()
    filled(history, 0, 3)
    look = MadeSource().look_at(4, NOW, Follower(history).known())
    Follower(history).apply(Look(replace(look.report, peers=look.report.peers[:-1]), look.commits), NOW)
    shown = page_state(history, NOW)["peers"]
    assert (shown[PEERS[3]]["state"], shown[PEERS[3]]["tokens"]) == ("gone", 40_000 * 3)


def test_a_swarm_that_dies_leaves_the_history_and_may_come_back() -> None:
    history, opened, skewed = History(), [], list[float]()

    async def open_source() -> Source:
        if not skewed:
            skewed.append(NOW)
            raise ClockSkewed("this machine, which has just woken up, is an hour behind")
        source = MadeSource()
        source.round = 5
        opened.append(source)
        return source

    async def main() -> None:
        first = MadeSource()
        task = asyncio.ensure_future(follow(open_source, history, first, look_seconds=1.0, clock=lambda: NOW))
        await asyncio.sleep(2.5)
        first.dead = True
        await asyncio.sleep(1.0)
        state = page_state(history, NOW)
        assert "10.0.0.1 is refused" in state["source"]["error"]
        assert state["rounds"]["round"] == [0, 1, 2]
        await asyncio.sleep(MOST_FAILURES + 2.0)
        assert (first.closed, len(opened)) == (1, 1)
        task.cancel()
        await asyncio.wait((task,))
        assert opened[0].closed == 1

    run_virtual(main())
    assert messages(history)[-1] == "the swarm answers again"
    assert page_state(history, NOW)["source"]["error"] == ""


def test_what_is_not_a_matter_of_the_network_ends_it() -> None:
    history = History()
    history.claim("other", "ab" * 32)

    async def open_source() -> Source:
        return MadeSource()

    with pytest.raises(ConfigError, match="holds the history of run other"):
        run_virtual(follow(open_source, history))


def loaded(vitals: Vitals, load: tuple[int, ...]) -> Vitals:
    return replace(vitals, load_percent=load, highest_load_percent=load, lowest_load_percent=load)


def told(round: int, *loads: tuple[int, ...], tokens: tuple[int, ...] = ()) -> History:
    """What is kept of a round where the made-up peers say these loads, counted with `tokens`."""
    history = History()
    look = MadeSource().look_at(round, NOW, NOTHING)
    lines = [replace(line, vitals=loaded(line.vitals, load)) for line, load in zip(look.report.peers[1:], loads)]
    manifest = look.commits[-1].manifest
    roster = tuple(replace(one, tokens=count) for one, count in zip(manifest.roster, tokens))
    last = replace(look.commits[-1], manifest=replace(manifest, roster=roster))
    report = replace(look.report, peers=tuple(lines), columns=look.report.columns[:2])
    for at in range(2):  # what is told twice counts once
        again = tuple(replace(line, seen_at=NOW + at) for line in lines)
        Follower(history).apply(Look(replace(report, peers=again), (*look.commits[:-1], last) if not at else ()), NOW)
    return history


def test_the_load_of_experts_is_the_mean_by_the_tokens_that_the_round_counts() -> None:
    (row,) = page_state(told(3, (100, 200), (200, 0), tokens=(3000, 1000)), NOW)["loads"]
    assert row == {"round": 3, "at": NOW, "peers": 2, "mean": [1.25, 1.5], "highest": [2.0, 2.0], "lowest": [1.0, 0.0]}


def test_a_load_of_work_that_was_not_counted_or_of_other_experts_is_passed_over() -> None:
    (row,) = page_state(told(3, (1, 1, 1), (400, 400), (100, 200), tokens=(9000, 0, 3000)), NOW)["loads"]
    assert (row["peers"], row["mean"]) == (1, [1.0, 2.0])


def test_warnings_of_peers_are_events_once_and_nobody_can_fill_the_list() -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    look = source.look_at(2, NOW, NOTHING)
    follower.apply(look, NOW)
    member, stranger = look.report.peers[1], replace(look.report.peers[2], state="joining")
    for at in range(1, 2 * MOST_WARNINGS):
        warnings = (PeerWarning(NOW - 60, "warning", "a disk is full"), PeerWarning(NOW + at, "error", f"error {at}"))
        lines = (replace(one, seen_at=NOW + at, vitals=Vitals(warnings=warnings)) for one in (member, stranger))
        follower.apply(Look(replace(look.report, peers=tuple(lines)), ()), NOW + at)
    events = [event for event in page_state(history, NOW)["events"] if event["kind"] in ("warning", "error")]
    assert len(events) == MOST_WARNINGS
    assert {event["who"] for event in events} == {member.peer}
    assert [event["message"] for event in events if event["kind"] == "warning"] == ["Nanna1: a disk is full"]
    assert events[-1]["at"] == NOW - 60
    assert events[0]["at"] == NOW + MOST_WARNINGS - 1


def test_a_run_that_waits_is_shown_until_it_goes_on() -> None:
    history, source = History(), MadeSource()
    follower, look = Follower(history), source.look_at(5, NOW, NOTHING)
    waiting = replace(look.report, electors=3, needed=2, missing=tuple(PEERS[:2]))
    for _ in range(2):
        follower.apply(replace(look, report=waiting), NOW)
    text = page_state(history, NOW)["head"]["waiting"]
    assert "needs 2 of 3 electors" in text
    follower.apply(look, NOW)
    assert page_state(history, NOW)["head"]["waiting"] == ""
    assert messages(history)[-2:] == [text, "enough electors are heard again"]
