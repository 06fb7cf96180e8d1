"""A peer's vitals, folded from its own events: what its record in the DHT tells those who watch.

A sink of the event bus; read by the network's thread. Decides nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from spes_p2p.observe.events import Error, Eval, Event, ExpertLoad, Round, Step, Warning
from spes_p2p.observe.metrics import Ema
from spes_p2p.swarm.vitals import (
    MAX_BYTES,
    MAX_EXPERTS,
    MAX_LOAD_PERCENT,
    MAX_LOSS,
    MAX_SECONDS,
    MAX_WARNING_CHARACTERS,
    MAX_WARNINGS,
    PHASES,
    PeerWarning,
    Vitals,
)

_DEVICE_CHARACTERS = 64
_FOLDERS = re.compile(r"(?<![\w/.:])~?/(?:[^/\s'\":;,]+/)+")
"""Those of an absolute path, up to its last part."""


class VitalsKeeper:
    """`now` may be called from any thread: values are replaced as a whole."""

    def __init__(self) -> None:
        self._vitals = Vitals()
        self._loss = Ema()
        self._losses: list[float] = []
        self._load: ExpertLoad | None = None

    def set_device(self, name: str) -> None:
        """What of `name` may stand in a record."""
        plain = "".join(sign for sign in name if " " <= sign <= "~")
        self._vitals = replace(self._vitals, device=plain[:_DEVICE_CHARACTERS])

    def now(self, phase: str) -> Vitals:
        return replace(self._vitals, phase=phase)

    def write(self, time: float, event: Event) -> None:
        match event:
            case Step():
                loss = _bounded(event.loss, MAX_LOSS)
                self._losses.append(loss)
                self._vitals = replace(self._vitals, loss=self._loss.add(loss))
            case Round():
                self._write_round(time, event)
            case Eval():
                loss = _bounded(event.loss, MAX_LOSS)
                self._vitals = replace(self._vitals, held_out_round=event.round, held_out_loss=loss)
            case ExpertLoad():
                self._load = event if len(event.mean) <= MAX_EXPERTS else None
            case Warning() | Error():
                self._write_warning(time, event)

    def close(self) -> None:
        """There is nothing to close."""

    def _write_round(self, time: float, event: Round) -> None:
        losses, self._losses = self._losses, []
        load, self._load = self._load, None
        sent = event.bytes_sent + event.data_bytes_sent
        received = event.bytes_received + event.data_bytes_received
        self._vitals = replace(
            self._vitals,
            timed_round=event.round,
            applied_at_seconds=time,
            phase_seconds=tuple(_bounded(event.seconds.get(phase, 0.0), MAX_SECONDS) for phase in PHASES),
            round_loss=math.fsum(losses) / len(losses) if losses else 0.0,
            bytes_sent=min(MAX_BYTES, self._vitals.bytes_sent + sent),
            bytes_received=min(MAX_BYTES, self._vitals.bytes_received + received),
            load_percent=_percents(load.mean) if load else (),
            highest_load_percent=_percents(load.highest) if load else (),
            lowest_load_percent=_percents(load.lowest) if load else (),
        )

    def _write_warning(self, time: float, event: Warning | Error) -> None:
        if message := shareable(event.message):
            before = tuple(warning for warning in self._vitals.warnings if warning.message != message)
            new = PeerWarning(time, event.event, message)
            self._vitals = replace(self._vitals, warnings=(*before, new)[-MAX_WARNINGS:])


def shareable(message: str) -> str:
    """`message` made safe for strangers, on one short line: paths on this machine are cut to their last part."""
    without = _FOLDERS.sub("…/", message.replace(str(Path.home()), "~"))
    plain = "".join(sign if sign.isprintable() else " " for sign in without)
    short = " ".join(plain.split())
    return short if len(short) <= MAX_WARNING_CHARACTERS else f"{short[: MAX_WARNING_CHARACTERS - 1]}…"


def _percents(loads: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(round(100 * _bounded(load, MAX_LOAD_PERCENT / 100)) for load in loads)


def _bounded(value: float, most: float) -> float:
    """`value`, at most `most`; also `most` if it is not finite, so that this shows."""
    return min(max(0.0, value), most) if math.isfinite(value) else most
