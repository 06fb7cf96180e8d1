"""No parser of what others send, or of what lies on a disk, fails in a way that nobody expects."""

from __future__ import annotations

from functools import partial

import pytest

from tests import fuzzing

SECONDS = 8.0


def test_only_known_errors_come_out_of_any_parser() -> None:
    """From the same seed each time: what no run has seen is for scripts/fuzz.py."""
    done = fuzzing.run(SECONDS, first=0)
    assert set(done) == set(fuzzing.targets())


@pytest.mark.parametrize("name", fuzzing.targets())
def test_what_is_altered_was_taken_as_it_was(name: str) -> None:
    """Else a target would refuse everything, and find nothing."""
    target = fuzzing.targets()[name]
    for data in target.valid:
        target.parse(data)


def test_a_parser_that_fails_is_found() -> None:
    def parse(data: bytes) -> object:
        return data.decode()

    target = fuzzing.Target(parse, [b"a text"])
    with pytest.raises(fuzzing.Crash, match="UnicodeDecodeError"):
        list(map(partial(fuzzing.attack, "text", target), range(200)))
