"""A model of one's own at a peer and at the organiser: what is refused, and what the run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from spes_p2p.errors import ConfigError
from spes_p2p.interop.own import Model
from spes_p2p.peer.options import NetworkOptions, PeerOptions
from spes_p2p.peer.run import _ranks
from spes_p2p.peer.start_state import make_own_start, start_from_own
from spes_p2p.state.store import StateStore
from tests.train.small import small_config
from tests.train.test_own import MODEL, Sum, column_of, next_token


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    options = PeerOptions(NetworkOptions(), tmp_path, model=MODEL, local_ranks=2)
    with (
        pytest.raises(ConfigError, match="trained by one rank only, not by 2"),
        _ranks(options, torch.device("cpu"), None, 8, print, print),
    ):
        raise AssertionError("ranks were started")


def test_the_organiser_stores_what_the_factory_gives_and_keeps_to_it(tmp_path: Path) -> None:
    config = start_from_own(MODEL, small_config("sync.merge_alpha=0"), tmp_path / "node")
    store = StateStore(tmp_path / "store", MODEL.layout(config))
    assert make_own_start(store, config, MODEL).root.hex() == config.run.initial_state
    calls = iter(range(10))

    def changing() -> nn.Module:
        module = Sum()
        nn.init.constant_(module.table.weight, float(next(calls)))
        return module

    other = Model(changing, next_token, column_of)
    config = start_from_own(other, small_config("sync.merge_alpha=0"), tmp_path / "node")
    empty = StateStore(tmp_path / "empty", other.layout(config))
    with pytest.raises(ConfigError, match="the model's factory gave values that hash to"):
        make_own_start(empty, config, other)
    assert empty.latest() is None
