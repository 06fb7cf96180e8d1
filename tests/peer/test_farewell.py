"""What a peer says last: how many tokens counted, where it is all kept, and how to get a receipt where none came."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.consensus.ledger import Account
from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.peer.departure import Farewell
from spes_p2p.peer.stopping import EXIT_SECONDS
from spes_p2p.sync.trainer_bridge import TrainerBridge

ME = PeerId("a")


class Leaver:
    """A peer whose account was `before` when it came in, and is `now`."""

    def __init__(self, before: int, now: int, folder: Path = Path("peer")) -> None:
        self.gate = TrainerBridge()
        self.driver = SimpleNamespace(core=SimpleNamespace(tip=SimpleNamespace(round=7)))
        self.last_round: int | None = None
        self.peer_id = ME
        chain = SimpleNamespace(length=3, ledger=lambda round: SimpleNamespace(of=self._of))
        self.disk = SimpleNamespace(chain=chain)
        self.asked: list[float] = []
        self.answer: bytes | Exception = b"signed"
        self._accounts = [Account(ME, 1, before), *[Account(ME, 2, now)] * 9]
        connection: Any = self
        options: Any = SimpleNamespace(folder=folder)
        self.farewell = Farewell(connection, options)

    def _of(self, peer: PeerId) -> Account:
        assert peer == ME
        return self._accounts.pop(0)

    def make_receipt(self, seconds: float) -> bytes:
        self.asked.append(seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("before", "now", "trained", "kept", "words"),
    [
        (0, 5000, 5000, 0, "5.0k tokens trained here, all counted. "),
        (2000, 7000, 5000, 0, "5.0k tokens trained here, all counted; 7.0k since you first joined. "),
        (2000, 7500, 5000, 0, "5.0k tokens trained here, all counted; 7.5k since you first joined. "),
        (0, 3000, 5000, 0, "5.0k tokens trained here, 3.0k of them counted. "),
        (
            0,
            3000,
            5000,
            2000,
            "5.0k tokens trained here, 3.0k of them counted; the rest is handed in when",
        ),
        (2000, 1000, 5000, 0, "5.0k tokens trained here, 0 of them counted; 1.0k since you first joined. "),
        (0, 0, 0, 0, "Nothing was trained since this start. "),
    ],
)
def test_it_says_what_counted(before: int, now: int, trained: int, kept: int, words: str) -> None:
    said = Leaver(before, now).farewell.words(trained, kept)
    assert said.startswith(f"You have left. {words}")
    assert said.endswith("Everything is kept in the folder peer; go on with: spes-p2p join")


def test_another_folder_is_named_in_the_command_and_a_run_that_is_over_in_none() -> None:
    leaver = Leaver(0, 10, Path("other"))
    assert leaver.farewell.words(10, 0).endswith("go on with: spes-p2p join --output other")
    leaver.last_round = 7
    said = leaver.farewell.words(10, 0)
    assert said.startswith("The run is over. 10 tokens trained here, all counted.")
    assert said.endswith("get its model with: spes-p2p export --checkpoint other --output MODEL")


def test_a_receipt_is_made_in_the_time_that_is_left(tmp_path: Path) -> None:
    leaver = Leaver(0, 10, tmp_path)
    assert leaver.farewell.receipt() == f"the receipt for your work is {tmp_path / 'receipt.spes'}"
    assert (tmp_path / "receipt.spes").read_bytes() == b"signed"
    leaver.gate.stop()
    leaver.gate.stopped_at = time.monotonic() - EXIT_SECONDS + 2.0
    leaver.farewell.receipt()
    assert leaver.asked[0] > leaver.asked[1]
    assert leaver.asked[1] <= 1.0


@pytest.mark.parametrize("why", [NetworkError("silent"), TimeoutError(), OSError("full")])
def test_where_none_comes_it_says_how_to_get_one(tmp_path: Path, why: Exception) -> None:
    leaver = Leaver(0, 10, tmp_path)
    leaver.answer = why
    assert f"while the organiser's machine is up: spes-p2p receipt --output {tmp_path}" in leaver.farewell.receipt()


def test_who_was_never_counted_gets_no_receipt(tmp_path: Path) -> None:
    leaver = Leaver(0, 0, tmp_path)
    leaver._accounts = [Account(ME)]
    assert (leaver.farewell.receipt(), leaver.asked) == ("", [])
