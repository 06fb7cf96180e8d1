"""The config tree of a run: its sections together, and what must hold between them.

The sections and their fields are explained in `sections`; reading YAML and overrides is `load`'s job.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator
from pydantic.fields import FieldInfo

from spes_p2p.config.fields import Section, agreed, local
from spes_p2p.config.sections import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    SchedulerConfig,
    SwarmConfig,
    SyncConfig,
)
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


class Config(Section):
    """One run, whole. `config.model.num_experts` in code is `model.num_experts` on the command line."""

    run: RunConfig = agreed("Which run this is.", RunConfig())
    model: ModelConfig = agreed("The model.")
    data: DataConfig = agreed("The tokens.")
    optimizer: OptimizerConfig = agreed("One inner step.")
    scheduler: SchedulerConfig = agreed("The learning rate over the run.")
    sync: SyncConfig = agreed("The exchange that ends each round.")
    swarm: SwarmConfig = agreed("Who takes part.")
    eval: EvalConfig = local("The held-out loss.", EvalConfig())
    output: OutputConfig = local("What a peer writes down.", OutputConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        experts, claimed = self.model.num_experts, self.swarm.experts_per_peer
        if claimed > experts:
            raise ConfigError(
                f"swarm.experts_per_peer is {claimed}, more than model.num_experts ({experts})",
                fix=f"set it to at most {experts} (all: every peer trains the whole model)",
            )
        return self


def steps_per_round_at(config: Config, step: int) -> int:
    """Steps until the next sync, for a round that starts at global step `step`: H, or a fragment's share of it."""
    schedule = config.sync.steps_per_round
    if isinstance(schedule, int):
        return schedule // config.sync.fragments
    steps = next(steps for until, steps in schedule if step < until or until == 0)
    return steps // config.sync.fragments


def fields_of_tree() -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every leaf, in the order of the schema."""
    for name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type)
        assert issubclass(section.annotation, Section)
        for leaf, field in section.annotation.model_fields.items():
            yield f"{name}.{leaf}", field
