#!/usr/bin/env python3
"""What strangers who lie do to a run: the held-out loss with them, without them, and of the trusted peers alone.

    python scripts/bench_attacks.py                                  # every attack, three seeds
    python scripts/bench_attacks.py --attacks row climb --liars 6 --codec ternary --json
    python scripts/bench_attacks.py --attacks climb --tile-values 65536 -- model.d_model=128

Real training and the arithmetic by which a reducer makes a slice, without a network: of ten peers four are trusted, and
the last ones lie. Attack "none" is the run where nobody lies, and its clean loss is that with the plain mean.

With --json an object for each attack (means over the seeds), else a table. `counted` is the mean share of what liars
gave that counted, of strangers where nobody lies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.peer.options import config_path
from tests.simulation.strangers import ATTACKS, Cast, Trial, mean_counted

SMALL = (
    "model.d_model=64", "model.num_layers=2", "model.num_heads=2", "model.num_experts=4", "model.expert_ffn=64",
    "data.sequence_length=64", "optimizer.lr=0.003", "sync.merge_alpha=0", "swarm.experts_per_peer=2",
    "eval.sequences=256",
)  # fmt: skip
NONE = "none"
Found = dict[str, str | int | float | None]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = arguments.data or _made_data(Path(name))
        bench = Bench(arguments, [_config(arguments, seed, data) for seed in range(arguments.seeds)])
        if not arguments.json:
            print("| attack | liars | loss | without liars | trusted alone | counted |")
            print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for attack in arguments.attacks:
            found = bench.row(attack)
            print(json.dumps(found) if arguments.json else _line(found), flush=True)


class Bench:
    """The runs of one cast, each with every seed."""

    def __init__(self, arguments: argparse.Namespace, configs: Sequence[Config]) -> None:
        self._arguments, self._configs = arguments, configs
        cast = Cast(arguments.peers, arguments.trusted)
        self._clean, _ = self._runs(replace(cast, peers=cast.peers - arguments.liars))
        self._alone, _ = self._runs(replace(cast, peers=cast.trusted))

    def row(self, attack: str) -> Found:
        """An attack with what it is compared to."""
        arguments = self._arguments
        cast = Cast(arguments.peers, arguments.trusted)
        if attack == NONE:
            liars, (clean, _) = 0, self._runs(cast, plain=True)
        else:
            liars, clean = arguments.liars, self._clean
            cast = replace(cast, liars=liars, attack=attack)
        loss, counted = self._runs(cast)
        return {
            "attack": attack,
            "liars": liars,
            "loss": round(loss, 4),
            "clean_loss": round(clean, 4),
            "trusted_alone_loss": round(self._alone, 4),
            "counted": counted,
        }

    def _runs(self, cast: Cast, plain: bool = False) -> tuple[float, float | None]:
        trials = [Trial(config, open_dataset(config), cast, plain) for config in self._configs]
        losses = [trial.loss(self._arguments.rounds, self._arguments.steps) for trial in trials]
        counted = mean_counted(trials)
        return mean(losses), None if counted is None else round(counted, 3)


def _line(found: Found) -> str:
    loss = found["loss"]
    assert isinstance(loss, float)
    compared = [found["clean_loss"], found["trusted_alone_loss"]]
    cells = [f"{one} ({loss / one - 1:+.2%})" for one in compared if isinstance(one, float)]
    return f"| {' | '.join(map(str, [found['attack'], found['liars'], loss, *cells, found['counted']]))} |"


def _config(arguments: argparse.Namespace, seed: int, data: Path) -> Config:
    steps = arguments.rounds * arguments.steps
    given = (
        f"data.path={data}", f"run.seed={seed}", f"sync.steps_per_round={arguments.steps}",
        f"scheduler.total_steps={steps}", f"scheduler.warmup_steps={steps // 10}",
        f"sync.codec={arguments.codec}", f"sync.expert_codec={arguments.codec}",
        f"sync.tile_values={arguments.tile_values}",
    )  # fmt: skip
    return load_config(config_path(Path("tiny")), (*SMALL, *given, *arguments.overrides))


def _made_data(folder: Path) -> Path:
    build_stdlib_corpus(folder / "corpus", 2**23)
    tokenize([str(folder / "corpus" / "*.jsonl")], folder / "tokens", TokenizeOptions())
    return folder / "tokens"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [NONE, *ATTACKS]
    parser.add_argument("--attacks", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--peers", type=int, default=10, help="all of them, with the liars")
    parser.add_argument("--trusted", type=int, default=4)
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=14, help="inner steps a round")
    parser.add_argument("--tile-values", type=int, default=2**20)
    parser.add_argument("--codec", choices=["fp32", "int4", "ternary"], default="fp32")
    parser.add_argument("--data", type=Path, help="token shards (default: bytes of the standard library's sources)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], help="after --, such as optimizer.lr=0.001")
    return parser.parse_args()


if __name__ == "__main__":
    main()
