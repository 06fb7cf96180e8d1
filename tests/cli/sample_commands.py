"""Commands that end in every way a command can end, for the tests of the program around them."""

from __future__ import annotations

from typing import Annotated

import typer

from spes_p2p.errors import ConfigError, PermanentError


def greet(name: str, times: Annotated[int, typer.Option(help="How often.")] = 1) -> None:
    """Greets somebody."""
    typer.echo(f"hello {name}\n" * times, nl=False)


def known() -> None:
    """Fails with a known error."""
    raise ConfigError("x is\n3", fix="make it 2")


def lasting() -> None:
    """Fails with an error that it would meet again."""
    raise PermanentError("run x is over", fix="join another")


def bug() -> None:
    """Fails with an unknown error."""
    raise RuntimeError("a bug")


def interrupted() -> None:
    """Is stopped by Ctrl-C."""
    raise KeyboardInterrupt
