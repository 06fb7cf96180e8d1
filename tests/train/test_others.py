"""What rank 0 tells the other ranks, where one of its own calls fails."""

from __future__ import annotations

import pytest

from spes_p2p.errors import LocalProtocolError
from spes_p2p.train import others
from spes_p2p.train.ddp import Ranks


def test_after_a_failure_the_others_are_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the middle of a call that rank 0 has left."""
    told = list[str]()
    monkeypatch.setattr(others, "broadcast_object", lambda ranks, value: told.append(value[0]))
    mine = others.Others(Ranks(world_size=2))
    with pytest.raises(ValueError, match="at rank 0"), mine.told("park"):
        raise ValueError("at rank 0")
    with pytest.raises(LocalProtocolError, match="wake was called after a failure"), mine.told("wake"):
        pass
    mine.stop()
    assert told == ["park"]
