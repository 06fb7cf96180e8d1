"""What a person may choose for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.peer.options import (
    NetworkOptions,
    PeerOptions,
    check_columns,
    column_budget,
    config_path,
    meeting,
    parse_columns,
    parse_data_disk,
    parse_limit,
)
from spes_p2p.swarm.invite import Invite, encode


@pytest.mark.parametrize(
    ("text", "columns"), [("0", (0,)), ("0,3-5", (0, 3, 4, 5)), (" 7 , 2-2,7", (2, 7)), ("12-10,1", None)]
)
def test_columns_are_numbers_and_spans(text: str, columns: tuple[int, ...] | None) -> None:
    if columns is not None:
        assert parse_columns(text) == columns
    else:
        with pytest.raises(ConfigError):
            parse_columns(text)


@pytest.mark.parametrize("text", ["", "abc", "1,", "-1", "1.5", "5-3", "1--2", "0-99999999999", "²"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--owned-experts .* is not a list of columns") as caught:
        parse_columns(text)
    assert "0,3-5" in caught.value.fix


def test_columns_that_the_run_does_not_have_are_named() -> None:
    check_columns((0, 7), 8)
    with pytest.raises(ConfigError, match=r"names column 8, but the run has 8 \(0 to 7\)"):
        check_columns((0, 8, 9), 8)


def test_an_invitation_may_be_in_a_file_with_broken_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peer = "QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"
    word = encode(Invite("tiny", b"f" * 16, PeerId(peer), (f"/ip4/203.0.113.7/tcp/31337/p2p/{peer}",)))
    Path("invite.txt").write_text(f"spes-p2p join {word[:50]}\n  {word[50:]}\n")
    assert meeting(("invite.txt",), ()) == meeting((word,), ())
    with pytest.raises(ConfigError, match=r"nothing\.txt"):
        meeting(("nothing.txt",), ())


def test_a_config_is_a_file_or_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path(Path("tiny")).name == "tiny.yaml"
    assert config_path(Path("runs/mine.yaml")) == Path("runs/mine.yaml")
    Path("home").mkdir()
    assert config_path(Path("home")).name == "home.yaml"  # a folder is no config
    Path("small").write_text("run: {run_id: mine}\n")
    assert config_path(Path("small")) == Path("small")
    with pytest.raises(ConfigError, match="no bundled config named tinny"):
        config_path(Path("tinny"))


def options(owned: tuple[int, ...] | None = None, most: int | None = None) -> PeerOptions:
    return PeerOptions(NetworkOptions(), Path("peer"), owned_experts=owned, max_experts=most)


@pytest.mark.parametrize(
    ("owned", "most", "fit", "budget"),
    [
        (None, None, 5, 5),
        (None, None, 99, 8),  # no more than there are
        (None, None, 0, 2),  # what the organiser asks of everybody
        ((0, 3, 4), None, 0, 3),
        ((0,), None, 0, 1),
        ((0,), None, 6, 6),
        (None, 1, 5, 1),
        (None, 6, 0, 6),
        (None, 0, 5, 0),
    ],
)
def test_a_budget_is_what_fits_or_what_a_person_says(
    owned: tuple[int, ...] | None, most: int | None, fit: int, budget: int
) -> None:
    assert column_budget(options(owned, most), experts_per_peer=2, fit=fit, num_experts=8) == budget


def test_a_claim_above_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="names 3 columns, but --max-experts is 2"):
        column_budget(options((0, 1, 2), 2), experts_per_peer=2, fit=8, num_experts=8)


def test_a_limit_is_a_rate_that_a_peer_can_live_with() -> None:
    assert parse_limit(None, "--max-upload") is None
    assert parse_limit("20Mbit", "--max-upload") == 2_500_000.0
    with pytest.raises(ConfigError, match="--max-upload 9kbit is less than the messages of a round need") as caught:
        parse_limit("9kbit", "--max-upload")
    assert "256kbit" in str(caught.value.fix)
    with pytest.raises(ConfigError, match="--max-download 'much' is not a link speed"):
        parse_limit("much", "--max-download")


def test_the_disk_for_data_has_a_least_size() -> None:
    assert parse_data_disk("20GB") == PeerOptions(NetworkOptions(), Path("p")).max_data_disk
    assert parse_data_disk("16MB") == 16_000_000
    for text in ("1MB", "0GB", "20", "20Mbit", "all"):
        with pytest.raises(ConfigError, match="--max-data-disk") as caught:
            parse_data_disk(text)
        assert caught.value.fix
