"""The state of a run that trains a model of its owner's own: its grid, its name in the fingerprint, its first values.

A `Model` is what all peers of such a run must have alike: a factory, a loss, and which parameters are which column's.
Names, shapes, columns and the values of frozen parameters are hashed into the config (`model.own_layout`), so that a
peer with another model is refused. The loss is code and cannot be hashed: `version` stands for it. The initial values
are those that the factory gives to the organiser; peers fetch them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from spes_p2p.config.load import config_from_tree
from spes_p2p.config.schema import Config
from spes_p2p.errors import ConfigError
from spes_p2p.ids import Hash, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.model.own import Loss, OwnModel
from spes_p2p.state.hashes import hash_tiles
from spes_p2p.state.layout import BlockSource, Layout, StateTensor, Tile, Values
from spes_p2p.state.version import bytes_of

Columns = Mapping[str, int | None] | Callable[[str], int | None]
"""Which expert column a parameter is of, by its name; None: it is shared."""
_DOMAIN = b"spes-p2p own model 1\n"


def all_shared(name: str) -> None:
    """No parameter is an expert's."""


class Model:
    """A torch model of one's own for a run, with its loss. Every peer makes it from the same code."""

    def __init__(
        self, factory: Callable[[], nn.Module], loss: Loss, columns: Columns = all_shared, version: str = ""
    ) -> None:
        """Calls `factory` once, to see the parameters.

        `loss(module, token_BS)` gives the mean loss of token sequences [B, S] as a tensor of one number. `columns` says
        for each parameter, by its name in `named_parameters()`, of which expert column it is (numbers from 0 on without
        gaps), or None where all peers train it; a dict must have every parameter. `version`: any text; peers must have
        it alike, so change it with the loss. Raises ConfigError, naming the parameter, for a model that cannot be
        trained so.
        """
        self._factory = factory
        self._loss = loss
        self._version = version
        module = _made(factory)
        self.tensors = _tensors(module, columns)
        self.digest = self._digest_of(module)
        """What `model.own_layout` of the run's config is."""

    @property
    def num_columns(self) -> int:
        return len({tensor.column for tensor in self.tensors} - {None})

    def __str__(self) -> str:
        values = sum(tensor.size for tensor in self.tensors)
        return f"{values:,} values in {len(self.tensors)} parameters, {self.num_columns} columns ({self.digest[:16]})"

    def _digest_of(self, module: nn.Module) -> str:
        layout = [(tensor.name, tensor.shape, tensor.column) for tensor in self.tensors]
        frozen = sorted((name, *_frozen(parameter)) for name, parameter in _parameters(module, trained=False))
        text = json.dumps([layout, frozen, self._version], separators=(",", ":"))
        return sha256(_DOMAIN, text.encode()).hex()

    def layout(self, config: Config) -> Layout:
        """The grid of a run that trains this model."""
        sync = config.sync
        has_momentum = sync.outer != "none"
        layout = Layout(self.tensors, sync.tile_values, sync.codec, sync.expert_codec, has_momentum)
        return layout.dense_until(sync.dense_rounds)

    def build(self, device: torch.device | str = "cpu") -> OwnModel:
        """The model to train, with the factory's values. Raises ConfigError where the factory gives another one."""
        module = _made(self._factory)
        found = {name: tuple(parameter.shape) for name, parameter in _parameters(module, trained=True)}
        for tensor in self.tensors:
            if found.get(tensor.name) != tensor.shape:
                raise ConfigError(
                    f"the factory gave {tensor.name} the shape {found.get(tensor.name)} now, but {tensor.shape} before",
                    fix="let the factory give the same model each time",
                )
        if len(found) != len(self.tensors) or self._digest_of(module) != self.digest:
            raise ConfigError(
                "the factory gave other parameters, or other values of frozen ones, than before",
                fix="let it give the same model each time; only trained parameters may start from random values",
            )
        names = [[t.name for t in self.tensors if t.column == column] for column in (None, *range(self.num_columns))]
        return OwnModel(module.to(device), self._loss, names)

    def load(self, state: BlockSource) -> nn.Module:
        """The module with the values of a state of such a run."""
        model = self.build()
        for block in range(1 + self.num_columns):
            model.load_block(block, state.block(block))
        return model.module.eval()

    def config_of(self, config: Config, initial_state: Hash) -> Config:
        """The same run with this model. Raises ConfigError for settings that need our own."""
        check_own_settings(config)
        tree, experts = config.model_dump(), max(1, self.num_columns)
        tree["model"] |= {"own_layout": self.digest, "num_experts": experts, "top_k": min(config.model.top_k, experts)}
        tree["swarm"]["experts_per_peer"] = min(config.swarm.experts_per_peer, experts)
        tree["run"]["initial_state"] = initial_state.hex()
        return config_from_tree(tree)


