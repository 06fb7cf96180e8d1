"""A table of several peers side by side, for the quickstart. One peer has a screen of its own: `live`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spes_p2p.observe.metrics import bytes_text, count_text, seconds_text
from spes_p2p.observe.view import PeerView

_COLUMNS = ("step", "loss", "held-out", "tokens/s", "round", "peers", "sent", "received", "deadline", "next sync")


def row(view: PeerView) -> list[str]:
    """The cells of one peer, in the order of the table's columns."""
    speed, wait = view.tokens_per_second.value, view.seconds_to_sync()
    return [
        str(view.step),
        _number(view.smooth_loss.value),
        _number(view.eval_loss),
        "-" if speed is None else count_text(speed),
        f"{view.round}" + (" (renewal)" if view.commit == "renewal" else ""),
        "-" if view.roster_size is None else str(view.roster_size),
        bytes_text(view.bytes_sent),
        bytes_text(view.bytes_received),
        "-" if view.deadline_seconds is None else seconds_text(view.deadline_seconds),
        "-" if wait is None else "now" if wait == 0 else f"in {seconds_text(wait)}",
    ]


def render(views: Mapping[str, PeerView]) -> RenderableType:
    """A table with one row per peer of `views` (by name), and their newest messages below it."""
    table = Table("peer", *_COLUMNS, box=None, pad_edge=False)
    for name, view in views.items():
        table.add_row(name, *row(view))
    messages = [f"{name}: {message}" for name, view in views.items() for message in view.messages]
    return Group(table, *(Text(message, style="dim") for message in messages))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
