"""A model and a loss of one's own, trained by a swarm of two processes, each with a folder of its own:

    python docs/own_model.py organise FOLDER
    python docs/own_model.py join FOLDER ADDRESS

The organiser makes the data, the other one gets it from the swarm. It begins with two peers and ends after two rounds.
As it stands both run on one machine: for two machines change HOST, and run the same Python and this same file on both.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import spes_p2p
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.events import Eval, Round
from spes_p2p.observe.text import line

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
HOST = ("/ip4/127.0.0.1/tcp/0",)  # for several machines ("/ip4/0.0.0.0/tcp/0",)


def make_tokens(folder: Path) -> Path:
    """Of the organiser alone: the standard library of another Python version would give other tokens."""
    files = build_stdlib_corpus(folder / "corpus", max_bytes=400_000)
    tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))
    return folder / "tokens"


def train(folder: Path, address: str, tokens: Path | None = None) -> None:
    """Without `tokens` they come from the swarm."""
    peer = spes_p2p.Peer(address, folder / "peer", HOST, data=tokens, until_round=2, device="cpu", model=MODEL)
    peer.train(lambda event: print(line(event), flush=True) if isinstance(event, (Round, Eval)) else None)
    module = peer.load()  # an ordinary torch module again
    print("trained:", sum(parameter.numel() for parameter in module.parameters()), "values", flush=True)


def main(role: str, folder: Path, address: str = "") -> None:
    if role == "join":
        train(folder, address)
        return
    tokens = make_tokens(folder)
    run = spes_p2p.Run("tiny", *SETTINGS, model=MODEL)
    with run.bootstrap(folder / "bootstrap", tokens, HOST) as address:
        print("others join with the address", address, flush=True)
        train(folder, address, tokens)


if __name__ == "__main__":
    if len(sys.argv) != {"organise": 3, "join": 4}.get("".join(sys.argv[1:2])):
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
