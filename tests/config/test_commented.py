"""A config that `run init` writes is the same config, and each of its fields is explained."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from spes_p2p.config.load import bundled_config, config_from_text, load_config
from spes_p2p.peer.run_file import WIDTH, chosen_keys, commented_yaml

BUNDLED = ("tiny", "small", "spes-1b", "spes-7b", "spes-9b")


@pytest.mark.parametrize("name", BUNDLED)
def test_nothing_is_lost(name: str) -> None:
    path = bundled_config(name)
    config = load_config(path)
    text = commented_yaml(config, chosen_keys(path), "A heading.")
    assert config_from_text(text) == config
    assert set(chosen_keys(path)) <= {f"{part}.{field}" for part, field in fields(text)}


def fields(text: str) -> list[tuple[str, str]]:
    found, section = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w+):", line):
            section = match[1]
        elif match := re.match(r"  (\w+): ", line):
            found.append((section, match[1]))
    return found


def test_every_field_has_its_words_above_it() -> None:
    config = load_config(bundled_config("small"), ["sync.codec=int8", "run.run_id='2024'", "output.tensorboard=true"])
    lines = commented_yaml(config, (), "A heading.").splitlines()
    assert lines[0] == "# A heading."
    assert "  codec: int8" in lines
    assert "  run_id: '2024'" in lines
    assert max(map(len, lines)) <= WIDTH
    for before, line in pairwise(lines):
        assert not re.match(r"  \w", line) or before.startswith("  # "), line
