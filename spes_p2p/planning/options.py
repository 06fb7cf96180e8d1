"""The settings that trade memory for speed, apart from the rest of a config, and how to put them back into one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.config.sections import is_local

KEYS = {
    "micro_batch_sequences": "optimizer.micro_batch_sequences",
    "gradient_dtype": "optimizer.gradient_dtype",
    "optimizer": "optimizer.name",
    "sharding": "optimizer.sharding",
    "activation_checkpointing": "model.activation_checkpointing",
    "foreign_dtype": "model.foreign_dtype",
    "foreign_offload": "model.foreign_offload",
}
"""Our name to the config's."""
EIGHT_BIT_INSTALL = "scripts/venv.sh optim8bit"
"""What a clone lacks for `optimizer.name=adamw8bit` until somebody asks for it."""


@dataclass(frozen=True)
class Options:
    """Values as in the config."""

    micro_batch_sequences: int = 1
    gradient_dtype: str = "fp32"
    optimizer: str = "adamw"
    sharding: str = "none"
    activation_checkpointing: str = "none"
    foreign_dtype: str = "compute"
    foreign_offload: bool = False

    @classmethod
    def of(cls, config: Config) -> Options:
        """Those of a config."""
        return cls(**{name: attrgetter(key)(config) for name, key in KEYS.items()})

    def applied(self, config: Config) -> Config:
        """`config` with these options, unchecked: take only values that the schema allows."""
        for name, key in KEYS.items():
            section, leaf = key.split(".")
            part = getattr(config, section).model_copy(update={leaf: getattr(self, name)})
            config = config.model_copy(update={section: part})
        return config

    def changes(self, since: Options) -> tuple[str, ...]:
        """What differs, as overrides: `model.activation_checkpointing=full`."""
        names = [name for name in KEYS if getattr(self, name) != getattr(since, name)]
        return tuple(f"{KEYS[name]}={_yaml(getattr(self, name))}" for name in names)


def is_agreed(key: str) -> bool:
    """Whether all peers of a run must have the setting `key` equal."""
    return not is_local(dict(fields_of_tree())[key])


def halved(options: Options, batch_sequences: int) -> Options:
    """With the largest micro-batch that divides the batch and is at most half as large (the same, where it is 1)."""
    size = options.micro_batch_sequences
    smaller = [part for part in range(1, size // 2 + 1) if batch_sequences % part == 0]
    return replace(options, micro_batch_sequences=smaller[-1]) if smaller else options


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
