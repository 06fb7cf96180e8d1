"""How fast peers train on after the bootstrap node was killed, against the same rounds of a run where nobody was.

python scripts/bench_node_loss.py --turns 3 --rounds 22

Real processes on loopback: three peers without data of their own. As soon as round 2 is committed the bootstrap node,
or the node and a peer, get SIGKILL; the others train on. Arms take turns, so that a busy machine harms all alike. The
first rounds of a run are no reference: processes still start in them, and a peer that waits leaves its core to others.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.events import Round, Step
from spes_p2p.quickstart.processes import Process
from tests.fork_server import ForkedSwarm

NAMES = ("one", "two", "three")
RUN = ("swarm.min_peers=3", "swarm.experts_per_peer=4", "sync.steps_per_round=20", "eval.every_rounds=0")
ARMS = {"nobody": (), "the node": ("node",), "the node and a peer": ("node", "three")}
KILLED_AT = 2


def speeds(folder: Path, tokens: Path, killed: tuple[str, ...], rounds: int) -> Iterator[tuple[float, float]]:
    """Of each peer that is left (tokens per second by the clock, those of its median step) over `rounds` rounds."""
    with ForkedSwarm(folder) as swarm:
        node = swarm.bootstrap("tiny", tokens, RUN)
        peers = {name: swarm.peer(name, None, ["eval.every_rounds=0"]) for name in NAMES}
        left = [peer for name, peer in peers.items() if name not in killed]
        swarm.wait_for_round(KILLED_AT, NAMES, 300)
        for name in killed:
            (node if name == "node" else peers[name]).send(signal.SIGKILL)
        first = max(event.round for peer in left for event in peer.rounds()) + 1  # after the one in which it fell
        swarm.wait_for_round(first + rounds, [peer.name for peer in left], 600)
        for peer in left:
            yield speed_of(peer, first, first + rounds)


def speed_of(peer: Process, first: int, last: int) -> tuple[float, float]:
    """From the commit of round `first` to that of `last`."""
    ends = {event.round: at for at, event in peer.seen if isinstance(event, Round)}
    steps = [event for at, event in peer.seen if isinstance(event, Step) and ends[first] < at <= ends[last]]
    by_clock = sum(step.tokens for step in steps) / (ends[last] - ends[first])
    return by_clock, statistics.median(step.tokens_per_second for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=22)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_stdlib_corpus(folder / "corpus", 400_000, files=1)
        tokenize([str(folder / "corpus")], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
        for turn in range(options.turns):
            for at, (arm, killed) in enumerate(ARMS.items()):
                found[arm] += speeds(folder / f"{turn}-{at}", folder / "tokens", killed, options.rounds)
    reference = [statistics.median(kind) for kind in zip(*found["nobody"], strict=True)]
    print("tokens/s of a peer that is left, medians, and their share of those of the run where nobody was killed")
    for arm, values in found.items():
        clock, step = (statistics.median(kind) for kind in zip(*values, strict=True))
        shares = f"{clock / reference[0]:.0%} by the clock, {step / reference[1]:.0%} of a step"
        each = ", ".join(f"{by_clock:,.0f}" for by_clock, _ in values)
        print(f"killed: {arm:<20} {clock:>8,.0f} by the clock ({each}), {step:,.0f} of a step: {shares}")


if __name__ == "__main__":
    main()
