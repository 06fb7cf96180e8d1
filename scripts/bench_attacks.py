#!/usr/bin/env python3
"""What liars do to a run: the held-out loss with them, against that of the same run without them.

    python scripts/bench_attacks.py                                     # every attack, three seeds: an hour of one core
    python scripts/bench_attacks.py --attacks nan sign-flip --peers 10 --liars 2 --seeds 3 --json
    python scripts/bench_attacks.py --attacks sign-flip -- sync.aggregate=mean
    python scripts/bench_attacks.py --cost                              # no liars: all defences on, and all off

Real training and the real exchange in one process, on the in-memory network and the virtual clock; five of ten peers
own each expert. All defences are on, unless overrides turn them off: sync.aggregate=clip, swarm.faults=byzantine,
swarm.electors=vouched (liars are vouched for, too). Data is leased, and the work of one peer in six rounds is audited,
more than such short rounds pay for; --cost audits what they do.

With --json a JSON object for each attack (means over the seeds; a loss that is not finite is null), else a table. A
stall is the longest time between two commits, in deadlines of a leader; banned is who is no member in the end, of the
liars and of the others, the most of any seed, and last_ban the round from which on all of these were none.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.peer.options import config_path
from tests.simulation.attackers.trial import ATTACKS, Cast, Trial, run_trial

SMALL = (
    "model.d_model=64", "model.num_layers=1", "model.num_heads=2", "model.num_experts=4", "model.expert_ffn=64",
    "data.sequence_length=64", "optimizer.lr=0.004", "sync.tile_values=4096", "sync.steps_per_round=8",
    "sync.merge_alpha=0", "swarm.experts_per_peer=2", "swarm.target_replicas=5", "eval.sequences=256",
)  # fmt: skip
DEFENCES = ("sync.aggregate=clip", "swarm.faults=byzantine", "swarm.electors=vouched")
NO_DEFENCES = ("sync.aggregate=mean", "swarm.faults=crash", "swarm.electors=all")
Found = dict[str, str | float | list[float] | None]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or _made_data(folder)
        (_cost if arguments.cost else _attacks)(arguments, data, folder)


def _attacks(arguments: argparse.Namespace, data: Path, folder: Path) -> None:
    """All attacks with one seed after the other. What is known after each trial goes to stderr, so nothing is lost."""
    clean: dict[tuple[str, ...], list[Trial]] = defaultdict(list)
    lying: dict[str, list[Trial]] = defaultdict(list)
    if not arguments.json:
        print("| attack | loss | without liars | worse by (each seed) | longest stall | banned | honest banned |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for seed in range(arguments.seeds):
        for attack in arguments.attacks:
            needed = ATTACKS[attack].overrides
            config = _config(arguments, seed, data, (*DEFENCES, *needed))
            if len(clean[needed]) == seed:
                clean[needed].append(_trial(arguments, config, folder, ""))
            lying[attack].append(_trial(arguments, config, folder, attack))
            found = _summary(attack, lying[attack], clean[needed])
            print(json.dumps(found), file=sys.stderr, flush=True)
            if seed + 1 == arguments.seeds:
                print(json.dumps(found) if arguments.json else _row(found), flush=True)
    every = _audits([trial for some in (*clean.values(), *lying.values()) for trial in some])
    said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(every.items()))
    print(f"audits of honest work, in all runs: {said or 'none'}", file=sys.stderr)


def _trial(arguments: argparse.Namespace, config: Config, folder: Path, attack: str) -> Trial:
    kind = ATTACKS[attack]() if attack else None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        given = Cast(arguments.rounds, arguments.peers, arguments.liars)
        return run_trial(config, Path(own), open_dataset(config), kind, given)


def _audits(trials: Sequence[Trial]) -> Counter[str]:
    return sum((trial.audits for trial in trials), Counter())


def _summary(attack: str, trials: Sequence[Trial], clean: Sequence[Trial]) -> Found:
    loss, clean_loss = mean(trial.loss for trial in trials), mean(trial.loss for trial in clean)
    worse = [trial.loss / other.loss - 1 for trial, other in zip(trials, clean, strict=True)]
    honest, liars = _audits(trials), sum((trial.audits_of_liars for trial in trials), Counter[str]())
    return {
        "attack": attack,
        "seeds": len(trials),
        "loss": round(loss, 4) if math.isfinite(loss) else None,
        "clean_loss": round(clean_loss, 4),
        "worse": [round(one, 5) for one in worse if math.isfinite(one)],
        "longest_stall_deadlines": round(max(trial.longest_stall_deadlines for trial in trials), 1),
        "banned": max(trial.banned for trial in trials),
        "fewest_banned": min(trial.banned for trial in trials),
        "last_ban": max(trial.last_ban for trial in trials),
        "banned_honest": max(trial.banned_honest for trial in trials),
        "rounds": min(trial.rounds for trial in trials),
        "honest_passed": honest[PASSED],
        "honest_failed": honest[FAILED],
        "liars_passed": liars[PASSED],
        "liars_failed": liars[FAILED],
        "cpu_seconds": round(sum(trial.cpu_seconds for trial in trials), 1),
    }


def _row(found: Found) -> str:
    loss, clean, worse = found["loss"], found["clean_loss"], found["worse"]
    assert isinstance(clean, float)
    assert isinstance(worse, list)
    seeds = ", ".join(f"{one:+.1%}" for one in worse)
    by = f"{loss / clean - 1:+.1%} ({seeds})" if isinstance(loss, float) else "destroyed"
    banned = f"{found['banned']}, by round {found['last_ban']}" if found["banned"] else "0"
    cells = [found["attack"], "none" if loss is None else loss, clean, by, found["longest_stall_deadlines"]]
    return f"| {' | '.join(map(str, [*cells, banned, found['banned_honest']]))} |"


def _cost(arguments: argparse.Namespace, data: Path, folder: Path) -> None:
    """What defences cost where nobody lies. Processor time is that of all peers and of the pretended network."""
    made: dict[str, list[Trial]] = {"off": [], "on": []}
    for seed in range(arguments.seeds):
        for kind, chosen in (("off", NO_DEFENCES), ("on", DEFENCES)):
            config = _config(arguments, seed, data, chosen)
            given = Cast(arguments.rounds, arguments.peers, 0, often=1.0)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                made[kind].append(run_trial(config, Path(own), open_dataset(config), None, given))
    print("| defences | loss | bytes sent | processor time, s |\n| --- | --- | --- | --- |")
    means = {
        kind: [mean(row) for row in zip(*((t.loss, t.bytes_sent, t.cpu_seconds) for t in trials), strict=True)]
        for kind, trials in made.items()
    }
    for kind, (loss, sent, seconds) in means.items():
        print(f"| {kind} | {loss:.4f} | {sent:,.0f} | {seconds:.1f} |")
    more = [f"{on / off - 1:+.2%}" for on, off in zip(means["on"], means["off"], strict=True)]
    print(f"| on costs | {' | '.join(more)} |")


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
    parser.add_argument("--cost", action="store_true", help="no liars: what defences cost")
    parser.add_argument("--peers", type=int, default=10, help="all of them, with the liars")
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--data", type=Path, help="token shards (default: bytes of the standard library's sources)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], help="after --, such as optimizer.lr=0.001")
    return parser.parse_args()


if __name__ == "__main__":
    main()
