"""What nodes say they hold of the run's data, and what follows: how many copies there are, and who is indispensable.

The stream of sequences is cut into spans (`copies.py`), at most MOST_SPANS an epoch. A node says with one bit a span
that it has all of it; so all that is known of who has what takes MOST_SPANS bits a node, however large the dataset is.
Pure; nobody checks what is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Annotated

from spes_p2p.bounds import Bounded, between, length
from spes_p2p.ids import PeerId

MOST_SPANS = 4096
MAX_FIRST = 2**60


@dataclass(frozen=True)
class Held(Bounded):
    """What one node has. `whole`: the whole dataset."""

    first: Annotated[int, between(0, MAX_FIRST)] = 0
    """The span of the first bit: from about there on the stream is still to be trained on."""
    bits: Annotated[bytes, length(0, (MOST_SPANS + 7) // 8)] = b""
    """The highest bit of the first byte first."""
    whole: bool = False
    web: bool = False
    """It knows web servers where all of it lies."""

    def has(self, span: int) -> bool:
        at = span - self.first
        return self.whole or (0 <= at < 8 * len(self.bits) and bool(self.bits[at // 8] & 0x80 >> at % 8))


@dataclass(frozen=True)
class Coverage:
    """How safe the data of the coming epoch is."""

    copies: int
    """Nodes that have all of the span that fewest have: no piece of the data is at fewer."""
    needed: tuple[PeerId, ...]
    """Nodes that alone hold some data, ordered by when it is trained on; without any one, training would stop."""
    safe_part: float
    """Of the epoch: what lies before the first span that fewer than two have."""
    web: bool = False
    """What no node has comes from the web, so that no node is needed."""


def coverage(held: Mapping[PeerId, Held]) -> Coverage | None:
    """None where nobody has data of the run to give."""
    found = _at_nodes(held)
    if not any(one.web for one in held.values()):
        return found
    return Coverage(found.copies if found is not None else 0, (), 1.0, web=True)


def _at_nodes(held: Mapping[PeerId, Held]) -> Coverage | None:
    parts = {peer: one for peer, one in held.items() if one.bits and not one.whole}
    everything = [peer for peer, one in held.items() if one.whole]
    if not parts:
        sole = tuple(everything) if len(everything) == 1 else ()
        return Coverage(len(everything), sole, 0.0 if sole else 1.0) if everything else None
    first = median_high(one.first for one in parts.values())  # as most say: one that lies, or lags, moves nothing
    end = median_high(one.first + 8 * len(one.bits) for one in parts.values())
    fewest, needed, safe = len(held), dict[PeerId, None](), None
    for span in range(first, end):
        able = [*everything, *(peer for peer, one in parts.items() if one.has(span))]
        fewest = min(fewest, len(able))
        if len(able) < 2 and safe is None:
            safe = span - first
        if len(able) == 1:
            needed[able[0]] = None
    return Coverage(fewest, tuple(needed), 1.0 if safe is None else safe / (end - first))
