"""What the quickstart calls a failure."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from spes_p2p.cli.quickstart import _new_folder
from spes_p2p.errors import ConfigError, DataError, StorageBroken
from spes_p2p.quickstart.first_run import PeerResult, QuickstartOptions, find_problems, prepare

OPTIONS = QuickstartOptions(Path("unused"), peers=2, rounds=3)
GOOD = PeerResult("peer-0", 0, 3, 5.0, 4.0, 100, 100, "aa", "aa")


def problems(*peers: PeerResult, before: float = 5.0, after: float = 4.0) -> tuple[str, ...]:
    return find_problems(OPTIONS, peers, before, after)


def test_when_every_promise_was_kept_there_is_no_problem() -> None:
    assert problems(GOOD, replace(GOOD, name="peer-1")) == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(GOOD, exit_code=1), "ended with exit code 1"),
        (replace(GOOD, rounds=2), "has round 2 of 3"),
        (replace(GOOD, state_hash="bb"), "does not hash to what was committed"),
        (replace(GOOD, state_hash="bb", committed_hash="bb"), "do not have the same state"),
    ],
)
def test_each_broken_promise_is_named(other: PeerResult, words: str) -> None:
    assert any(words in problem for problem in problems(GOOD, other))


@pytest.mark.parametrize("after", [5.0, 6.0, float("nan")])
def test_a_loss_that_does_not_fall_is_a_problem(after: float) -> None:
    assert len(problems(GOOD, after=after)) == 1


@pytest.mark.parametrize("wrong", ["model.width=3", "model.d_model=30", "output.tensorboard=5"])
def test_a_wrong_override_leaves_nothing_behind(wrong: str, tmp_path: Path) -> None:
    """So that the corrected command finds the folder as it was."""
    folder = tmp_path / "q"
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        prepare(QuickstartOptions(folder, overrides=(wrong,)), print)
    assert not folder.exists()


def test_text_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        prepare(QuickstartOptions(tmp_path / "q", data=tmp_path / "nowhere"), print)
    assert not any(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").touch()
    with pytest.raises(ConfigError, match="the folder quickstart of --output cannot be created: a file has this name"):
        prepare(QuickstartOptions(Path("quickstart")), print)
    assert _new_folder() == Path("quickstart-2")


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, max_bytes: int) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("spes_p2p.quickstart.first_run.build_stdlib_corpus", refuse)
    with pytest.raises(StorageBroken, match="corpus cannot be read or written: Permission denied"):
        prepare(QuickstartOptions(tmp_path), print)
