"""The model card of an exported model: what it is, how it was trained, how the losses went. Pure.

The licence is the user's to choose: the header has a comment in its place. A card says which run its model is of, so
that an upload never takes the place of another run's model.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spes_p2p import __version__
from spes_p2p.config.load import published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.interop.hf import state_tensors
from spes_p2p.observe.events import Eval, Event, Round, Step

CARD_FILE = "README.md"
MOST_ROWS = 24
"""Of the table of losses."""
NO_LICENCE = "# license: yours to choose, such as apache-2.0 (then without the # at the beginning)"
_RUN = re.compile(r"^\| run fingerprint \| `([0-9a-f]+)` \|$", re.MULTILINE)
_HEADER = re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CurvePoint:
    """Losses in nats a token, as one peer saw them; None where it has none since the point before."""

    round: int
    step: int
    tokens: int
    """Counted by the rounds that this peer saw, all peers together."""
    trained: float | None
    """Mean over this peer's inner steps since the point before."""
    held_out: float | None
    peers: int = 0
    """In the roster of the round; at most, where a point stands for several."""


@dataclass(frozen=True)
class Facts:
    """What is known of a state besides its values; `tokens`, `peers` None: not known.

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
    curve: tuple[CurvePoint, ...] = ()
    peers: int | None = None


def curve_of(events: Iterable[Event]) -> tuple[CurvePoint, ...]:
    """One point a round, from the events of one peer in their order. An eval comes after its round.

    Older versions wrote an event of a step that was skipped, too: losses that are not finite are left out.
    """
    points: list[CurvePoint] = []
    losses: list[float] = []
    tokens = 0
    for event in events:
        if isinstance(event, Step):
            if math.isfinite(event.loss):
                losses.append(event.loss)
        elif isinstance(event, Round):
            tokens += event.tokens - event.lost_tokens
            mean = sum(losses) / len(losses) if losses else None
            points.append(CurvePoint(event.round, event.step, tokens, mean, None, event.roster_size))
            losses.clear()
        elif isinstance(event, Eval) and points and points[-1].round == event.round:
            points.append(replace(points.pop(), held_out=event.loss))
    return tuple(points)


def model_card(facts: Facts, family: str, dtype: str) -> str:
    """Markdown with the header that the Hugging Face hub reads. `family`: the model's class."""
    config, model = facts.config, facts.config.model
    tensors = state_tensors(model)
    total = sum(tensor.size for tensor in tensors)
    experts = sum(tensor.size for tensor in tensors if tensor.column is not None)
    active = total - experts + experts * model.top_k // model.num_experts
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [mixture-of-experts, decentralized-training, spes-p2p]",
        NO_LICENCE,
        "---",
        "",
        f"# {facts.run_id}",
        "",
        "A base language model with a Mixture of Experts, pretrained by peers, without a server, with spes-p2p "
        "(the algorithm is that of SPES, arXiv 2602.11543).",
        "",
        "| | |",
        "| --- | --- |",
        f"| class | {family}, {model.num_layers} layers, {model.num_experts} experts, {model.top_k} per token |",
        f"| parameters | {total:,}, of which {active:,} are active per token |",
        f"| values | {dtype} |",
        f"| training tokens | {'unknown' if facts.tokens is None else f'{facts.tokens:,}'} |",
        f"| peers | {'unknown' if facts.peers is None else f'up to {facts.peers:,} in a round'} |",
        f"| rounds, steps | {facts.round:,}, {facts.step:,} |",
        f"| sequence length | {config.data.sequence_length:,} tokens |",
        f"| run fingerprint | `{facts.fingerprint}` |",
        f"| state root | `{facts.state_root}` |",
        f"| exported by | spes-p2p {__version__} |",
        "",
        *_curve_lines(facts.curve),
        "## The run's configuration",
        "",
        "```yaml",
        published_yaml(config, for_people=True).rstrip("\n"),
        "```",
        "",
    ]
    return "\n".join(lines)


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


def _curve_lines(curve: Sequence[CurvePoint]) -> list[str]:
    if not curve:
        return []
    rows = [
        f"| {point.round:,} | {point.step:,} | {point.tokens:,} | {point.peers:,} "
        f"| {_loss(point.trained)} | {_loss(point.held_out)} |"
        for point in _thinned(curve)
    ]
    return [
        "## Losses",
        "",
        "Cross entropy in nats per token, as the exporting peer saw it: its training loss since the previous row, and "
        "the held-out loss of the committed model if it measured one.",
        "",
        "| round | step | tokens | peers | training loss | held-out loss |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _thinned(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Evenly chosen points, the first and the last among them; means are over all that a row stands for."""
    parts = min(len(curve), MOST_ROWS)
    ends = [(at + 1) * len(curve) // parts for at in range(parts)]
    rows = []
    for start, end in itertools.pairwise([0, *ends]):
        some = curve[start:end]
        trained = [point.trained for point in some if point.trained is not None]
        held_out = [point.held_out for point in some if point.held_out is not None]
        mean = sum(trained) / len(trained) if trained else None
        peers = max(point.peers for point in some)
        rows.append(replace(some[-1], trained=mean, held_out=held_out[-1] if held_out else None, peers=peers))
    return rows


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
