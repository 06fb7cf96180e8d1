"""Each error that users see has a code, which stays its own when words change and is never given twice."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from spes_p2p.cli.error_codes import CODES, HOLE, code_of

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_error_docs.py"))
FILE, PORT = "there is no file <>", "port <> is in use"
GIVEN: dict[str, str] = json.loads(CODES.read_text())


def test_each_error_is_known_by_what_it_says() -> None:
    for code, text in GIVEN.items():
        assert code_of(text.replace(HOLE, "7")) == code, text
        assert code_of(text.replace(HOLE, "a path/with (signs) | and * more")) == code, text


def test_what_is_no_error_of_users_has_no_code() -> None:
    assert code_of("something that nobody says") is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ([FILE, PORT], {"E101": FILE, "E102": PORT}),
        ([PORT], {"E101": FILE, "E102": PORT}),  # gone, and its code with it
        (["port <number> was in use", FILE], {"E101": FILE, "E102": "port <> was in use"}),
        ([FILE, PORT, "no room left"], {"E101": FILE, "E102": PORT, "E103": "no room left"}),
    ],
)
def test_codes_stay_with_their_errors(now: list[str], expected: dict[str, str]) -> None:
    assert SCRIPT["codes"](now, {"E101": FILE, "E102": PORT}) == expected
