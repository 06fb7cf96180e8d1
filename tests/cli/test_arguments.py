"""Options that take several values after one flag."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from spes_p2p.cli.arguments import spread
from spes_p2p.cli.main import build

LISTS = ("--peers", "--hosts")
SAMPLE = build({"listing": "tests.cli.sample_commands:listing"})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--peers /a /b /c", "--peers /a --peers /b --peers /c"),
        ("--peers /a --peers /b", "--peers /a --peers /b"),
        ("--peers /a /b --hosts /c /d --flag", "--peers /a --peers /b --hosts /c --hosts /d --flag"),
        ("--peers=/a /b", "--peers=/a --peers /b"),
        ("--peers /a /b output.wandb=true", "--peers /a --peers /b output.wandb=true"),
        ("--peers /a x.y=1 z", "--peers /a x.y=1 z"),
        ("--peers /a -o out more", "--peers /a -o out more"),
        ("--peers /a -- /b", "--peers /a -- /b"),
        ("--peers", "--peers"),
        ("--peers --hosts /c", "--peers --hosts /c"),
        ("one two --flag x", "one two --flag x"),
    ],
)
def test_values_up_to_the_next_option_belong_to_the_list(given: str, meant: str) -> None:
    assert spread(given.split(), LISTS) == meant.split()


def test_a_command_takes_its_lists_and_its_overrides() -> None:
    result = CliRunner().invoke(SAMPLE, ["listing", "--peers", "/a", "/b", "x.y=1", "--name", "n", "z.w=2"])
    assert (result.exit_code, result.stdout) == (0, "peers /a /b, overrides x.y=1 z.w=2, name n\n"), result.output


def test_a_list_without_a_value_is_a_usage_error() -> None:
    assert CliRunner().invoke(SAMPLE, ["listing", "--peers"]).exit_code == 2
