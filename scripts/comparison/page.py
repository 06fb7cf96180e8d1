"""The page of a comparison: Markdown with tables, what they mean, and the command that makes it again; its plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.comparison.arms import Setting, in_short, steps_of
from scripts.comparison.outcomes import Outcome, commit, dataset_hash
from spes_p2p.config.schema import Config
from spes_p2p.observe.metrics import bytes_text, count_text
from spes_p2p.planning.sizes import Sizes

NOTES = "## What it says"
"""From here on the page is not ours."""
SHORT = ("<!-- In short, by hand: kept as it is. -->", "<!-- The end of what is by hand. -->")
"""What stands between these is not ours either: what the tables below say, for people in a hurry."""
BUDGETS = (0.5, 1, 2, 4)
"""Of what a peer of the reference sends in all: where arms are compared at equal bytes."""

_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of Student's t at 97.5%, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Comparison:
    """What was asked for: `against` is the reference, `data` where the tokens are, `corpus` what they are."""

    setting: Setting
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    against: str
    data: Path
    corpus: str
    device: str


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of a mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    quantile = _T_QUANTILES[min(len(values) - 2, len(_T_QUANTILES) - 1)]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and half interval; the mean alone for one value."""
    half = half_interval(values)
    return f"{statistics.mean(values):{sign}.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")


def by_arm(found: Sequence[Outcome], arms: Sequence[str]) -> dict[str, list[Outcome]]:
    """In the order of `arms`; those of which nothing was found are left out."""
    every = {arm: [outcome for outcome in found if outcome.arm == arm] for arm in dict.fromkeys(arms)}
    return {arm: own for arm, own in every.items() if own}


