"""What is derived from a run's config before it begins."""

from __future__ import annotations

import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.errors import ConfigError
from spes_p2p.interop.hf import state_layout
from spes_p2p.sync.node import check_sizes


@pytest.mark.parametrize("name", ["spes-1b", "spes-7b", "spes-9b"])
def test_rounds_of_the_published_models_fit_into_messages(name: str) -> None:
    config = load_config(bundled_config(name))
    check_sizes(config, state_layout(config))


@pytest.mark.parametrize("change", ["sync.tile_values=131072", "sync.slice_tiles=2"])
def test_a_model_in_too_many_small_parts_is_refused_before_it_trains(change: str) -> None:
    config = load_config(bundled_config("spes-7b"), [change])
    with pytest.raises(ConfigError, match="a round's result would take") as error:
        check_sizes(config, state_layout(config))
    assert "sync.tile_values" in error.value.fix
