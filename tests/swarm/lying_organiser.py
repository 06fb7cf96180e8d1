"""The program as a lying organiser runs it: `spes-p2p`, but its run's published config also has the YAML of LIE."""

from __future__ import annotations

import os
import runpy
from typing import Any

import yaml

from spes_p2p.config.load import config_from_text, published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.quickstart.processes import PROGRAM
from spes_p2p.sync import genesis

LIE = "SPES_P2P_TEST_PUBLISHED"


def with_more(text: str, more: str) -> str:
    """A published config with further fields, whatever they are."""
    tree: dict[str, dict[str, Any]] = yaml.safe_load(text)
    for section, fields in yaml.safe_load(more).items():
        tree[section] = {**tree.get(section, {}), **fields}
    return yaml.safe_dump(tree, sort_keys=False)


def lie(more: str) -> None:
    """From now on this process publishes it, and believes itself."""
    liar: Any = genesis

    def published(config: Config) -> str:
        return with_more(published_yaml(config), more)

    def believed(text: str, origin: str) -> Config:
        return config_from_text(text, origin=origin)

    liar.published_yaml, liar.published_config = published, believed


if __name__ == "__main__":
    lie(os.environ[LIE])
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
