"""What the tests with real processes share: a small corpus, a small run, and a look at how a peer ended."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from pathlib import Path

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.interop.hf import state_layout
from spes_p2p.quickstart.processes import Process
from spes_p2p.state.store import StateStore
from tests.fork_server import ForkedSwarm

SMALL = (
    "model.d_model=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.expert_ffn=32",
    "data.sequence_length=64",
    "sync.tile_values=4096",
    "sync.steps_per_round=16",
    "sync.merge_interval=16",
    "eval.sequences=8",
)
"""On top of `tiny`: steps of a few milliseconds, and a merge in each round."""
ALONE = (*SMALL, "swarm.min_peers=1", "swarm.experts_per_peer=8")
WAIT_SECONDS = 150.0


def make_tokens(folder: Path, words: int = 40_000, seed: int = 0) -> Path:
    """Token shards of made-up text in `folder`, about 8 tokens a word."""
    made = [f"word{number * 7919 % 997}" for number in range(seed, seed + words)]
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(" ".join(made[at : at + 12]) for at in range(0, words, 12)))
    tokenize([str(text)], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def config_of(overrides: tuple[str, ...]) -> Config:
    return load_config(bundled_config("tiny"), overrides)


def quiet_port() -> int:
    """A free port, and none of those that the system hands out: it stays free until it is used, or used again."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    quiet = [*range(10_000, first), *range(last + 1, 2**16)]
    for port in random.sample(quiet, len(quiet)):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def losses(folder: Path) -> dict[int, set[float]]:
    """By global step, from metrics.jsonl; more than one where a step was made again and came out differently."""
    found: dict[int, set[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            found.setdefault(event["step"], set()).add(event["loss"])
    return found


def state_hash(folder: Path, config: Config) -> str:
    """Root of the newest committed state in a peer's folder."""
    version = StateStore(folder / "run" / "state", state_layout(config), True)
    latest = version.latest()
    assert latest is not None
    return f"{latest.round}:{latest.root.hex()}"


def alone(folder: Path, data: Path, *arguments: str) -> Process:
    """A swarm of one peer that runs to its end."""
    with ForkedSwarm(folder) as swarm:
        swarm.bootstrap("tiny", data, ALONE)
        peer = swarm.peer("peer", data, arguments)
        peer.wait(WAIT_SECONDS)
    return peer


def until_lines(process: subprocess.Popen[str], words: str) -> list[str]:
    """Reads what a process prints until a line has these words; fails when it ends before."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"it ended before it said {words!r}:\n{''.join(lines)}")
