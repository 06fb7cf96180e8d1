"""The model card of an exported model: what it is, and how it was trained. Pure.

The licence is the user's to choose: the header has a comment in its place. A card says which run its model is of, so
that an upload never takes the place of another run's model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spes_p2p import __version__
from spes_p2p.config.load import published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.interop.hf import state_tensors

CARD_FILE = "README.md"
NO_LICENCE = "# license: yours to choose, such as apache-2.0 (then without the # at the beginning)"
_RUN = re.compile(r"^\| run fingerprint \| `([0-9a-f]+)` \|$", re.MULTILINE)
_HEADER = re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)
_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, decentralized-training, spes-p2p]
{licence}
---

# {run_id}

A base language model with a Mixture of Experts, pretrained by peers, without a server, with spes-p2p (the algorithm \
is that of SPES, arXiv 2602.11543).

| | |
| --- | --- |
{rows}

## The run's configuration

```yaml
{config}
```
"""


@dataclass(frozen=True)
class HeldOut:
    """A measured loss of the committed model, nats a token."""

    round: int
    loss: float


@dataclass(frozen=True)
class Facts:
    """What is known of a state besides its values; `tokens`, `peers`, `held_out` None: not known.

    `peers`: how many took part in a round at once, at most, as far as whoever exports has seen it.
    """

    run_id: str
    fingerprint: str
    """Hexadecimal, as the next."""
    state_root: str
    config: Config
    round: int
    step: int
    tokens: int | None
    peers: int | None = None
    held_out: HeldOut | None = None


def model_card(facts: Facts, family: str, dtype: str) -> str:
    """Markdown with the header that the Hugging Face hub reads. `family`: the model's class."""
    config, model, held_out = facts.config, facts.config.model, facts.held_out
    tensors = state_tensors(model)
    total = sum(tensor.size for tensor in tensors)
    experts = sum(tensor.size for tensor in tensors if tensor.column is not None)
    active = total - experts + experts * model.top_k // model.num_experts
    rows = {
        "class": f"{family}, {model.num_layers} layers, {model.num_experts} experts, {model.top_k} per token",
        "parameters": f"{total:,}, of which {active:,} are active per token",
        "values": dtype,
        "training tokens": "unknown" if facts.tokens is None else f"{facts.tokens:,}",
        "held-out loss": "unknown" if held_out is None else f"{held_out.loss:.4f} (round {held_out.round:,})",
        "peers": "unknown" if facts.peers is None else f"up to {facts.peers:,} in a round",
        "rounds, steps": f"{facts.round:,}, {facts.step:,}",
        "sequence length": f"{config.data.sequence_length:,} tokens",
        "run fingerprint": f"`{facts.fingerprint}`",
        "state root": f"`{facts.state_root}`",
        "exported by": f"spes-p2p {__version__}",
    }
    return _CARD.format(
        licence=NO_LICENCE,
        run_id=facts.run_id,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        config=published_yaml(config, for_people=True).rstrip("\n"),
    )


def run_of_card(card: str) -> str | None:
    """The fingerprint of the run whose model a card describes, hexadecimal; None where it is no card of ours."""
    found = _RUN.search(card)
    return found[1] if found else None


def with_licence_of(card: str, older: str) -> str:
    """`card` with what the header of an older card says of the licence, unless it says something itself."""
    said, mine = _licence(older), _HEADER.match(card)
    if not said or mine is None or _licence(card):
        return card
    header = mine[1].replace(f"{NO_LICENCE}\n", "")
    return f"---\n{header}{said}---{card[mine.end() :]}"


def _licence(card: str) -> str:
    """The lines of its header that say so, such as `license: other` and `license_name: ...`."""
    header = _HEADER.match(card)
    lines = header[1].splitlines(keepends=True) if header else []
    return "".join(line for line in lines if line.startswith("license"))