def table(found: Sequence[Outcome], arms: Sequence[str], against: str) -> list[str]:
    """Markdown: means over the seeds with 95% intervals, and the difference to `against` over the same seeds."""
    reference = {one.seed: one for one in found if one.arm == against}
    rows = [
        f"| arm | peers | held-out loss | seeds | against {against} | pairs | tokens | rounds | sent per peer "
        "| memory per peer for weights, gradients and moments |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, own in by_arm(found, arms).items():
        pairs = [one.loss - reference[one.seed].loss for one in own if one.seed in reference and arm != against]
        one, loss = own[0], with_interval([each.loss for each in own])
        rows.append(
            f"| {arm} | {one.peers} | **{loss}** | {len(own)} | {with_interval(pairs, '+') if pairs else ''} "
            f"| {len(pairs) or ''} | {count_text(one.tokens)} | {one.rounds} "
            f"| {bytes_text(one.bytes_sent // one.peers)} | {bytes_text(one.trained_bytes)} |"
        )
    return rows


def loss_at(outcome: Outcome, bytes_per_peer: float) -> tuple[float, bool]:
    """Held-out loss when a peer had sent so much, between two points linearly; whether it ended with less.

    NaN before the first point after a sync: nothing was learnt together until then.
    """
    sent, losses = zip(*((point.bytes_sent / outcome.peers, point.held_out_loss) for point in outcome.points[1:]))
    if bytes_per_peer < sent[0]:
        return math.nan, False
    return float(np.interp(bytes_per_peer, sent, losses)), sent[-1] < bytes_per_peer


def bytes_table(found: Sequence[Outcome], arms: Sequence[str], against: str) -> list[str]:
    """Markdown: the same losses by bytes sent instead of tokens; nothing where the reference has not ended yet."""
    sums = [one.bytes_sent / one.peers for one in found if one.arm == against]
    if not sums:
        return []
    budgets = [part * min(sums) for part in BUDGETS]
    rows = [
        "| arm | " + " | ".join(bytes_text(int(budget)) for budget in budgets) + " |",
        "| --- |" + " --- |" * len(budgets),
    ]
    for arm, own in by_arm(found, arms).items():
        cells = []
        for budget in budgets:
            losses, ended = zip(*(loss_at(one, budget) for one in own))
            text = "-" if any(map(math.isnan, losses)) else with_interval(losses)
            cells.append(f"({text})" if any(ended) else text)
        rows.append(f"| {arm} | {' | '.join(cells)} |")
    return rows


def page(comparison: Comparison, found: Sequence[Outcome], images: Sequence[str], command: str) -> str:
    """The whole result, with the command that gives it again."""
    arms, against, setting = comparison.arms, comparison.against, comparison.setting
    by_bytes = bytes_table(found, arms, against)
    lines = [
        "# Results",
        "",
        "<!-- Written by scripts/compare.py, which says what is compared; run it again rather than edit this. -->",
        "",
        what_was_run(comparison, found),
        "",
        "    " + command,
        "",
        *table(found, arms, against),
        "",
        *(MEANING if by_bytes else MEANING[:1]),
        "",
        *([*by_bytes, ""] if by_bytes else []),
        "What an arm changes of SPES with the merge switched off, one owner a column and one period of H steps:",
        "",
        *(f"- {arm}: {_changes(setting, arm)}" for arm in by_arm(found, arms)),
        "",
        *(f"![held-out loss]({image})" for image in images),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


MEANING = (
    "±: 95% confidence intervals (Student's t) over seeds; differences are taken seed by seed, over as many pairs "
    "as the column says. Sent per peer: what all peers have sent, divided by their number. That is every byte "
    "which they give to the in-memory network: values, status messages, plans and votes, and state that a peer "
    "fetches from others when it joins or has fallen behind; what the bootstrap node sends and what TCP and "
    "encryption add is not in it, and evaluation sends nothing. Memory: what a peer trains, as allocated; the "
    "copy of foreign experts, which only its forward pass needs, is not in it. Data: each peer goes through the "
    "whole dataset in a random order of its own, so all peers see the same kind of text, and two peers may meet "
    "the same sequence; nothing is leased.",
    "",
    "The loss when each peer has sent so much, interpolated between evaluations. An arm that sends more in all is in "
    "the middle of its run then: its learning rate has not fallen, so a run made for that many bytes would do better. "
    "In brackets: the last loss of an arm that has ended with fewer. A dash: before the first evaluation after a sync.",
)


def what_was_run(comparison: Comparison, found: Sequence[Outcome]) -> str:
    """Model, training, seeds, machine and code, in words."""
    setting, config = comparison.setting, comparison.setting.base
    counts = sorted({len(own) for own in by_arm(found, comparison.arms).values()})
    seeds = f"{counts[0]} to {counts[-1]} seeds an arm" if len(counts) > 1 else f"{counts[0]} seeds"
    tokens = setting.peers * config.optimizer.batch_sequences * config.data.sequence_length
    return (
        f"{in_a_line(setting)}; {setting.steps} steps of {tokens:,} tokens "
        f"({setting.peers} peers x {config.optimizer.batch_sequences} sequences x {config.data.sequence_length}), "
        f"{'1 seed' if counts == [1] else seeds}. {_optimizer(config)}. On {comparison.device}, trained on "
        f"{comparison.corpus} (dataset {dataset_hash(comparison.data, config)}), with the code of {commit()} and torch "
        f"{torch.__version__}. Loss: cross entropy in nats a token on {config.eval.sequences} held-out sequences, of "
        "the committed model after the last round."
    )


def in_a_line(setting: Setting) -> str:
    """The model and H."""
    model = setting.base.model
    size = count_text(Sizes.of(model).total)
    return f"{size} parameters ({model.num_experts} experts, top-{model.top_k}), H = {setting.steps_per_round}"


def _optimizer(config: Config) -> str:
    optimizer, schedule = config.optimizer, config.scheduler
    return (
        f"Optimizer {optimizer.name}, learning rate {optimizer.lr:g} after {schedule.warmup_steps} steps of warm-up, "
        f"then {schedule.name} down to {schedule.min_ratio:g} of it at step {schedule.total_steps}"
    )


def _changes(setting: Setting, arm: str) -> str:
    text = in_short(arm, setting.known) or "(what all arms start from)"
    config = setting.config_of(arm, 0, Path())
    last = steps_of(config, setting.steps)
    return text + (f" ({last} steps: its last round ends there)" if last != setting.steps else "")


def with_what_is_kept(new: str, before: str) -> str:
    """The new page with what people have written on the old one: a few sentences below its title, notes at its end."""
    begin, end = SHORT
    if begin in before and end in before:
        title, rest = new.split("\n\n", 1)
        new = f"{title}\n\n{begin}{before.split(begin, 1)[1].split(end, 1)[0]}{end}\n\n{rest}"
    return new + (f"\n{NOTES}{before.split(NOTES, 1)[1]}" if NOTES in before else "")


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
        figure = Figure(figsize=(8.5, 4.4), layout="constrained")
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
        figure.legend(fontsize="small", loc="outside right upper")  # beside: many arms would hide what they name
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
