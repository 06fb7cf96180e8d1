"""A model of one's own: its place in the state and in the fingerprint, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_p2p.config.fingerprint import fingerprint
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from spes_p2p.interop.hf import state_layout
from spes_p2p.interop.own import Model, OwnStart, run_layout
from spes_p2p.state.layout import Values


class Small(nn.Module):
    def __init__(self, width: int = 3, experts: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.experts = nn.ModuleList(nn.Linear(width, 7) for _ in range(experts))


def no_loss(module: nn.Module, token_BS: Tensor) -> Tensor:
    raise AssertionError("nobody trains here")


def column_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("experts.") else None


def model_of(factory: Callable[[], Any] = Small, columns: Any = column_of, version: str = "") -> Model:
    return Model(factory, no_loss, columns, version)


def config_of(*overrides: str) -> Config:
    return load_config(bundled_config("tiny"), ["sync.merge_alpha=0", "sync.tile_values=8", *overrides])


def test_shared_parameters_and_then_columns_make_the_grid() -> None:
    layout = model_of().layout(config_of())
    assert [block.size for block in layout.blocks] == [21, 28, 28]
    assert [placed.tensor.name for placed in layout.blocks[2].tensors] == ["experts.1.weight", "experts.1.bias"]
    assert model_of().layout(config_of("sync.outer=nesterov")).num_values == 2 * layout.num_values


def test_a_model_without_experts_is_one_shared_block() -> None:
    model = Model(Small, no_loss)
    assert model.num_columns == 0
    assert [block.size for block in model.layout(config_of()).blocks] == [77]
    config = model.config_of(config_of(), OwnStart(model, config_of()).root())
    assert (config.model.num_experts, config.model.top_k, config.swarm.experts_per_peer) == (1, 1, 1)


def test_a_dict_may_say_the_columns_and_must_say_all() -> None:
    names = [name for name, _ in Small().named_parameters()]
    columns = {name: column_of(name) for name in names}
    assert model_of(columns=columns).digest == model_of().digest
    with pytest.raises(ConfigError, match=r"parameter table.weight is not mapped"):
        model_of(columns={name: column for name, column in columns.items() if column is not None})
    with pytest.raises(ConfigError, match=r"columns names experts.9.bias, which the model does not have"):
        model_of(columns=columns | {"experts.9.bias": 9})


@pytest.mark.parametrize(
    ("factory", "columns", "named"),
    [
        (lambda: 3, column_of, "the factory gave an object of type int"),
        (lambda: Small().double(), column_of, r"parameter table.weight is torch.float64"),
        (lambda: Small().requires_grad_(False), column_of, "no parameter to train"),
        (Small, lambda name: 1 if "experts" in name else None, "no parameter belongs to column 0"),
        (Small, lambda name: "left", r"parameter table.weight is mapped to 'left'"),
        (Small, lambda name: -1, r"parameter table.weight is mapped to -1"),
        (Small, lambda name: True, r"parameter table.weight is mapped to True"),
    ],
)
def test_what_cannot_be_trained_is_named(factory: Callable[[], Any], columns: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        model_of(factory, columns)
    assert caught.value.fix


def test_a_factory_that_changes_its_mind_is_named() -> None:
    widths = iter([3, 4])
    model = model_of(lambda: Small(next(widths)))
    with pytest.raises(ConfigError, match=r"gave table.weight the shape \(7, 4\) now, but \(7, 3\) before"):
        model.build()
    experts = iter([2, 3])
    more = model_of(lambda: Small(experts=next(experts)))
    with pytest.raises(ConfigError, match="other parameters"):
        more.build()


def frozen(value: float) -> nn.Module:
    module = Small()
    module.table.weight.requires_grad_(False).fill_(value)
    return module


def test_the_fingerprint_covers_the_layout_the_frozen_values_and_the_version() -> None:
    models = [
        model_of(),
        model_of(lambda: Small(4)),
        model_of(lambda: Small(experts=3)),
        Model(Small, no_loss),
        model_of(version="2"),
        model_of(lambda: frozen(1.0)),
        model_of(lambda: frozen(2.0)),
    ]
    found = {fingerprint(model.config_of(config_of(), OwnStart(models[0], config_of()).root())) for model in models}
    assert len(found) == len({model.digest for model in models}) == len(models)
    assert model_of().digest == models[0].digest


def test_the_start_is_what_the_factory_gives_with_the_runs_seed() -> None:
    model, config = model_of(), config_of()
    start, again = OwnStart(model, config), OwnStart(model, config)
    assert start.root() == again.root()
    assert start.root() != OwnStart(model, config_of("run.seed=1")).root()
    before = torch.get_rng_state()
    start.root()
    assert torch.equal(torch.get_rng_state(), before)
    with_outer = OwnStart(model, config_of("sync.outer=nesterov"))
    assert not with_outer(with_outer.layout.tiles[-1]).any()


def test_values_that_are_not_finite_are_refused() -> None:
    def broken() -> nn.Module:
        module = Small()
        nn.init.constant_(module.table.weight, float("nan"))
        return module

    with pytest.raises(ConfigError, match="not finite"):
        OwnStart(model_of(broken), config_of()).root()


def test_a_state_becomes_a_module_again() -> None:
    model = model_of()

    class State:
        def block(self, index: int) -> Values:
            return np.full(model.layout(config_of()).blocks[index].size, float(index), np.float32)

    module = model.load(State())
    assert (module.get_parameter("table.weight") == 0).all()
    assert (module.get_parameter("experts.1.bias") == 2).all()


def test_peers_with_another_model_or_none_are_refused() -> None:
    model = model_of()
    config = model.config_of(config_of(), OwnStart(model, config_of()).root())
    assert run_layout(config, model).num_values == 77
    with pytest.raises(ConfigError, match=r"trains another model .* than yours: 98 values in 5 parameters"):
        run_layout(config, model_of(lambda: Small(4), lambda name: None))
    with pytest.raises(ConfigError, match="a custom model of its organiser") as caught:
        run_layout(config, None)
    assert "model=..." in caught.value.fix
    with pytest.raises(ConfigError, match="trains the model of its config"):
        run_layout(config_of(), model)
    with pytest.raises(ConfigError, match="a custom model of its organiser"):
        state_layout(config)


@pytest.mark.parametrize("override", ["sync.merge_alpha=0.1"])
def test_settings_of_our_own_model_alone_are_refused(override: str) -> None:
    config = config_of(override)
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        model_of().config_of(config, OwnStart(model_of(), config).root())
