"""How a run is shown to people."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from spes_p2p.cli.status import CLEAR_SCREEN, _show_again, text_of
from spes_p2p.data.held import Coverage
from spes_p2p.ids import PeerId
from spes_p2p.swarm.vitals import Vitals
from spes_p2p.sync.report import ColumnLine, MixedDataset, PeerLine, RunReport

NOW = 1_700_000_000.0
ANNA, BEN = (
    PeerId("QmcUafVmoHSS8E9zV7UwhPHaR5gmUCrGRLMvXBYqNanna1"),
    PeerId("QmcUafVmoHSS8E9zV7UwhPHaR5gmUCrGRLMvXBYqNbenb2"),
)
ORGANISER = PeerId("QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xboot3")


def peer(name: PeerId, state: str, seen_seconds_ago: float = 2.0) -> PeerLine:
    return PeerLine(name, state, 12, 240, 98_300, 2345.0, (0, 1, 2), "0.1.0", NOW - seen_seconds_ago, ())


REPORT = RunReport(
    run_id="tiny",
    fingerprint="d53c9f38a4046582" * 4,
    round=12,
    step=1240,
    tokens=983_040,
    certificate="quorum",
    renewal=False,
    checked=True,
    seals=2,
    electors=3,
    head_age_seconds=12.0,
    model_hash="7e37ef20d4" * 6,
    peers=(
        peer(ORGANISER, "bootstrap"),
        peer(ANNA, "member"),
        peer(BEN, "silent", 90.0),
        replace(peer(PeerId("x"), "silent"), seen_at=0.0, version=""),
    ),
    columns=(
        *(ColumnLine(index, (ANNA,), 0) for index in range(3)),
        ColumnLine(3, (ANNA, BEN), 2),
        ColumnLine(4, (), 12),
    ),
)


def lines(report: RunReport) -> list[str]:
    return [" ".join(line.split()) for line in text_of(report, NOW).splitlines()]


def test_a_member_that_pauses_is_shown_as_paused_while_it_is_there() -> None:
    resting = Vitals(phase="paused")
    peers = [replace(peer(ANNA, state), vitals=resting) for state in ("member", "silent")]
    found = [line.split()[1] for line in lines(replace(REPORT, peers=tuple(peers))) if line.startswith("Nanna1 ")]
    assert found == ["paused", "silent"]


def test_everything_about_a_run_fits_in_100_columns() -> None:
    assert max(map(len, text_of(REPORT, NOW).splitlines())) <= 100
    assert lines(REPORT) == [
        "run tiny, fingerprint d53c9f38a4046582",
        "round 12, step 1,240, 983.0k tokens, model 7e37ef20d4",
        "newest certificate: 2 signatures, checked, 12 s old; 3 electors for the next round",
        "",
        "peer state round tokens/s trained seen version columns",
        "xboot3 bootstrap 12 - - 2.0 s 0.1.0 0-2",
        "Nanna1 member 12 2.3k 98.3k 2.0 s 0.1.0 0-2",
        "Nbenb2 silent 12 2.3k 98.3k 1:30 0.1.0 0-2",
        "x silent - - - never - 0-2",
        "1 live member, 2.3k tokens/s together",
        "",
        "expert columns: 4 of 5 have an owner, 2 stale: 3-4",
        "0-2 Nanna1",
        "3 Nanna1, Nbenb2, last trained 2 rounds ago",
        "4 nobody, never trained",
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Coverage(0, (), 1.0, web=True), "data: no copy of the least copied piece; all of the data is on the web, too"),
        (Coverage(4, (), 1.0), "data: 4 copies of the least copied piece"),
        (
            Coverage(1, (ORGANISER,), 0.0),
            "data: 1 copy of the least copied piece; without the bootstrap node xboot3 training would stop",
        ),
        (
            Coverage(1, (ANNA, BEN), 0.25),
            "data: 1 copy of the least copied piece; without Nanna1 or Nbenb2 training would stop, "
            "after 25% of an epoch",
        ),
        (
            Coverage(0, (), 0.0),
            "data: no copy of the least copied piece: training will wait until somebody provides it",
        ),
    ],
)
def test_how_many_copies_of_the_data_there_are_and_who_is_not_spared(data: Coverage, said: str) -> None:
    report = replace(REPORT, data=data)
    assert lines(report)[-1] == said
    assert report.to_json()["data"]["copies"] == data.copies


def test_how_much_of_each_dataset_of_a_mixture_was_handed_out() -> None:
    report = replace(REPORT, mix=(MixedDataset("web", "ab" * 32, 900), MixedDataset("code", "cd" * 32, 100)))
    assert lines(report)[-1] == "handed out so far: web 90.0% (dataset ababababab), code 10.0% (dataset cdcdcdcdcd)"
    assert report.to_json()["mix"][1] == {"name": "code", "hash": "cd" * 32, "sequences": 100}


def test_a_round_in_which_nothing_was_trained_makes_no_column_stale() -> None:
    empty = replace(REPORT, columns=tuple(ColumnLine(index, (ANNA,), 1) for index in range(3)))
    assert lines(empty)[-2:] == ["expert columns: 3 of 3 have an owner", "0-2 Nanna1, last trained 1 round ago"]
    assert (empty.stale, empty.to_json()["stale"], REPORT.to_json()["stale"]) == ((), (), (3, 4))


def test_a_certificate_that_is_a_renewal_or_unproven_is_said_aloud() -> None:
    renewal = replace(REPORT, certificate="renewal", renewal=True, seals=1)
    assert "a renewal, signed by the organiser, checked" in lines(renewal)[2]
    assert "NOT CHECKED" in lines(replace(REPORT, checked=False))[2]
    genesis = replace(REPORT, certificate="genesis", checked=False, seals=1, head_age_seconds=None)
    assert lines(genesis)[2] == "newest certificate: signed by the organiser; 3 electors for the next round"


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_shows_one_table_after_the_other(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each in the place of the one before; elsewhere each with its time; by JSON a line each."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for _ in range(2):
        _show_again(REPORT, text_of(REPORT, NOW))
    shown = capsys.readouterr().out
    assert shown.count("run tiny, fingerprint") == 2
    assert shown.count(CLEAR_SCREEN) == shown.count("Ctrl-C to stop") == (2 if terminal else 0)
    _show_again(REPORT, "")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["round"] == REPORT.round


def test_a_run_that_is_over_invites_nobody() -> None:
    word = "spes1abc"
    report = replace(REPORT, invitation=word, data=Coverage(1, (ORGANISER,), 0.0), last_round=11)
    first, *rest = lines(report)
    assert first == (
        "the run is over: its organiser ended it with round 12; get its model with: spes-p2p export spes1abc "
        "--output MODEL"
    )
    text = "\n".join(rest)
    assert not any(words in text for words in ("join with", "for the next round", "training would stop"))
    assert report.to_json()["is_over"]
    coming = replace(report, last_round=20)
    assert lines(coming)[0] == "the organiser ends the run with round 20"
    assert lines(coming)[-1] == "others join with: spes-p2p join spes1abc"
    assert lines(replace(coming, brings_data=True))[-1] == "others join with: spes-p2p join spes1abc --data DIR"


def test_whole_ids_are_shown_where_they_are_asked_for() -> None:
    assert f"Nanna1 is {ANNA}" in text_of(REPORT, NOW, ids=True).splitlines()
    assert ANNA not in text_of(REPORT, NOW)


def test_before_the_run_has_begun_it_says_who_waits() -> None:
    waiting = replace(REPORT, certificate="", peers=(peer(ANNA, "waiting"),), columns=())
    assert lines(waiting)[1] == "the run has not begun: 1 peer waiting"
    assert not any("columns:" in line for line in lines(waiting))


def test_who_is_waited_for_is_said_with_what_helps() -> None:
    waiting = replace(REPORT, electors=3, needed=2, missing=(ANNA, BEN))
    [text] = [line for line in lines(waiting) if line.startswith("WAITING")]
    assert f"round {REPORT.round + 1} needs 2 of 3 electors; missing: Nanna1, Nbenb2" in text
    assert "the organiser's node runs (its key, on any machine)" in text
    assert "spes-p2p bootstrap --init-from" in text
    assert not [line for line in lines(REPORT) if line.startswith("WAITING")]


def test_how_much_of_what_strangers_gave_counted_is_shown_and_whom_the_columns_lack() -> None:
    strangers = [replace(peer(ANNA, "member"), share=0.931, average_share=0.5), peer(BEN, "member")]
    strangers.append(replace(peer(PeerId("x"), "member"), share=0.0, average_share=0.25))
    found = lines(replace(REPORT, peers=tuple(strangers), more_trusted=2))
    assert [line for line in found if line.startswith("stranger")] == [
        "stranger Nanna1: 93% of what it gave counted, 50% on average",
        "stranger x: 0% (it points another way than the trusted peers' mean) of what it gave counted, 25% on average",
    ]
    assert "only trusted peers own columns alone: it takes 2 more trusted peers (spes-p2p run vouch)" in found
    assert not any("trusted" in line for line in lines(REPORT))
