"""A config as a file for people to edit: the chosen fields, each below its explanation from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.config.load import config_from_text
from spes_p2p.config.schema import Config, fields_of_tree

WIDTH = 118


def chosen_keys(path: Path) -> tuple[str, ...]:
    """Dotted keys that a config file sets."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(f"{section}.{name}" for section, fields in tree.items() for name in fields or {})


def commented_yaml(config: Config, keys: Collection[str], heading: str) -> str:
    """YAML with these fields of `config`, and those that differ from their defaults; the same config when it is read.

    `heading`: a sentence for the top.
    """
    lines, section = _comment(heading, ""), ""
    values = config.model_dump(mode="json")
    for key, field in fields_of_tree():
        part, name = key.split(".")
        value = values[part][name]
        if key not in keys and not field.is_required() and value == _plain(field.default):
            continue
        if part != section:
            section = part
            lines += ["", f"{part}:"]
        lines += _comment(field.description or "", "  ")
        lines.append(f"  {name}: {_inline(value)}")
    text = "\n".join(lines) + "\n"
    assert config_from_text(text) == config
    return text


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _plain(value: Any) -> Any:
    """Tuples as they are dumped."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
