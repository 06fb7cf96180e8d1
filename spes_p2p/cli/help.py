"""The help of the program and its commands: plain text, in sections that go by typer's panels.

Typer's own help draws these as boxes, for which it loads rich: more CPU time than all the rest of `spes-p2p --help`.
"""

from __future__ import annotations

import re
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

OPTIONS, ARGUMENTS = "Options", "Arguments"
KINDS = {"list[str]": "TEXT", "str": "TEXT", "path": "PATH", "int": "N", "float": "N", "bool": ""}
"""What stands for a value whose option names none, by its type."""


class PlainCommand(TyperCommand):
    """A command whose options stand in sections."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Says of a wrong value what is wrong, without the word for it that typer takes over from pydantic."""
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class PlainGroup(TyperGroup):
    """A group whose commands stand in sections, each with the first paragraph of its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            first = (command.help or "").split("\n\n")[0]
            panel = getattr(command, "rich_help_panel", None)
            sections.setdefault(panel or "Commands", []).append((name, " ".join(first.split())))
        width = max(len(name) for name in self.commands)
        for panel, rows in sections.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:<{width}}", first) for name, first in rows])
        _write_parameters(self, ctx, formatter)


def _write_parameters(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """What everybody needs first; a section for each panel."""
    sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            usual = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            panel = getattr(parameter, "rich_help_panel", None) or usual
            sections.setdefault(panel, []).append((_named(record[0]), record[1]))
    for panel, rows in sections.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows)


def _named(words: str) -> str:
    """`--port <int range>` to `--port N`; what has a name of its own keeps only that."""
    words = re.sub(r"(\]|\.\.\.|[A-Z]) <[^>]*>$", r"\1", words)
    return re.sub(r"<([\w\[\]]+)(?: range)?>", lambda found: KINDS.get(found[1], found[0]), words)
