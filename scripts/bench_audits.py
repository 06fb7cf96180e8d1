#!/usr/bin/env python3
"""What audits of who trained find, how often honest peers would fail, and what it costs.

    python scripts/bench_audits.py                       # ten peers, 30 rounds of 8 steps, some ten minutes
    python scripts/bench_audits.py --dtype bfloat16 --threads 4
    python scripts/bench_audits.py --replay              # counted alone: what it would cost to make steps again

Ten peers really train a small model, each on its own part of the text, and the mean of each round is the next state.
In some rounds each of them is audited by all others as in a run: an eighth of the shared tiles, `MemoryJudge`. So are
lies made of the changes of some, by four each. The peers that are audited train with the data type and threads given;
auditors are as ever. Then 10,000 audits are drawn: a round and an honest peer, and of its nine auditors seven and what
they found, beside two who lie and say that it failed; an outcome is as in a manifest.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.membership import FAILED, PASSED
from spes_p2p.consensus.probation import COST_OF_TRAINING, MOST_AUDITORS, SEQUENCES, TILES_SHARE
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.leases import Range
from spes_p2p.data.loader import LeasedLoader, open_dataset
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.ids import PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.peer.options import config_path
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Values
from spes_p2p.sync.surroundings import Text
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.work_judge import MemoryJudge

SMALL = (
    "model.d_model=64", "model.num_layers=2", "model.num_heads=2", "model.expert_ffn=64", "data.sequence_length=64",
    "optimizer.lr=0.004", "sync.tile_values=1024", "sync.merge_alpha=0", "swarm.experts_per_peer=4",
)  # fmt: skip
PEERS, COLUMNS, AUDITORS_OF_LIES = 10, 4, 4
DRAWN, LYING = 10_000, 2
REPLAYED_BYTES, MOST_SHARE = 12, 0.03


class Blocks(dict[int, Values]):
    """A state in memory."""

    def block(self, index: int) -> Values:
        return self[index]


@dataclass
class Done:
    """What the peers trained in a round on top of `base`, each on the stream's positions of `leases`."""

    base: Blocks
    leases: list[Range]
    values: list[Blocks]


class Peers:
    """A trainer each, and one more for lies that must be trained."""

    def __init__(self, config: Config, dataset: Dataset, arguments: argparse.Namespace) -> None:
        self.config, self.dataset, self._arguments = config, dataset, arguments
        layout = state_layout(config)
        self._trainers = [Trainer(config, layout, torch.device("cpu")) for _ in range(PEERS + 1)]
        initial = InitialState(layout, config.run.seed, config.model.init_std)
        self.base = Blocks({block.index: np.array(initial.block(block.index)) for block in layout.model_blocks})
        self._cursor = self._step = 0

    def owned(self, peer: int) -> tuple[int, ...]:
        return tuple(sorted((peer + at) % self.config.model.num_experts for at in range(COLUMNS)))

    def round(self) -> Done:
        size = self._arguments.steps * self.config.optimizer.batch_sequences
        leases = [(self._cursor + peer * size, self._cursor + (peer + 1) * size) for peer in range(PEERS)]
        done = Done(self.base, leases, [self.trained(peer, peer, lease) for peer, lease in enumerate(leases)])
        self._cursor += PEERS * size
        self._step += self._arguments.steps
        self.base = Blocks(
            {
                block: np.mean([some[block] for some in done.values if block in some], axis=0, dtype=np.float32)
                for block in self.base
            }
        )
        return done

    def trained(self, trainer: int, peer: int, lease: Range, flips_labels: bool = False) -> Blocks:
        """What a trainer makes of the base on this lease."""
        with_dtype = torch.autocast("cpu", getattr(torch, self._arguments.dtype), self._arguments.dtype != "float32")
        torch.set_num_threads(self._arguments.threads)
        chosen, size = self._trainers[trainer], self.config.optimizer.batch_sequences
        chosen.adopt(self.owned(peer), self.base, self._step)
        loader = LeasedLoader(self.dataset, self.config, (lease,))
        with with_dtype:
            for _ in range(self._arguments.steps):
                batch = loader.next_batch(size)
                last = self.config.model.vocab_size - 1
                chosen.train_step(replace(batch, tokens=last - batch.tokens) if flips_labels else batch)
        torch.set_num_threads(1)
        return Blocks({block: chosen.contribution(block) for block in (0, *(1 + c for c in chosen.learner.owned))})


def lies_of(peers: Peers, done: Done, peer: int) -> Mapping[str, Values]:
    """Shared values that somebody may hand in for work that was not done."""
    base, honest = done.base[0], done.values[peer][0]
    noise = np.random.default_rng(peer).standard_normal(len(base), np.float32)
    noise *= np.float32(np.linalg.norm(honest - base) / np.linalg.norm(noise))
    now, peers.base = peers.base, done.base
    flipped = peers.trained(PEERS, peer, done.leases[peer], flips_labels=True)[0]
    peers.base = now
    return {
        "claimed-work": base, "copy": done.values[(peer + 1) % PEERS][0],
        "sign-flip": 2 * base - honest, "noise": base + noise, "noise, ten times": base + 10 * noise,
        "label-flip": flipped,
    }  # fmt: skip


def audited(judge: MemoryJudge, peers: Peers, done: Done, peer: int, auditor: int, handed_in: Values) -> str:
    """As `WorkAuditor` does it."""
    mark = sha256(b"%d %d %d" % (peers._cursor, peer, auditor))
    tiles = state_layout(peers.config).tiles_of(0)
    chosen = np.random.default_rng(list(mark)).choice(len(tiles), max(1, round(TILES_SHARE * len(tiles))), False)
    theirs, own = np.array(done.base[0]), np.array(done.base[0])
    for tile in (tiles[at] for at in chosen):
        part = slice(tile.start, tile.stop)
        theirs[part], own[part] = handed_in[part], done.values[auditor][0][part]
    fresh = (peers._cursor + 2 * SEQUENCES * auditor, peers._cursor + 2 * SEQUENCES * (auditor + 1))
    text = Text((done.leases[peer],), (done.leases[auditor],), (fresh,), mark)
    return judge.finding(done.base, theirs, own, text) or "nothing"


