"""The settings that trade memory for speed, apart from the rest of a config, and how to put them back into one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from spes_p2p.config.schema import Config

KEYS = {
    "micro_batch_sequences": "optimizer.micro_batch_sequences",
    "optimizer": "optimizer.name",
    "activation_checkpointing": "model.activation_checkpointing",
    "foreign_dtype": "model.foreign_dtype",
}
"""Our name to the config's."""
FOR_ALL = "optimizer"
"""The one of these that all peers of a run should have alike: the organiser chooses it, no peer by itself."""


@dataclass(frozen=True)
class Options:
    """Values as in the config."""

    micro_batch_sequences: int = 1
    optimizer: str = "adamw"
    activation_checkpointing: str = "none"
    foreign_dtype: str = "compute"

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
        return tuple(f"{KEYS[name]}={getattr(self, name)}" for name in names)


def halved(options: Options, batch_sequences: int) -> Options:
    """With the largest micro-batch that divides the batch and is at most half as large (the same, where it is 1)."""
    size = options.micro_batch_sequences
    smaller = [part for part in range(1, size // 2 + 1) if batch_sequences % part == 0]
    return replace(options, micro_batch_sequences=smaller[-1]) if smaller else options
