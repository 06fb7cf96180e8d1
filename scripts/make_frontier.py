"""Writes the table of the benchmark's arms in docs/results.md, and docs/frontier.svg, from docs/benchmark.json.

    python scripts/make_frontier.py           # after new outcomes were added to docs/benchmark.json; needs matplotlib
    python scripts/make_frontier.py --check   # only says whether the table is up to date

Each outcome is a run of `compare.py --benchmark small-cpu --arms ARM --seeds SEED --steps-per-round H OVERRIDES`.
Losses of different seeds are not compared: what an arm is above one big machine is taken seed by seed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone that is not installed

from scripts.comparison.arms import BENCHMARKS, Setting  # noqa: E402
from scripts.comparison.page import half_interval, with_interval  # noqa: E402
from spes_p2p.config.schema import Config  # noqa: E402

OUTCOMES = ROOT / "docs" / "benchmark.json"
PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "frontier.svg"
BEGIN, END = "<!-- Made by scripts/make_frontier.py. -->", "<!-- The end of the table that it makes. -->"

BENCHMARK = BENCHMARKS["small-cpu"]
Key = tuple[str, int, tuple[str, ...]]
"""An arm's name, --steps-per-round, and what else was given: overrides, and options with their values in one word."""
WHOLE: Key = ("centralized-muon", BENCHMARK.steps_per_round, ("optimizer.lr=0.006",))
"""One big machine: what the others are compared with."""
COMMON = "optimizer.lr=0.006"
"""What the table does not repeat in each row."""


@dataclass(frozen=True)
class Arm:
    """All outcomes of one arm, by seed: losses, and means of what a peer sent and trained, in bytes."""

    name: str
    steps_per_round: int
    overrides: tuple[str, ...]
    losses: dict[int, float]
    sent: float
    memory: float
    peers: int

    @property
    def key(self) -> Key:
        return self.name, self.steps_per_round, self.overrides

    @cached_property
    def config(self) -> Config:
        given = tuple(word for word in self.overrides if not word.startswith("--"))
        setting = Setting(
            Path(BENCHMARK.config), BENCHMARK.steps, BENCHMARK.peers, self.steps_per_round, BENCHMARK.overrides, given
        )
        return setting.config_of(self.name, 0, Path())

    @property
    def owners(self) -> int:
        """Of a column."""
        config, experts = self.config, self.config.model.num_experts
        return min(self.peers * config.swarm.experts_per_peer // experts, config.swarm.target_replicas)

    @property
    def label(self) -> str:
        more = [f"`{word}`" for word in self.overrides if word != COMMON]
        if self.steps_per_round != BENCHMARK.steps_per_round:
            more.insert(0, f"`--steps-per-round {self.steps_per_round}`")
        return " ".join([self.name, *more])

    def above(self, whole: Arm) -> list[float]:
        """In percent, of the seeds that both have."""
        return [100 * (loss / whole.losses[seed] - 1) for seed, loss in self.losses.items() if seed in whole.losses]


def main() -> None:
    arms = read()
    text = page(arms)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE} is not up to date; run scripts/make_frontier.py")
    PAGE.write_text(text)
    draw(arms)


def read() -> list[Arm]:
    """By number of owners, then by bytes; one big machine last."""
    found: dict[Key, list[dict[str, float]]] = {}
    for outcome in json.loads(OUTCOMES.read_text()):
        key = outcome["arm"], outcome["steps_per_round"], tuple(outcome["overrides"])
        found.setdefault(key, []).append(outcome)
    arms = [
        Arm(
            *key,
            {int(one["seed"]): one["loss"] for one in sorted(own, key=lambda one: one["seed"])},
            mean(one["bytes_sent"] / one["peers"] for one in own),
            mean(one["trained_bytes"] for one in own),
            int(own[0]["peers"]),
        )
        for key, own in found.items()
    ]
    return sorted(arms, key=lambda arm: (arm.peers == 1, arm.owners, arm.sent))


def frontier(arms: Sequence[Arm], whole: Arm) -> set[Key]:
    """Arms to which no other with as many owners is better for as few bytes."""
    best: set[Key] = set()
    for owners in {arm.owners for arm in arms}:
        lowest = math.inf
        for arm in arms:  # by bytes
            if arm.peers > 1 and arm.owners == owners and (above := mean(arm.above(whole))) < lowest:
                lowest = above
                best.add(arm.key)
    return best


def page(arms: Sequence[Arm]) -> str:
    """docs/results.md with the table of today."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table(arms)}\n\n{END}{rest.split(END, 1)[1]}"


def table(arms: Sequence[Arm]) -> str:
    whole = next(arm for arm in arms if arm.key == WHOLE)
    best = frontier(arms, whole)
    rows = [
        "| arm | peers | shared weights, columns every (steps) | owners of a column | held-out loss | seeds "
        "| above one big machine | sent per peer | memory per peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in arms:
        config, loss = arm.config, with_interval(list(arm.losses.values()))
        period = config.sync.steps_per_round
        periods = f"{period}, {period * config.sync.expert_rounds}" if arm.peers > 1 else "every step"
        owners = arm.owners if arm.peers > 1 else ""
        above = "" if arm is whole else percent(arm.above(whole))
        shown = f"**{loss}**" if arm.key in best else loss
        rows.append(
            f"| {arm.label} | {arm.peers} | {periods} | {owners} | {shown} | {len(arm.losses)} | {above} "
            f"| {arm.sent / 1e6:.1f} MB | {arm.memory / 1e6:.1f} MB |"
        )
    return "\n".join(rows)


def percent(values: Sequence[float]) -> str:
    return f"{mean(values):+.1f}%" + (f" ± {half_interval(values):.1f}" if len(values) > 1 else "")


def draw(arms: Sequence[Arm]) -> None:
    """Loss against bytes, a colour for each number of owners: what a column's memory buys."""
    from matplotlib.figure import Figure

    whole = next(arm for arm in arms if arm.key == WHOLE)
    best = frontier(arms, whole)
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    for number, owners in enumerate(sorted({arm.owners for arm in arms if arm.peers > 1})):
        own = [arm for arm in arms if arm.peers > 1 and arm.owners == owners]
        for names, marker in ((_adamw, "x"), (_muon, "o")):
            if not (some := [arm for arm in own if names(arm)]):
                continue
            label = f"{OWNERS.get(owners, f'{owners} owners')}{', AdamW' if marker == 'x' else ''}"
            axes.plot(*_points(some, whole), marker, color=f"C{number}", label=label, markersize=5)
        line = sorted((arm for arm in own if arm.key in best), key=lambda arm: arm.sent)
        axes.plot(*_points(line, whole), "-", color=f"C{number}", linewidth=1)
    axes.set(
        xscale="log", xlabel="sent per peer (bytes)", ylabel="held-out loss above one big machine with Muon (%)",
        title="1.9M parameters, 800 steps; on the lines: nothing with as many owners is better for as few bytes",
    )  # fmt: skip
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(PLOT, metadata={"Date": None})


OWNERS = {1: "one owner a column", 2: "two owners", 3: "three owners", 4: "all columns at all peers (DiLoCo)"}


def _adamw(arm: Arm) -> bool:
    return arm.config.optimizer.name == "adamw"


def _muon(arm: Arm) -> bool:
    return not _adamw(arm)


def _points(arms: Sequence[Arm], whole: Arm) -> tuple[list[float], list[float]]:
    return [arm.sent for arm in arms], [mean(arm.above(whole)) for arm in arms]


if __name__ == "__main__":
    main()
