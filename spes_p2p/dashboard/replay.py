"""A past run, from the `metrics.jsonl` of one or more of its peers.

Peers are named after the folders of their files. Who owned which experts is not in the file, nor what was trained by
peers whose file is not given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.dashboard.history import SLOT_SECONDS, History, Load
from spes_p2p.errors import ConfigError
from spes_p2p.ids import short
from spes_p2p.observe import events as on
from spes_p2p.observe.sinks import METRICS_FILE, EventReader
from spes_p2p.observe.text import line
from spes_p2p.observe.view import PeerView
from spes_p2p.swarm.vitals import PHASES


def replay(paths: Sequence[Path], history: History) -> None:
    """Writes the events of these files into `history`. Raises ConfigError if one is missing or holds no events."""
    events: list[tuple[float, str, on.Event]] = []
    for name, path in zip(_names(paths), map(_file, paths)):
        found = EventReader(path).read()
        if not found:
            raise ConfigError(f"{path} contains no events", fix=f"give the {METRICS_FILE} of a peer, or its folder")
        events += [(time, name, event) for time, event in found]
    with history.writing():
        folds: dict[str, _Fold] = {}
        for time, name, event in sorted(events, key=lambda one: one[0]):
            folds.setdefault(name, _Fold(name, history)).apply(time, event)
        for fold in folds.values():
            fold.end()
        history.put("replay", {"files": [str(path) for path in paths], "peers": sorted(folds)})


def _file(path: Path) -> Path:
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", fix=f"give the {METRICS_FILE} of a peer, or its folder")
    return path


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with a number where several are alike."""
    names = [path.resolve().name if path.is_dir() else path.resolve().parent.name for path in paths]
    return [f"{name} {at + 1}" if names.count(name) > 1 else name for at, name in enumerate(names)]


class _Fold:
    """One peer's events, in their order."""

    def __init__(self, name: str, history: History) -> None:
        self._name, self._history = name, history
        self._view = PeerView()
        self._losses: list[float] = []
        self._loads: list[on.ExpertLoad] = []
        self._trained = self._round_trained = self._sent = self._received = 0
        self._first = self._last = self._slot = 0.0

    def apply(self, time: float, event: on.Event) -> None:
        self._first, self._last = self._first or time, time
        self._view.apply(time, event)
        match event:
            case on.Step():
                self._apply_step(time, event)
            case on.Round():
                self._apply_round(time, event)
            case on.ExpertLoad():
                self._loads.append(event)
            case on.Eval():
                self._history.add_held_out(round=event.round, at=time, loss=event.loss, peer=self._name)
            case on.Peer():
                self._note(time, event.change, f"{short(event.who)} {event.change} (round {event.round})")
            case on.Columns() | on.Pause() | on.Note() | on.Warning() | on.Error():
                kind = "experts" if isinstance(event, on.Columns) else event.event
                self._note(time, kind, f"{self._name}: {line(event)}")

    def end(self) -> None:
        """What the page shows of the peer, as of its last event."""
        view = self._view
        self._history.set_peer(
            self._name,
            {
                "state": "replay", "version": "", "round": view.round, "step": view.step, "tokens": self._trained,
                "tokens_per_second": view.tokens_per_second.value or 0.0, "owned": [], "seen_at": self._last,
                "joined_at": self._first, "reach": "", "phase": "", "device": "", "loss": view.smooth_loss.value,
                "sent": self._sent, "received": self._received,
            },
        )  # fmt: skip

    def _note(self, time: float, kind: str, message: str) -> None:
        self._history.add_event(time, kind, self._name, message)

    def _apply_step(self, time: float, event: on.Step) -> None:
        if math.isfinite(event.loss):  # older versions wrote an event of a step that was skipped, too
            self._losses.append(event.loss)
        self._trained += event.tokens
        self._round_trained += event.tokens
        if time - self._slot >= SLOT_SECONDS / 2:  # a slot takes one; the last one of a run is not worth a row
            self._slot = time
            total = self._history.rows("SELECT MAX(tokens) FROM rounds")[0][0] or 0
            self._history.add_sample(
                peer=self._name, at=time, loss=self._view.smooth_loss.value,
                tokens_per_second=self._view.tokens_per_second.value, sent=self._sent,
                received=self._received, tokens=total,
            )  # fmt: skip

    def _apply_round(self, time: float, event: on.Round) -> None:
        self._sent += event.bytes_sent + event.data_bytes_sent
        self._received += event.bytes_received + event.data_bytes_received
        known = self._history.rows("SELECT name FROM rounds WHERE round = ?", (event.round,))
        if not known:
            self._add_round(time, event)
        loads, self._loads = self._loads, []
        for load in loads[-1:]:
            parts = Load(load.mean, load.highest, load.lowest)
            self._history.add_load(event.round, self._name, time, load.tokens, parts)
        losses, self._losses = self._losses, []
        trained, self._round_trained = self._round_trained, 0
        self._history.add_peer_round(
            round=event.round, peer=self._name, at=time,
            seconds=[event.seconds.get(phase, 0.0) for phase in PHASES],
            loss=sum(losses) / len(losses) if losses else None, tokens=trained,
        )  # fmt: skip

    def _add_round(self, time: float, event: on.Round) -> None:
        before = self._history.rows("SELECT MAX(tokens) FROM rounds WHERE round < ?", (event.round,))[0][0] or 0
        self._history.add_round(
            round=event.round, name=event.model_hash, at=time, kind=event.commit, step=event.step,
            tokens=before + event.tokens, round_tokens=event.tokens, roster=event.roster_size,
            members=event.roster_size, alpha=event.merge_alpha, stale=len(event.stale_columns),
        )  # fmt: skip
        if event.commit == "renewal":
            self._note(time, "renewal", f"round {event.round} is a renewal, by the organiser's key")
        head = {
            "round": event.round, "step": event.step, "tokens": before + event.tokens, "certificate": "",
            "renewal": event.commit == "renewal", "checked": False, "seals": 0, "electors": 0,
            "model_hash": event.model_hash, "at": time, "stale": list(event.stale_columns), "columns": [],
        }  # fmt: skip
        self._history.put("head", head)
