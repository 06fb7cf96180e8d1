"""Plots of a comparison: held-out loss against tokens, bytes and memory. Needs the pip extra plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spes_p2p.testing.comparison.outcomes import Outcome
from spes_p2p.testing.comparison.page import by_arm

LABELS = {
    "tokens": "tokens",
    "bytes_sent": "sent per peer (bytes)",
    "memory": "memory per peer for weights, gradients and moments (bytes)",
}

COLOURS = 10
"""That are told apart; with more arms other markers begin."""


def plot(
    found: Sequence[Outcome], arms: Sequence[str], title: str, folder: Path, stem: str, kinds: Sequence[str]
) -> list[str]:
    """Writes three plots in each of `kinds` (svg, png); gives the names of those of the first kind.

    Shaded, or a bar: from the lowest to the highest of the seeds. Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    names = []
    for field, label in LABELS.items():
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axes = figure.subplots()
        for number, (arm, own) in enumerate(by_arm(found, arms).items()):
            look = {"label": arm, "color": f"C{number % COLOURS}", "marker": "os^"[number // COLOURS % 3]}
            if field == "memory":
                _dot(axes, own, look)
            else:
                _curve(axes, own, field, look)
        axes.set(
            title=title, xlabel=label, ylabel="held-out loss (nats a token)",
            xscale="linear" if field == "tokens" else "log",
        )  # fmt: skip
        axes.title.set_fontsize("medium")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        names.append(f"{stem}-{field.replace('_', '-')}")
        for kind in kinds:
            figure.savefig(folder / f"{names[-1]}.{kind}", metadata={"Date": None} if kind == "svg" else None)
    return [f"{name}.{kinds[0]}" for name in names]


def _dot(axes: Any, own: Sequence[Outcome], look: dict[str, str]) -> None:
    losses = [one.loss for one in own]
    mean = statistics.mean(losses)
    spread = [[mean - min(losses)], [max(losses) - mean]] if len(own) > 1 else None
    axes.errorbar([own[0].trained_bytes], [mean], yerr=spread, linestyle="none", capsize=3, **look)


def _curve(axes: Any, own: Sequence[Outcome], field: str, look: dict[str, str]) -> None:
    """By bytes it begins after the first sync: before, nothing was sent, and nothing learnt together."""
    points = list(zip(*(one.points for one in own)))  # the seeds' points side by side: they have the same steps
    if field == "bytes_sent":
        points = points[1:]
        places = [statistics.mean(point.bytes_sent for point in some) / own[0].peers for some in points]
    else:
        places = [float(some[0].tokens) for some in points]
    losses = [[point.held_out_loss for point in some] for some in points]
    axes.plot(places, [statistics.mean(some) for some in losses], markersize=3, **look)
    if len(own) > 1:
        axes.fill_between(places, list(map(min, losses)), list(map(max, losses)), color=look["color"], alpha=0.2)
