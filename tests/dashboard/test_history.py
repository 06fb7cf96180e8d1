"""What the dashboard remembers: survives a restart, belongs to one run, and stays small."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.dashboard.follow import Follower
from spes_p2p.dashboard.history import KEPT_SECONDS, SLOT_SECONDS, THINNED_SLOTS, History
from spes_p2p.dashboard.source import Look
from spes_p2p.dashboard.web import MOST_POINTS, page_state
from spes_p2p.errors import ConfigError, StorageFull
from tests.dashboard.made_run import NOW, PEERS, ROUND_SECONDS, MadeSource, loss_at


def filled(history: History, first: int, last: int) -> None:
    """Rounds `first` to `last` of the made-up run, as they come."""
    follower, source = Follower(history), MadeSource()
    for round in range(first, last + 1):
        now = NOW + round * ROUND_SECONDS
        follower.apply(source.look_at(round, now, follower.known()), now)


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.sqlite"
    with closing(History(path)) as history:
        filled(history, 0, 9)
        before = page_state(history, NOW)
    with closing(History(path)) as history:
        again = page_state(history, NOW)
        assert {**again, "version": 0} == {**before, "version": 0}
        filled(history, 10, 12)
        after = page_state(history, NOW)
    assert after["rounds"]["round"] == list(range(13))
    assert after["rounds"]["loss"][:10] == before["rounds"]["loss"]
    assert [one["message"] for one in after["events"]] == [one["message"] for one in before["events"]]


def test_the_file_is_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.sqlite"
    with closing(History(path)) as history:
        filled(history, 0, 1)
        other = replace(MadeSource().report(2, NOW), fingerprint="ab" * 32)
        with pytest.raises(ConfigError, match="holds the history of run made with fingerprint d53c"):
            Follower(history).apply(Look(other, ()), NOW)
    path.write_bytes(b"this is no database at all" * 99)
    with pytest.raises(ConfigError, match="cannot be used as the dashboard's history"):
        History(path)


def test_a_disk_that_takes_nothing_is_no_bug_and_what_is_there_stays() -> None:
    """Whoever follows the run shows what is known, and tries again."""
    history = History()
    filled(history, 0, 1)
    history.run("PRAGMA query_only = ON")
    for what in (
        lambda: filled(history, 2, 2),
        lambda: history.put("head", {}),
        lambda: Follower(history).fail("x", NOW),
    ):
        with pytest.raises(StorageFull, match=":memory:"):
            what()
    assert page_state(history, NOW)["rounds"]["round"] == [0, 1]
    history.run("PRAGMA query_only = OFF")
    filled(history, 2, 2)
    assert page_state(history, NOW)["rounds"]["round"] == [0, 1, 2]


def test_a_file_that_may_only_be_read_is_refused(tmp_path: Path) -> None:
    """The page would show what was, for ever."""
    path = tmp_path / "dashboard.sqlite"
    History(path).close()
    data = bytearray(path.read_bytes())
    data[18] = 3  # a format that this SQLite reads and does not write
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be used as the dashboard's history: attempt to write a readonly"):
        History(path)


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    """A full disk keeps nobody from looking at a history."""
    path = tmp_path / "dashboard.sqlite"
    with closing(History(path)) as history:
        history.claim("made", "d53c" * 16)
    with closing(History(path)) as history:
        assert history._base.total_changes == 0
        history.claim("made", "d53c" * 16)
        assert history._base.total_changes == 0


def test_what_failed_halfway_was_never_written() -> None:
    history = History()

    def fail() -> None:
        with history.writing():
            history.add_event(1.0, "joined", "", "x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert history.rows("SELECT * FROM events") == []


def test_old_samples_are_thinned_and_new_ones_are_not() -> None:
    history = History()
    slots = 4 * THINNED_SLOTS
    for slot in range(slots):
        history.add_sample(
            peer="a", at=slot * SLOT_SECONDS, loss=1.0, tokens_per_second=1.0, sent=0, received=0, tokens=0
        )
    history.thin(KEPT_SECONDS + slots / 2 * SLOT_SECONDS)
    assert history.rows("SELECT COUNT(*) FROM samples")[0][0] == slots / 2 + slots / 2 / THINNED_SLOTS


def test_the_state_of_a_long_run_has_a_bounded_size() -> None:
    history = History()
    with history.writing():
        for round in range(3 * MOST_POINTS):
            history.add_round(
                round=round, name="", at=10.0 * round, kind="quorum", step=round, tokens=round, round_tokens=1,
                roster=1, members=1, alpha=0.0, stale=0,
            )  # fmt: skip
            history.add_sample(
                peer="a", at=10.0 * round, loss=1.0, tokens_per_second=1.0, sent=round, received=0, tokens=0
            )
    state = page_state(history, NOW)
    assert len(state["rounds"]["round"]) <= MOST_POINTS + 1
    assert len(state["samples"]["a"]["at"]) <= MOST_POINTS + 1
    assert (state["rounds"]["round"][-1], state["samples"]["a"]["sent"][-1]) == (3 * MOST_POINTS - 1,) * 2
    last_hour = page_state(history, NOW, hours=1.0)
    assert last_hour["rounds"]["at"][0] == 10.0 * (3 * MOST_POINTS - 1) - 3600


def test_the_loss_of_a_round_is_weighted_with_tokens() -> None:
    history = History()
    filled(history, 0, 3)
    state = page_state(history, NOW)
    tokens = [40_000 + 1000 * at for at in range(4)]
    expected = sum(one * (loss_at(3) + 0.02 * at) for at, one in enumerate(tokens)) / sum(tokens)
    assert state["rounds"]["loss"][3] == pytest.approx(expected)
    assert state["held_out"]["loss"] == pytest.approx([loss_at(round) + 0.1 for round in range(4)])
    assert {row["peer"] for row in state["timeline"]} == set(PEERS)
