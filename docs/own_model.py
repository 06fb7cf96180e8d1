"""A model and a loss of one's own, trained by a swarm. On the first machine, then on each other one:

    python docs/own_model.py organise FOLDER
    python docs/own_model.py join FOLDER ADDRESS

Two peers are enough for it to begin (both may run on one machine, with a folder each); it ends after two rounds.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import spes_p2p
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.events import Eval, Round

EXPERTS = 4
WIDTH = 32


class Words(nn.Module):
    """What follows a byte, by four experts that a gate mixes: any torch module would do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        weights = self.gate(hidden).softmax(-1).unsqueeze(-2)
        return self.head(hidden + (outputs * weights).sum(-1).relu())


def next_byte(module: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of token sequences [B, S]."""
    logits = module(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def column_of(name: str) -> int | None:
    """experts.3.weight is of expert column 3, gate.weight is shared."""
    return int(name.split(".")[1]) if name.startswith("experts.") else None


MODEL = spes_p2p.Model(Words, next_byte, column_of)
SETTINGS = (
    "data.sequence_length=64",
    "optimizer.lr=0.01",
    "sync.steps_per_round=20",
    "sync.merge_alpha=0",  # merging compares experts of our own model
    "swarm.experts_per_peer=2",
    "swarm.min_peers=2",
)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)  # leave it out where the machines are several


def make_tokens(folder: Path) -> Path:
    """Every machine needs the same token shards."""
    files = build_stdlib_corpus(folder / "corpus", max_bytes=400_000)
    tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def train(folder: Path, tokens: Path, address: str) -> None:
    peer = spes_p2p.Peer(address, folder / "peer", LOOPBACK, data=tokens, rounds=2, device="cpu", model=MODEL)
    peer.train(lambda event: print(event, flush=True) if isinstance(event, (Round, Eval)) else None)
    module = peer.load()  # an ordinary torch module again
    print("trained:", sum(parameter.numel() for parameter in module.parameters()), "values", flush=True)


def main(role: str, folder: Path, address: str = "") -> None:
    tokens = make_tokens(folder)
    if role == "join":
        train(folder, tokens, address)
        return
    run = spes_p2p.Run("tiny", *SETTINGS, model=MODEL)
    with run.bootstrap(folder / "bootstrap", tokens, LOOPBACK) as address:
        print("others join with the address", address, flush=True)
        train(folder, tokens, address)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
