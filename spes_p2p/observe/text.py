"""Events as lines that people read, and as flat numbers that dashboards plot."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from spes_p2p.ids import short
from spes_p2p.observe import events as on
from spes_p2p.observe.metrics import amount_text, bytes_texts, count_text, seconds_text, span_text

NAME = "spes-p2p"
CALLED_AS = "SPES_CALLED_AS"
"""How this program was called, where its own name is not on the PATH: set by scripts/spes-p2p.sh."""
_COMMAND = re.compile(rf"(?<![\w/.-]){NAME} (?=[a-z-])")


def to_type(text: str) -> str:
    """The same text with commands for this machine as they can be typed here: as this one was."""
    return _COMMAND.sub(lambda found: f"{_called_as()} ", text)


def _called_as() -> str:
    if (name := os.environ.get(CALLED_AS)) is not None:
        return name
    is_program = Path(sys.argv[0]).name == NAME
    return sys.argv[0] if is_program and shutil.which(NAME) is None else NAME


_PASSIVE = {"lost": "was dropped", "banned": "was banned"}


def line(event: on.Event) -> str:
    """One line of text for one event, with commands as they can be typed here."""
    return to_type(_line(event))


def _line(event: on.Event) -> str:
    match event:
        case on.Step():
            return (
                f"step {event.step}  loss {event.loss:.4f}  {count_text(event.tokens_per_second)} tokens/s  "
                f"lr {event.lr:.2e}  grad norm {event.grad_norm:.2f}"
            )
        case on.Round():
            return _round_line(event)
        case on.ExpertLoad():
            return _load_line(event)
        case on.Peer():
            return f"{peer_text(event)} (round {event.round})"
        case on.Columns():
            return f"this peer owns columns {span_text(event.adopted)} from round {event.round} on"
        case on.Pause():
            return f"paused: {event.why}" if event.paused else "training resumes"
        case on.Eval():
            return f"eval at step {event.step} (round {event.round}): held-out loss {event.loss:.4f}"
        case on.Note():
            return event.message
        case on.Warning():
            return f"warning: {event.message}"
        case on.Error():
            return f"error: {event.message}" + (f" / fix: {event.fix}" if event.fix else "")


def peer_text(event: on.Peer) -> str:
    """Who came or went, in words."""
    if not event.own:
        return f"peer {short(event.who)} {event.change}"
    return f"this peer {_PASSIVE.get(event.change, event.change)}"


def share_text(share: float) -> str:
    """How much of what a stranger gave counted, from 0 to 1; where it is nothing, why."""
    return f"{share:.0%}" if share else "0% (it points another way than the trusted peers' mean)"


def _round_line(event: on.Round) -> str:
    training = event.seconds.get("train", 0.0)
    synced = f"synced in {seconds_text(sum(event.seconds.values()) - training)}"
    without = " (without this peer)" if event.own_tokens == 0 and event.roster_size else ""
    parts = [
        f"round {event.round} {event.commit} at step {event.step}: {amount_text(event.roster_size, 'peer')}{without}",
        f"{count_text(event.tokens)} tokens",
        "{} sent, {} received".format(*bytes_texts(event.bytes_sent, event.bytes_received)),
        synced if not event.own_tokens and not training else f"trained for {seconds_text(training)}, {synced}",
        f"deadline {seconds_text(event.deadline_seconds)}",
        f"model {event.model_hash[:10]}",
    ]
    if event.own_share >= 0:
        parts.append(f"{share_text(event.own_share)} of what this peer gave counted")
    if event.merge_alpha:
        parts.append(f"merged with alpha {event.merge_alpha:.3g}")
    if event.stale_columns:
        parts.append(f"stale columns {span_text(event.stale_columns).replace(',', ', ')}")
    if event.refused:
        parts.append(f"values refused from {', '.join(short(peer) for peer in event.refused)}")
    if event.lost_tokens:
        parts.append(f"{count_text(event.lost_tokens)} tokens lost to another history")
    return ", ".join(parts)


def _load_line(event: on.ExpertLoad) -> str:
    text = (
        f"experts got {min(event.mean, default=0):.2f} to {max(event.mean, default=0):.2f} of an even share of tokens, "
        f"within a layer {min(event.lowest, default=0):.2f} to {max(event.highest, default=0):.2f}"
    )
    dead = tuple(expert for expert, load in enumerate(event.highest) if not load)
    return f"{text}; nothing went to {span_text(dead)}" if dead else text


def scalars(event: on.Event) -> tuple[int, dict[str, float]]:
    """(global step, name to number) of what a dashboard plots; no numbers for events that are only text."""
    match event:
        case on.Step():
            return event.step, {
                "train/loss": event.loss,
                "train/lr": event.lr,
                "train/grad_norm": event.grad_norm,
                "speed/tokens_per_second": event.tokens_per_second,
            }
        case on.Round():
            return event.step, {
                "round/number": event.round,
                "round/roster_size": event.roster_size,
                "round/renewal": float(event.commit == "renewal"),
                "round/tokens": event.tokens,
                "round/bytes_sent": event.bytes_sent,
                "round/bytes_received": event.bytes_received,
                "round/merge_alpha": event.merge_alpha,
                "round/stale_columns": len(event.stale_columns),
                "round/deadline_seconds": event.deadline_seconds,
                **{f"seconds/{phase}": seconds for phase, seconds in event.seconds.items()},
            }
        case on.ExpertLoad():
            return event.step, {
                "experts/highest_load": max(event.mean, default=0.0),
                "experts/lowest_load": min(event.mean, default=0.0),
                "experts/highest_load_in_a_layer": max(event.highest, default=0.0),
                "experts/lowest_load_in_a_layer": min(event.lowest, default=0.0),
            }
        case on.Eval():
            return event.step, {"eval/loss": event.loss}
        case _:
            return 0, {}
