"""The published runs, by name."""

from __future__ import annotations

from functools import cache

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config

PUBLISHED = ("spes-1b", "spes-2b", "spes-7b", "spes-9b")
EVERY = ("tiny", "small", *PUBLISHED)


@cache
def run_named(name: str, *overrides: str) -> Config:
    return load_config(bundled_config(name), overrides)
