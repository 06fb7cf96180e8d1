"""What a shell proposes for values of options, where typer cannot know it. Where nothing matches, shells propose files.

Imports only when it is asked: a Tab costs as little as `--help`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Proposes these."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def bundled(incomplete: str) -> list[str]:
    """Names of the configs that come with spes-p2p."""
    from spes_p2p.config.load import bundled_names

    return one_of(*bundled_names())(incomplete)


def config(incomplete: str) -> list[str]:
    """The same, and YAML files of this folder; in other folders all files."""
    if "/" in incomplete:
        return []
    files = sorted(path.name for path in Path().glob("*.y*ml"))
    return bundled(incomplete) + one_of(*files)(incomplete)


def gpu(incomplete: str) -> list[str]:
    """GPUs by name."""
    from spes_p2p.planning.gpus import GPUS

    return one_of(*GPUS)(incomplete)