def failed_outcomes(groups: Sequence[Sequence[str]], rng: random.Random) -> Counter[str]:
    """Of 10,000 audits of honest peers."""
    quorum = Electorate(tuple(PeerId(str(at)) for at in range(MOST_AUDITORS)), Faults.BYZANTINE).quorum
    outcomes: Counter[str] = Counter()
    for _ in range(DRAWN):
        said = rng.sample(rng.choice(groups), MOST_AUDITORS - LYING) + [FAILED] * LYING
        outcomes[next((kind for kind in (FAILED, PASSED) if said.count(kind) >= quorum), "no outcome")] += 1
    return outcomes


def replay_costs() -> None:
    """How often steps could be made again for 3% of a run's bytes: an auditor needs weights and both moments in fp32
    of all that the peer trains. Beside it what a peer sends in a round (each shared value twice, columns once)."""
    print("| config | sent by a peer a round, GB | one point, GB | one auditor may replay one peer's steps |")
    print("| --- | --- | --- | --- |")
    for name in ("home", "spes-1b", "spes-7b"):
        overrides = ["sync.expert_rounds=1"]
        if name == "home":  # as `run init --strangers` has it
            overrides += ["sync.codec=int8", "sync.expert_codec=int8"]
        config = load_config(config_path(Path(name)), overrides)
        layout, owned, peers = state_layout(config), config.swarm.experts_per_peer, config.swarm.min_peers
        shared, column = (sum(map(layout.wire_bytes, layout.tiles_of(block))) for block in (0, 1))
        sent = 2 * (peers - 1) / peers * shared + owned * column
        point = REPLAYED_BYTES * (layout.model_blocks[0].size + owned * layout.model_blocks[1].size)
        rounds = point / sent / MOST_SHARE
        print(f"| {name} | {sent / 1e9:.2f} | {point / 1e9:.2f} | once in {rounds:.0f} of its rounds |")


def main() -> None:
    arguments = _arguments()
    if arguments.replay:
        replay_costs()
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        config = _config(arguments, Path(name))
        dataset = open_dataset(config)
        peers, judge = Peers(config, dataset, arguments), MemoryJudge(config, dataset)
        found: dict[tuple[str, int, int], list[str]] = {}
        trained_seconds = audited_seconds = 0.0
        for round in range(1, max(arguments.rounds) + 1):
            begin = time.process_time()
            done = peers.round()
            trained_seconds += time.process_time() - begin
            for peer in range(PEERS) if round in arguments.rounds else ():
                lies = lies_of(peers, done, peer) if peer < arguments.lying else {}
                for kind, handed_in in {"honest": done.values[peer][0], **lies}.items():
                    begin = time.process_time()
                    others = [auditor for auditor in range(PEERS) if auditor != peer]
                    others = others if kind == "honest" else others[:AUDITORS_OF_LIES]
                    said = [audited(judge, peers, done, peer, auditor, handed_in) for auditor in others]
                    audited_seconds += time.process_time() - begin
                    found[kind, round, peer] = said
                    print(json.dumps({"kind": kind, "round": round, "peer": peer, "found": said}), flush=True)
    _report(found, trained_seconds / (max(arguments.rounds) * PEERS), audited_seconds, arguments)


def _report(
    found: Mapping[tuple[str, int, int], list[str]], round_seconds: float, seconds: float, given: argparse.Namespace
) -> None:
    print("\n| handed in | passed | failed | nothing shows |\n| --- | --- | --- | --- |")
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        said = Counter(word for (other, _, _), words in found.items() if other == kind for word in words)
        print(f"| {kind} | {said[PASSED]} | {said[FAILED]} | {said['nothing']} |")
    honest = [words for (kind, _, _), words in found.items() if kind == "honest"]
    outcomes = failed_outcomes(honest, random.Random(0))
    print(f"\n{DRAWN:,} audits of honest peers, two of nine auditors lying: {dict(outcomes)}")
    audits = sum(map(len, found.values()))
    trains = COST_OF_TRAINING * SEQUENCES
    print(
        f"an audit took {seconds / audits:.2f} s of CPU time, the {given.steps} steps of a peer's round "
        f"{round_seconds:.2f} s: as long as training on {8 * given.steps * seconds / audits / round_seconds:.0f} "
        f"sequences (reckoned with: {trains:.0f})"
    )


def _config(arguments: argparse.Namespace, folder: Path) -> Config:
    build_stdlib_corpus(folder / "corpus", 2**22)
    tokenize([str(folder / "corpus" / "*.jsonl")], folder / "tokens", TokenizeOptions())
    overrides = (*SMALL, f"data.path={folder / 'tokens'}", f"run.seed={arguments.seed}", *arguments.overrides)
    return load_config(config_path(Path("tiny")), overrides)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[6, 10, 15, 20, 25, 30], help="those that are audited")
    parser.add_argument("--lying", type=int, default=5, help="peers of whose changes lies are made in each of them")
    parser.add_argument("--steps", type=int, default=8, help="in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of who is audited")
    parser.add_argument("--threads", type=int, default=1, help="of who is audited")
    parser.add_argument("--replay", action="store_true", help="count what making steps again would cost, no more")
    parser.add_argument("overrides", nargs="*", default=[], help="after --, such as optimizer.lr=0.001")
    return parser.parse_args()


if __name__ == "__main__":
    main()
