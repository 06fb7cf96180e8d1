#!/usr/bin/env python3
"""What liars do to a run: the held-out loss with them, against that of the same run without them.

    python scripts/bench_attacks.py                                     # every attack
    python scripts/bench_attacks.py --attacks nan sign-flip --peers 10 --liars 2 --seeds 3 --json

Real training and the real exchange in one process, on the in-memory network and the virtual clock; five of ten peers
own each expert. With --json a JSON object for each attack (means over the seeds; a loss that is not finite is null),
else a table. A stall is the longest time between two commits, in deadlines of a leader; banned is who is no member in
the end, of the liars and of the others, the most of any seed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.peer.options import config_path
from spes_p2p.testing.attackers.trial import ATTACKS, Trial, run_trial

SMALL = (
    "model.d_model=64", "model.num_layers=2", "model.num_heads=2", "model.expert_ffn=64", "data.sequence_length=64",
    "optimizer.lr=0.004", "sync.tile_values=1024", "sync.steps_per_round=8", "sync.merge_alpha=0",
    "swarm.experts_per_peer=4", "swarm.target_replicas=5", "swarm.faults=byzantine", "eval.sequences=128",
)  # fmt: skip


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or _made_data(folder)
        clean: dict[tuple[str, ...], list[Trial]] = {}
        if not arguments.json:
            print("| attack | loss | without liars | worse by | longest stall | banned | banned honest |")
            print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for attack in arguments.attacks:
            needed = ATTACKS[attack].overrides
            configs = [_config(arguments, seed, data, needed) for seed in range(arguments.seeds)]
            if needed not in clean:
                clean[needed] = [_trial(arguments, config, folder, "") for config in configs]
            lying = [_trial(arguments, config, folder, attack) for config in configs]
            found = _summary(attack, lying, clean[needed])
            print(json.dumps(found) if arguments.json else _row(found), flush=True)


def _trial(arguments: argparse.Namespace, config: Config, folder: Path, attack: str) -> Trial:
    kind = ATTACKS[attack]() if attack else None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        data = open_dataset(config)
        return run_trial(config, Path(own), data, arguments.rounds, kind, arguments.peers, arguments.liars)


def _summary(attack: str, trials: Sequence[Trial], clean: Sequence[Trial]) -> dict[str, str | float | None]:
    loss = mean(trial.loss for trial in trials)
    return {
        "attack": attack,
        "loss": round(loss, 4) if math.isfinite(loss) else None,
        "clean_loss": round(mean(trial.loss for trial in clean), 4),
        "longest_stall_deadlines": round(max(trial.longest_stall_deadlines for trial in trials), 1),
        "banned": max(trial.banned for trial in trials),
        "banned_honest": max(trial.banned_honest for trial in trials),
    }


def _row(found: dict[str, str | float | None]) -> str:
    loss, clean = found["loss"], found["clean_loss"]
    worse = "destroyed" if not isinstance(loss, float) or not isinstance(clean, float) else f"{loss / clean - 1:+.1%}"
    cells = [found["attack"], "none" if loss is None else loss, clean, worse, found["longest_stall_deadlines"]]
    return f"| {' | '.join(map(str, [*cells, found['banned'], found['banned_honest']]))} |"


def _config(arguments: argparse.Namespace, seed: int, data: Path, needed: Sequence[str]) -> Config:
    overrides = (*SMALL, *needed, f"data.path={data}", f"run.seed={seed}", *arguments.overrides)
    return load_config(config_path(Path("tiny")), overrides)


def _made_data(folder: Path) -> Path:
    build_stdlib_corpus(folder / "corpus", 2**22)
    tokenize([str(folder / "corpus" / "*.jsonl")], folder / "tokens", TokenizeOptions())
    return folder / "tokens"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS), metavar="NAME")
    parser.add_argument("--peers", type=int, default=10, help="all of them, with the liars")
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--data", type=Path, help="token shards (default: bytes of the standard library's sources)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], help="after --, such as optimizer.lr=0.001")
    return parser.parse_args()


if __name__ == "__main__":
    main()