class OwnStart:
    """The values that a run with a model of one's own starts from: what the factory gives with the run's seed."""

    def __init__(self, model: Model, config: Config) -> None:
        self._model = model
        self._seed = config.run.seed
        self.layout = model.layout(config)

    @cached_property
    def _blocks(self) -> tuple[Values, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            built = self._model.build()
        return tuple(built.read_block(block.index) for block in self.layout.model_blocks)

    def __call__(self, tile: Tile) -> Values:
        """The values of one tile, flat fp32."""
        if tile.id >= self.layout.num_model_tiles:  # an outer optimizer begins at rest
            return np.zeros(tile.size, np.float32)
        return self._blocks[tile.block][tile.start : tile.stop]

    def root(self) -> Hash:
        """That of the state that these values are. Raises ConfigError where a value is not finite."""
        for block in self.layout.model_blocks:
            if not np.isfinite(self._blocks[block.index]).all():
                raise ConfigError("the factory gives values that are not finite", fix="initialise all parameters")
        return Layout.root_of(hash_tiles(bytes_of(np.ascontiguousarray(self(tile))) for tile in self.layout.tiles))


def run_layout(config: Config, model: Model | None) -> Layout:
    """The grid of a run. Raises ConfigError where `model` is not the one that the run trains."""
    wanted, run = config.model.own_layout, config.run.run_id
    if model is None:
        return state_layout(config)
    if not wanted:
        raise ConfigError(f"run {run} trains the model of its config", fix="join it without a model of your own")
    if model.digest != wanted:
        raise ConfigError(
            f"run {run} trains another model ({wanted[:16]}) than yours: {model}",
            fix="use the organiser's code: the same names, shapes, columns, frozen values and version",
        )
    return model.layout(config)


def check_own_settings(config: Config) -> None:
    """Raises ConfigError for settings that only our own model can follow."""
    if config.sync.enabled and config.sync.merge_alpha > 0:
        raise ConfigError(
            f"sync.merge_alpha is {config.sync.merge_alpha}, but a merge compares experts of our own model",
            fix="set sync.merge_alpha=0",
        )


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the factory gave an object of type {type(module).__name__}", fix="let it return a torch.nn.Module"
        )
    return module


def _parameters(module: nn.Module, trained: bool) -> list[tuple[str, nn.Parameter]]:
    return [(name, it) for name, it in module.named_parameters() if it.requires_grad is trained]


def _frozen(parameter: nn.Parameter) -> tuple[list[int], str]:
    values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return list(parameter.shape), sha256(values.numpy().tobytes()).hex()


def _tensors(module: nn.Module, columns: Columns) -> tuple[StateTensor, ...]:
    """Shared parameters in the order of the module, then those of each column."""
    parameters = dict(_parameters(module, trained=True))
    if not parameters:
        raise ConfigError("the model has no parameter to train", fix="let some parameter require a gradient")
    if isinstance(columns, Mapping):
        unknown = sorted(columns.keys() - dict(module.named_parameters()).keys())
        if unknown:
            raise ConfigError(f"columns names {unknown[0]}, which the model does not have", fix="remove it")
    found = [_tensor(name, parameter, columns) for name, parameter in parameters.items()]
    numbers = {tensor.column for tensor in found if tensor.column is not None}
    missing = next((at for at in range(len(numbers)) if at not in numbers), None)
    if missing is not None:
        raise ConfigError(
            f"no parameter belongs to column {missing}, but one belongs to column {max(numbers)}",
            fix="number the columns from 0 on without gaps",
        )
    return tuple(sorted(found, key=lambda tensor: -1 if tensor.column is None else tensor.column))


def _tensor(name: str, parameter: nn.Parameter, columns: Columns) -> StateTensor:
    if parameter.dtype != torch.float32:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}, but trained parameters must be torch.float32",
            fix="make the model in fp32; on a GPU it computes in bf16 by autocast",
        )
    return StateTensor(name, tuple(parameter.shape), _column(name, columns), "zeros")


def _column(name: str, columns: Columns) -> int | None:
    try:
        column: Any = columns[name] if isinstance(columns, Mapping) else columns(name)
    except KeyError as error:
        raise ConfigError(
            f"parameter {name} is not mapped", fix="map it to its column, or to None if it is shared"
        ) from error
    if column is not None and (type(column) is not int or column < 0):
        raise ConfigError(
            f"parameter {name} is mapped to {column!r}", fix="map it to a column number, or to None if it is shared"
        )
    return column if column is None else int(column)
