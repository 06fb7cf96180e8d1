"""How long `join` takes with an invitation whose first addresses are dead, against one with live addresses alone.

python scripts/bench_join.py --turns 3

Real processes on loopback: a run of one tiny peer, and newcomers, from their start until they are in. One dead address
refuses, one accepts and never says a word, one does not answer at all (10.255.255.1).

python scripts/bench_join.py --clean 10

What a volunteer waits for: the same program as it is typed, each time in a home folder with nothing in it and without
data, from its start until the first commit that counts its work. Aim: below 60 s, ten of ten.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Commit
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.peer.kept_invite import kept_invite
from spes_p2p.quickstart.processes import LocalSwarm, Process
from spes_p2p.swarm.invite import decode, encode
from spes_p2p.wire import unpack
from tests.fork_server import ForkedSwarm

NOBODY = ("QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64", "QmY8BDyJuRjjFuKsmgcCQefNchDB5GHyWr5HxtUJimPuPd")
RUN = ("swarm.min_peers=1", "swarm.experts_per_peer=8", "swarm.heartbeat_seconds=0.3", "sync.steps_per_round=8")


def seconds_until_in(swarm: LocalSwarm, peer: Process) -> float:
    began = time.monotonic()
    swarm.wait_until(lambda: "this is peer " in peer.output(), "it is in", [peer.name])
    return time.monotonic() - began


def seconds_until_counted(invitation: str, home: Path) -> float:
    """Of one newcomer, which leaves again."""
    home.mkdir()
    command = [sys.executable, "-m", "spes_p2p.cli.main", "join", invitation, "--output", "peer", "--device", "cpu"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_", "TORCH"))}
    environment = clean | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    began, log = time.monotonic(), home / "output.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"], cwd=home, stdout=output, stderr=output,
            env=environment | {"PYTHONPATH": path},
        )  # fmt: skip
    try:
        while not is_counted(home / "peer"):
            if process.poll() is not None or time.monotonic() - began > 600:
                raise SystemExit(f"it was not counted:\n{log.read_text()}")
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_counted(folder: Path) -> bool:
    """Whether the newest commit here lists this peer with tokens."""
    owner, newest = folder / "run" / "peer_id", newest_of(folder)
    if newest is None or not owner.exists():
        return False
    return any(entry.peer == owner.read_text() and entry.tokens for entry in newest.roster)


def newest_of(folder: Path) -> Manifest | None:
    """What the newest commit in a peer's folder says."""
    commits = sorted((folder / "run" / "chain").glob("*.commit"))
    return unpack(Commit, commits[-1].read_bytes()).manifest if commits else None


def is_alone(folder: Path) -> bool:
    """Whether the newcomer before is gone for good: else the next one waits for that."""
    newest = newest_of(folder)
    return newest is not None and len(newest.members) == 1


def bench_clean(times: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_stdlib_corpus(folder / "corpus", 2_000_000, files=1)
        tokenize([str(folder / "corpus")], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
        with LocalSwarm(folder / "swarm") as swarm:
            swarm.bootstrap("tiny", folder / "tokens", ("swarm.min_peers=1",))
            first = swarm.peer("first")
            swarm.wait_for_round(1, ["first"])
            for turn in range(times):
                swarm.wait_until(lambda: is_alone(first.folder), "the newcomer before is gone", ["first"], 300.0)
                load, seconds = os.getloadavg()[0], seconds_until_counted(kept_invite(first.folder), folder / str(turn))
                print(f"{turn + 1:>3} {seconds:6.1f} s  (load {load:.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clean", type=int, metavar="TIMES", help="how often a volunteer comes")
    turns, clean = (options := parser.parse_args()).turns, options.clean
    if clean:
        bench_clean(clean)
        return
    with tempfile.TemporaryDirectory() as name, socket.socket() as unused, socket.socket() as mute:
        folder = Path(name)
        build_stdlib_corpus(folder / "corpus", 400_000, files=1)
        tokenize([str(folder / "corpus")], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
        unused.bind(("127.0.0.1", 0))
        mute.bind(("127.0.0.1", 0))
        mute.listen(64)
        refused, silent = (
            f"/ip4/127.0.0.1/tcp/{one.getsockname()[1]}/p2p/{NOBODY[at]}" for at, one in enumerate((unused, mute))
        )
        kinds = {
            "live": (),
            "refused, silent": (refused, silent),
            "refused, silent, no host": (refused, silent, f"/ip4/10.255.255.1/tcp/31337/p2p/{NOBODY[1]}"),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        with ForkedSwarm(folder / "swarm") as swarm:
            swarm.bootstrap("tiny", folder / "tokens", RUN)
            first = swarm.peer("first", folder / "tokens")
            swarm.wait_for_round(1, ["first"])
            for turn in range(turns):
                for at, (kind, dead) in enumerate(kinds.items()):
                    invite = decode(kept_invite(first.folder))
                    word = encode(replace(invite, addresses=(*dead, *invite.addresses)))
                    peer = swarm.peer(f"peer-{turn}-{at}", folder / "tokens", initial_peer=word)
                    found[kind].append(seconds_until_in(swarm, peer))
                    peer.end()
        for kind, seconds in found.items():
            print(f"{kind:<26} {statistics.median(seconds):.1f} s ({', '.join(f'{one:.1f}' for one in seconds)})")


if __name__ == "__main__":
    main()
