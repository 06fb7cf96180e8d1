#!/usr/bin/env python3
"""Real peers that die, freeze and lose their disks for an hour, and whether every promise was kept.

python scripts/chaos.py --peers 8 --rounds 200 --kill-rate 0.3 --seed 1
python scripts/chaos.py --peers 5 --rounds 50 sync.codec=int8 sync.overlap=true sync.vocabulary_rounds=5

Exit code 1 where a promise was broken; the folder with all logs is kept then. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.swarm.chaos import Chaos
from tests.swarm.chaos_report import ChaosOptions, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="*", metavar="KEY=VALUE", help="changes to the run's config")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kill-rate", type=float, default=0.3, help="share of rounds that lose a peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="ends here, if the rounds did not come before")
    parser.add_argument("--steps-per-round", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each inner step sleeps so long: for few cores")
    parser.add_argument("--output", type=Path, help="where all goes; an empty folder")
    chosen = parser.parse_intermixed_args()
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="spes-p2p-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    options = ChaosOptions(
        folder, chosen.peers, chosen.rounds, chosen.kill_rate, chosen.seed, chosen.minutes, chosen.steps_per_round,
        step_seconds=chosen.step_seconds, overrides=tuple(chosen.other),
    )  # fmt: skip
    found = Chaos(options, say).run()
    print(report(found))
    if found.problems:
        print(f"everything is in {folder}")
    elif chosen.output is None:
        shutil.rmtree(folder)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
