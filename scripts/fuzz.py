#!/usr/bin/env python3
"""Altered messages and files for every parser, for so many minutes.

    python scripts/fuzz.py --minutes 10

Exit code 1 where one fails with an error that is not its own; the target and the seed are named.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import fuzzing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, help="seed to begin with; without it, any")
    chosen = parser.parse_args()
    first = random.randrange(10**9) if chosen.first is None else chosen.first
    print(f"from seed {first}", flush=True)
    try:
        done = fuzzing.run(60 * chosen.minutes, first)
    except fuzzing.Crash as crash:
        print(f"BROKEN: {crash}")
        return 1
    print(f"{sum(done.values())} inputs for {len(done)} parsers, no crash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
