"""Writes spes_p2p/planning/measured.json and its table in docs/results.md from the outcomes in docs/savings.json.

    python scripts/make_measured.py           # after new outcomes were added to docs/savings.json
    python scripts/make_measured.py --check   # only says whether both files are up to date

Each outcome is a run of scripts/compare.py with the options of its `setting`, of one seed. Settings are compared in
pairs, seed by seed, with the setting that they save something of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone that is not installed

from scripts.comparison.page import half_interval  # noqa: E402
from spes_p2p.planning.measured import Effect  # noqa: E402

OUTCOMES = ROOT / "docs" / "savings.json"
MEASURED = ROOT / "spes_p2p" / "planning" / "measured.json"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- Made by scripts/make_measured.py. -->", "<!-- The end of what it makes. -->"

PAIRS = {
    "int8": ("int8", "fp32"),
    "int4": ("int4", "fp32"),
    "ternary-columns": ("columns each round, in ternary", "columns each round"),
    "ternary-owners-2": ("two owners, in ternary", "two owners"),
    "overlap": ("overlap", "int4"),
    "vocabulary-5": ("vocabulary every 5 rounds", "vocabulary each round"),
    "columns-5": ("int4", "columns each round"),
    "columns-5-guests": ("guests", "columns each round"),
    "columns-10": ("columns every 10 rounds", "columns each round"),
    "ternary": ("ternary", "int4"),
    "longer-2": ("rounds twice as long", "int4"),
    "longer-4": ("rounds four times as long", "int4"),
    "owners-2": ("two owners", "columns each round"),
}
"""By the name that planning/tuning.py asks for: a setting, and the one that it is compared with."""
WORDS = {
    "int8": "`sync.codec=int8` instead of fp32",
    "int4": "`sync.codec=int4` instead of fp32",
    "ternary-columns": "`sync.expert_codec=ternary` instead of int4, one owner a column, columns in every round",
    "ternary-owners-2": "the same with two owners a column",
    "overlap": "`sync.overlap`",
    "vocabulary-5": "embedding and head once in 5 rounds, with 4,096 tokens of vocabulary",
    "columns-5": "columns in one of 5 rounds",
    "columns-5-guests": "the same, with guests of rank 16",
    "columns-10": "columns in one of 10 rounds",
    "ternary": "`sync.codec=ternary` instead of int4, columns in one of 5",
    "longer-2": "rounds of 20 instead of 10 steps, columns in one of 5",
    "longer-4": "rounds of 40 instead of 10 steps, columns in one of 5",
    "owners-2": "two owners a column instead of one",
}

Outcomes = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""By setting and seed."""


def main() -> None:
    outcomes = read()
    wanted = {MEASURED: measured(outcomes), PAGE: page(outcomes)}
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not up to date: {', '.join(map(str, stale))}; run scripts/make_measured.py" if stale else 0)
    for path in stale:
        path.write_text(wanted[path])


def read() -> Outcomes:
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for outcome in json.loads(OUTCOMES.read_text()):
        found.setdefault(outcome["setting"], {})[outcome["seed"]] = outcome
    return found


def effect(outcomes: Outcomes, name: str) -> Effect:
    """Of the seeds that both settings have."""
    saved, whole = (outcomes[setting] for setting in PAIRS[name])
    percents = [100 * (saved[seed]["loss"] / whole[seed]["loss"] - 1) for seed in sorted(saved.keys() & whole.keys())]
    half = round(half_interval(percents), 2) if len(percents) > 1 else None
    return Effect(round(mean(percents), 2), half, len(percents))


def measured(outcomes: Outcomes) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(vars(effect(outcomes, name)))}" for name in PAIRS]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(outcomes: Outcomes) -> str:
    """docs/results.md with the table of today."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{rest.split(END, 1)[1]}"


def table(outcomes: Outcomes) -> str:
    rows = ["| setting | loss | pairs | bytes, of what it is compared with | memory |"]
    rows += ["| --- | --- | --- | --- | --- |"]
    for name, (saved, whole) in PAIRS.items():
        found = effect(outcomes, name)
        sent, memory = (ratio(outcomes[saved], outcomes[whole], key) for key in ("bytes_sent", "trained_bytes"))
        rows.append(f"| {WORDS[name]} | {found} | {found.pairs} | {sent} | {memory} |")
    return "\n".join(rows)


def ratio(saved: Mapping[int, Mapping[str, Any]], whole: Mapping[int, Mapping[str, Any]], key: str) -> str:
    seeds: Sequence[int] = sorted(saved.keys() & whole.keys())
    return f"{mean(saved[seed][key] / whole[seed][key] for seed in seeds):.0%}"


if __name__ == "__main__":
    main()
