#!/usr/bin/env python3
"""How fast the program answers: `--help`, and `status` where the invitation to a live run is given.

    python scripts/bench_start.py [--invitation spes1...] [--times 10]

Seconds by the clock and of CPU time (that of the libp2p daemon included), medians, beside how long the answer may take
on an idle core. On a busy machine only CPU time says something about the program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

REFERENCES = {"--help": 0.3, "status": 1.0}
"""Seconds by the clock that an answer may take on an idle core."""
PROGRAM = (sys.executable, "-c", "from spes_p2p.cli.main import main; main()")


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""As people have it: what was compiled once is not compiled again."""


def seconds_of(words: list[str]) -> tuple[float, float]:
    """(by the clock, of CPU time) of one call. Raises CalledProcessError where it fails."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([*PROGRAM, *words], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--invitation", help="of a live run")
    parser.add_argument("--times", type=int, default=10, help="calls of each command")
    options = parser.parse_args()
    commands = [["--help"], *([["status", options.invitation]] if options.invitation else [])]
    print(f"{'command':<10} {'seconds':>8} {'of CPU':>8} {'reference':>10}")
    for words in commands:
        seconds_of(words)  # the first one reads files that are not in memory yet
        found = [seconds_of(words) for _ in range(options.times)]
        wall, used = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{words[0]:<10} {wall:>8.2f} {used:>8.2f} {REFERENCES[words[0]]:>10.2f}")


if __name__ == "__main__":
    main()
