"""What a peer says of itself in the DHT, beside what it says to the others: its record, and its newest certificate."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p import __version__
from spes_p2p.consensus.messages import Commit
from spes_p2p.data.held import Held
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Error, Eval, Event, ExpertLoad, Round, Step, Warning
from spes_p2p.observe.metrics import Ema
from spes_p2p.ownership.assign import columns_of
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.data_supply import DataSupply
from spes_p2p.peer.phases import phase_of
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.records import MAX_ADDRESSES, MAX_SPEED, PeerRecord
from spes_p2p.swarm.vitals import (
    LEAVING,
    LEFT,
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
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.driver import Driver

_DEVICE_CHARACTERS = 64
_FOLDERS = re.compile(r"(?<![\w/.:])~?/(?:[^/\s'\":;,]+/)+")
"""Those of an absolute path, up to its last part."""


class VitalsKeeper:
    """A peer's vitals, folded from its own events: what its record in the DHT tells those who watch.

    A sink of the event bus. `now` may be called from any thread: values are replaced as a whole.
    """

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
                self._vitals = replace(self._vitals, loss=self._loss.add(loss) or 0.0)
            case Round():
                self._write_round(time, event)
            case Eval():
                loss = _bounded(event.loss, MAX_LOSS)
                self._vitals = replace(self._vitals, held_out_round=event.round, held_out_loss=loss)
            case ExpertLoad():
                self._load = event if len(event.mean) <= MAX_EXPERTS else None
            case Warning() | Error():
                if message := shareable(event.message):
                    before = tuple(warning for warning in self._vitals.warnings if warning.message != message)
                    new = PeerWarning(time, event.event, message)
                    self._vitals = replace(self._vitals, warnings=(*before, new)[-MAX_WARNINGS:])

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


@dataclass
class Progress:
    """What came of this peer's training since its start. Written by the training thread, but for `counted_tokens`: what
    rounds have counted, less what was left with a history."""

    step: int = 0
    tokens: int = 0
    counted_tokens: int = 0
    tokens_per_second: float = 0.0


@dataclass(eq=False)
class Presence:
    """What the Announcer speaks for, on the network's loop."""

    _run_id: str
    _network: HivemindNetwork
    _contacts: Contacts
    _data: DataSupply
    _is_paused: Callable[[], bool]
    _is_leaving: Callable[[], bool]
    _token: bytes = b""

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.vitals = VitalsKeeper()
        self.has_left = False
        self._joined_at = int(time.time())
        self._driver: Driver | None = None
        self._chain: Chain | None = None
        self._tip: tuple[Commit, float] | None = None

    def begin(self, driver: Driver, chain: Chain) -> None:
        """The peer takes part from now on."""
        self._driver, self._chain = driver, chain

    def newest(self) -> tuple[Commit, float] | None:
        """The newest commit here, and when it came."""
        if self._driver is None or self._chain is None or (commit := self._driver.core.state.own.commit) is None:
            return None
        if self._tip is None or self._tip[0] is not commit:  # its file goes before it does, where another history won
            self._tip = commit, self._chain.received_of(commit.manifest) or time.time()
        return self._tip

    def acquaintances(self) -> tuple[PeerId, ...]:
        """Whom this peer knows apart from the DHT."""
        return tuple(self._driver.core.state.others.contacts) if self._driver is not None else ()

    def learnt(self, known: Mapping[PeerId, PeerRecord]) -> None:
        """Who is in the DHT and no member of ours hears from us: it may stand on another history of the run."""
        if self._driver is not None:
            self._driver.greet(peer for peer in known if peer != self._network.signer.peer_id)
        self._contacts.learnt(known.values())

    def describe(self) -> PeerRecord:
        """The record of now."""
        me, core = self._network.signer.peer_id, self._driver.core if self._driver else None
        is_member = core is not None and core.state.is_member()
        return PeerRecord(
            run_id=self._run_id,
            peer=me,
            addresses=() if self._network.client_mode else self._network.transport.addresses[:MAX_ADDRESSES],
            version=__version__,
            round=core.tip.round if core else 0,
            step=self.progress.step,
            tokens=self.progress.tokens,
            tokens_per_second=min(self.progress.tokens_per_second, MAX_SPEED),
            owned=columns_of(core.tip.ownership, me) if core and is_member else (),
            role="peer",
            client_mode=self._network.client_mode,
            joined_at_seconds=self._joined_at,
            data_pieces=self._data.pieces if core else 0,
            held=self._data.held() if core else Held(),
            vitals=self.vitals.now(self._phase()),
            token=self._token,
        )

    def _phase(self) -> str:
        if self.has_left or self._is_leaving():
            return LEFT if self.has_left else LEAVING
        if self._is_paused():
            return "paused"
        core = self._driver.core if self._driver is not None else None
        return phase_of(core.state.round) if core is not None and core.state.is_member() else "waiting"
