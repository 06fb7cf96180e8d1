"""What nodes say that they have, and what follows: the least copied span, and without whom training would stop."""

from __future__ import annotations

import numpy as np
import pytest

from spes_p2p.data.held import MOST_SPANS, Coverage, Held, coverage
from spes_p2p.ids import PeerId

A, B, BOOT = PeerId("a"), PeerId("b"), PeerId("boot")
WHOLE = Held(whole=True)


def held(first: int, text: str) -> Held:
    return Held(first, np.packbits([letter == "x" for letter in text]).tobytes())


def test_a_bit_for_each_span() -> None:
    some = held(10, "x.......xx......")
    assert [span for span in range(40) if some.has(span)] == [10, 18, 19]
    assert WHOLE.has(10**6)
    with pytest.raises(ValueError, match="the length of bits is"):
        Held(0, bytes(MOST_SPANS // 8 + 1))
    with pytest.raises(ValueError, match="first is -1"):
        Held(-1)


def test_nobody_hands_out_data() -> None:
    assert coverage({}) is None
    assert coverage({A: Held()}) is None


def test_whoever_has_everything_alone_is_needed() -> None:
    assert coverage({BOOT: WHOLE, A: Held()}) == Coverage(1, (BOOT,), 0.0)
    assert coverage({BOOT: WHOLE, A: WHOLE}) == Coverage(2, (), 1.0)


@pytest.mark.parametrize("lie", [held(2**60, "x......."), held(0, "." * 4096), held(2**60, "x" * 4096)])
def test_one_that_lies_about_where_the_run_stands_hides_no_copies(lie: Held) -> None:
    honest = {PeerId(f"peer-{number}"): held(20, "x" * 64) for number in range(3)}
    assert coverage({**honest, A: lie}) == Coverage(3, (), 1.0)


def test_the_least_copied_span_counts() -> None:
    assert coverage({BOOT: WHOLE, A: held(0, "xxxx....")}) == Coverage(1, (BOOT,), 0.5)
    assert coverage({A: held(0, "xxxx...."), B: held(0, "...xxxxx")}) == Coverage(1, (A, B), 0.0)
    assert coverage({A: held(0, "xxxx...."), B: held(0, "....xxx.")}) == Coverage(0, (A, B), 0.0)
    assert coverage({BOOT: WHOLE, A: held(0, "xxxx...."), B: held(0, "....xxxx")}) == Coverage(2, (), 1.0)


def test_what_lies_on_the_web_makes_no_node_necessary() -> None:
    found = coverage({BOOT: Held(web=True), A: Held(0, bytes(8), web=True), B: Held(0, bytes(8))})
    assert found == Coverage(0, (), 1.0, web=True)
    assert coverage({BOOT: Held(web=True)}) == found


def test_what_lies_behind_is_of_no_importance() -> None:
    """One peer has heard of a newer round than the other: what it does not look at any more is trained on."""
    assert coverage({BOOT: WHOLE, A: held(8, "xxxxxxxx"), B: held(0, "................")}) == Coverage(2, (), 1.0)
