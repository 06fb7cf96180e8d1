"""The `spes-p2p` program: registers the commands and turns known errors into two lines.

What a command does stands in its own module; those import nothing heavy at their top, so that `spes-p2p --help` answers
at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from spes_p2p import __version__
from spes_p2p.cli.arguments import option
from spes_p2p.cli.help import PlainCommand, PlainGroup
from spes_p2p.errors import PermanentError, SpesError, Stopped

COMMANDS: Mapping[str, str] = {
    "quickstart": "spes_p2p.cli.quickstart:quickstart",
    "join": "spes_p2p.cli.join:join",
    "doctor": "spes_p2p.cli.doctor:doctor",
    "bootstrap": "spes_p2p.cli.bootstrap:bootstrap",
    "invite": "spes_p2p.cli.invite:invite",
    "plan": "spes_p2p.cli.plan:plan",
    "status": "spes_p2p.cli.status:status",
    "dashboard": "spes_p2p.cli.dashboard:dashboard",
    "tokenize": "spes_p2p.cli.tokenize:tokenize",
    "export": "spes_p2p.cli.export:export",
    "eval": "spes_p2p.cli.evaluate:evaluate",
    "import": "spes_p2p.cli.import_model:import_model",
    "upcycle": "spes_p2p.cli.upcycle:upcycle",
}
"""Command to the function behind it, in the order of the help."""

PANELS: Mapping[str, tuple[str, ...]] = {
    "Join a run": ("quickstart", "join", "doctor"),
    "Organise a run": ("bootstrap", "invite", "plan", "tokenize", "run"),
    "Watch a run": ("status", "dashboard"),
    "Models": ("export", "eval", "import", "upcycle"),
}
"""The panels of the help, by who needs the commands."""

GROUPS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "run": (
        "For organisers: prepares a run (init), shows its history, says who may vote (vouch) and who may not take part "
        "(ban), lets the learning rate fall (decay), or ends a run.\n\n"
        "Example: spes-p2p run inspect spes1...",
        {
            "init": "spes_p2p.cli.run:init",
            "inspect": "spes_p2p.cli.run:inspect",
            "decay": "spes_p2p.cli.orders:decay",
            "vouch": "spes_p2p.cli.orders:vouch",
            "ban": "spes_p2p.cli.orders:ban",
            "stop": "spes_p2p.cli.orders:stop",
        },
    ),
}
"""Commands with commands of their own: (help, command to function)."""

EXIT_PERMANENT = 3
"""Exit code after an error that a restart cannot fix; a service manager should not try again."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT)."""


def main() -> None:
    """Entry point of the console script."""
    _show_warnings()
    try:
        build(COMMANDS)(prog_name="spes-p2p")
    except SystemExit as ending:
        if sys.argv[1:2] == ["join"] and isinstance(ending.code, int):
            _end_at_once(ending.code)
        raise
    except KeyboardInterrupt:  # while the commands are loaded
        sys.exit(INTERRUPTED)


def build(commands: Mapping[str, str], groups: Mapping[str, tuple[str, Mapping[str, str]]] = GROUPS) -> typer.Typer:
    """The program with these commands (name to "module:function")."""
    # Typer's own pretty tracebacks hide what a bug report needs.
    app = typer.Typer(cls=PlainGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_program)
    _add(app, commands)
    for name, (words, inner) in groups.items():
        group = typer.Typer(cls=PlainGroup, no_args_is_help=True, help=words, rich_markup_mode=None)
        _add(group, inner)
        app.add_typer(group, name=name, rich_help_panel=_panel_of(name))
    return app


def _panel_of(name: str) -> str | None:
    return next((panel for panel, names in PANELS.items() if name in names), None)


def _add(app: typer.Typer, commands: Mapping[str, str]) -> None:
    for name, target in commands.items():
        module, _, function = target.partition(":")
        command = getattr(importlib.import_module(module), function)
        app.command(name, cls=PlainCommand, rich_help_panel=_panel_of(name))(_with_known_errors(command))


def _end_at_once(code: int) -> None:
    """Without taking PyTorch apart first, which takes seconds on a busy machine; a person waits for the prompt."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _show_warnings() -> None:
    """Prints the package's log records, which no event carries, as text; leaves other packages' logging alone."""
    logging.addLevelName(logging.WARNING, "warning")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger("spes_p2p").addHandler(handler)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"spes-p2p {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Pretrain a Mixture-of-Experts language model together, on machines without a fast network.

    Example: spes-p2p quickstart (a whole swarm on this machine); spes-p2p join spes1... (somebody's run)
    """


def _with_known_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A known error is two lines and exit code 1 or 3, Ctrl-C is 130; any other is a bug and keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SpesError as error:
            typer.echo(error_lines(error), err=True)
            raise typer.Exit(EXIT_PERMANENT if isinstance(error, PermanentError) else 1) from error
        except (KeyboardInterrupt, Stopped) as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt

    return run


def error_lines(error: SpesError) -> str:
    """What was wrong, with its code, and on a line of its own what mends it."""
    from spes_p2p.cli.error_codes import code_of
    from spes_p2p.observe.text import to_type

    code = code_of(str(error)) if error.fix else None
    lines = [f"Error {code}: {error}" if code else f"Error: {error}"]
    lines += [f"Fix: {to_type(error.fix)}"] if error.fix else []
    return "\n".join(" ".join(line.split()) for line in lines)


if __name__ == "__main__":
    main()
