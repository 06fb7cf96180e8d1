"""What a peer says last: how many tokens counted, and where it is all kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.peer.departure import last_words
from spes_p2p.peer.presence import Progress


def said(trained: int, counted: int, kept: int = 0, folder: str = "peer", last_round: int | None = None) -> str:
    """The last words of a peer that trained so many tokens since its start, in round 7."""
    connection: Any = SimpleNamespace(
        driver=SimpleNamespace(core=SimpleNamespace(tip=SimpleNamespace(round=7))),
        presence=SimpleNamespace(progress=Progress(tokens=trained, counted_tokens=counted)),
        last_round=last_round,
    )
    return last_words(connection, Path(folder), kept)


@pytest.mark.parametrize(
    ("counted", "trained", "kept", "words"),
    [
        (5000, 5000, 0, "5.0k tokens trained here, all counted. "),
        (5500, 5000, 0, "5.0k tokens trained here, all counted. "),
        (3000, 5000, 0, "5.0k tokens trained here, 3.0k of them counted. "),
        (3000, 5000, 2000, "5.0k tokens trained here, 3.0k of them counted; the rest is handed in when"),
        (-1000, 5000, 0, "5.0k tokens trained here, 0 of them counted. "),
        (0, 0, 0, "Nothing was trained since this start. "),
    ],
)
def test_it_says_what_counted(counted: int, trained: int, kept: int, words: str) -> None:
    last = said(trained, counted, kept)
    assert last.startswith(f"You have left. {words}")
    assert last.endswith("Everything is kept in the folder peer; go on with: spes-p2p join")


def test_another_folder_is_named_in_the_command_and_a_run_that_is_over_in_none() -> None:
    assert said(10, 10, folder="other").endswith("go on with: spes-p2p join --output other")
    last = said(10, 10, folder="other", last_round=7)
    assert last.startswith("The run is over. 10 tokens trained here, all counted.")
    assert last.endswith("get its model with: spes-p2p export --checkpoint other --output MODEL")
