"""The model card of an exported model: what it is, how it was trained, how the losses went."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spes_p2p import __version__
from spes_p2p.config.load import published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.interop.hf import state_tensors
from spes_p2p.observe.events import Eval, Event, Round, Step

MOST_ROWS = 24
"""Of the table of losses."""


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


@dataclass(frozen=True)
class Facts:
    """What is known of a state besides its values; `tokens` None: not known."""

    run_id: str
    fingerprint: str
    """Hexadecimal, as the next."""
    state_root: str
    config: Config
    round: int
    step: int
    tokens: int | None
    curve: tuple[CurvePoint, ...] = ()


def curve_of(events: Iterable[Event]) -> tuple[CurvePoint, ...]:
    """One point a round, from the events of one peer in their order. An eval comes after its round."""
    points: list[CurvePoint] = []
    losses: list[float] = []
    tokens = 0
    for event in events:
        if isinstance(event, Step):
            losses.append(event.loss)
        elif isinstance(event, Round):
            tokens += event.tokens - event.lost_tokens
            mean = sum(losses) / len(losses) if losses else None
            points.append(CurvePoint(event.round, event.step, tokens, mean, None))
            losses.clear()
        elif isinstance(event, Eval) and points and points[-1].round == event.round:
            last = points.pop()
            points.append(CurvePoint(last.round, last.step, last.tokens, last.trained, event.loss))
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
        published_yaml(config).rstrip("\n"),
        "```",
        "",
    ]
    return "\n".join(lines)


def _curve_lines(curve: Sequence[CurvePoint]) -> list[str]:
    if not curve:
        return []
    rows = [
        f"| {point.round:,} | {point.step:,} | {point.tokens:,} | {_loss(point.trained)} | {_loss(point.held_out)} |"
        for point in _thinned(curve)
    ]
    return [
        "## Losses",
        "",
        "Cross entropy in nats per token, as the exporting peer saw it: its training loss since the previous row, and "
        "the held-out loss of the committed model if it measured one.",
        "",
        "| round | step | tokens | training loss | held-out loss |",
        "| --- | --- | --- | --- | --- |",
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
        last = some[-1]
        rows.append(CurvePoint(last.round, last.step, last.tokens, mean, held_out[-1] if held_out else None))
    return rows


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
