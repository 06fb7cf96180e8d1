"""The config tree of a run: its sections together, and what must hold between them.

The sections and their fields are explained in `sections`; reading YAML and overrides is `load`'s job.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pydantic import model_validator
from pydantic.fields import FieldInfo

from spes_p2p.config.sections import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    SchedulerConfig,
    Section,
    SwarmConfig,
    agreed,
    local,
)
from spes_p2p.config.sync import SyncConfig
from spes_p2p.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "RunConfig",
    "SchedulerConfig",
    "SwarmConfig",
    "SyncConfig",
    "fields_of_tree",
    "steps_per_round_at",
]
MOST_WEIGHT = 1000
"""What the weights of a mixture add up to, at most."""
MOST_VALUES = 2**40
"""Of a model: a trillion parameters."""
MOST_TILES = 2**16
"""Every peer lists them before it looks at its memory, and a round's result names each (`sync.node.check_sizes`)."""
MOST_MATRICES = 2**17
"""Of experts: the largest published models have half of that."""
MOST_SEQUENCES = 2**62
"""A stage of a mixture ends before; positions are 64-bit integers."""


class Config(Section):
    """The whole config of a run. `config.model.num_experts` in code is `model.num_experts` on the command line."""

    run: RunConfig = agreed("Which run this is.", RunConfig())
    model: ModelConfig = agreed("The model.")
    data: DataConfig = agreed("The tokens.")
    optimizer: OptimizerConfig = agreed("Settings of one inner step.")
    scheduler: SchedulerConfig = agreed("The learning rate over the run.")
    sync: SyncConfig = agreed("The exchange that ends each round.")
    swarm: SwarmConfig = agreed("Who takes part.")
    eval: EvalConfig = local("The held-out loss.", EvalConfig())
    output: OutputConfig = local("What a peer writes to disk.", OutputConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        experts, claimed = self.model.num_experts, self.swarm.experts_per_peer
        if claimed > experts:
            raise ConfigError(
                f"swarm.experts_per_peer is {claimed}, more than model.num_experts ({experts})",
                fix=f"set it to at most {experts} (then every peer trains the whole model)",
            )
        self._check_size()
        self._check_documents()
        if self.data.mix:
            self._check_mix()
        return self

    def _check_size(self) -> None:
        """By arithmetic, before anything is made of it: a slip of the pen, or a stranger, must not get further."""
        model, tile = self.model, self.sync.tile_values
        matrices = model.num_layers * 3 * model.num_experts
        attention = 2 * model.num_layers * (model.num_heads + model.num_kv_heads) * model.head_dim
        values = model.d_model * (2 * model.embedding_rows + attention + matrices * model.expert_ffn)
        sizes = "num_layers", "num_experts", "d_model", "head_dim", "expert_ffn", "embedding_rows"
        shown = f"a model with {', '.join(f'{name}={getattr(model, name)}' for name in sizes)}"
        for count, most, what, fix in (
            (matrices, MOST_MATRICES, "expert matrices", "see which of these numbers is too large"),
            (values, MOST_VALUES, "parameters", "see which of these numbers is too large"),
            (-(-values // tile), MOST_TILES, f"tiles of {tile:,} values", "raise sync.tile_values"),
        ):
            if count > most:
                raise ConfigError(f"{shown} has {count:,} {what}, over {most:,}", fix=fix)

    def _check_mix(self) -> None:
        data, weights = self.data, len(self.data.mix[0]) - 1 if self.data.mix else 0
        ends = [stage[0] for stage in data.mix if stage]
        rising = all(0 < before < after for before, after in pairwise((*ends[:-1], MOST_SEQUENCES)))
        if weights < 1 or any(len(stage) != weights + 1 for stage in data.mix) or not rising or ends[-1] != 0:
            raise ConfigError(
                f"data.mix is {[list(stage) for stage in data.mix]}, which is no list of stages",
                fix="write [[until sequence, weight, weight, ...], ..., [0, weight, weight, ...]], in rising order, "
                "with a weight for each dataset",
            )
        if any(not 1 <= sum(stage[1:]) <= MOST_WEIGHT for stage in data.mix):
            raise ConfigError(
                f"data.mix has a stage whose weights add up to nothing, or to more than {MOST_WEIGHT}",
                fix="use whole numbers such as 80 and 20",
            )
        if data.datasets and len(data.datasets) != weights:
            raise ConfigError(
                f"data.mix has {weights} weights, but there are {len(data.datasets)} datasets",
                fix="give each dataset a weight",
            )
        if data.source == "local":
            raise ConfigError(
                "data.source is local, but the run mixes datasets, which it leases", fix="leave data.source out"
            )

    def _check_documents(self) -> None:
        end = self.model.document_end
        if end is not None and end >= self.model.vocab_size:
            raise ConfigError(
                f"model.document_end is {end}, but model.vocab_size is {self.model.vocab_size}: no token has this id",
                fix="set it to eos_id of the dataset's manifest.json, or to null",
            )


def steps_per_round_at(config: Config, step: int) -> int:
    """H of a round that starts at global step `step`."""
    schedule = config.sync.steps_per_round
    if isinstance(schedule, int):
        return schedule
    return next(steps for until, steps in schedule if step < until or until == 0)


def fields_of_tree() -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every leaf, in the order of the schema."""
    for name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type)
        assert issubclass(section.annotation, Section)
        for leaf, field in section.annotation.model_fields.items():
            yield f"{name}.{leaf}", field
