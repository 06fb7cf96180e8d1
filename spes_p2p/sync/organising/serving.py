"""The bootstrap node's own place among the members: it reduces, holds, votes and leads, and trains nothing.

So it can be the public peer through which peers behind NAT exchange everything. It runs the same driver as every peer,
on the disk of the bootstrap node, where the initial state stays for who needs it. Genesis, and what becomes of a run
that nobody carries on, are others' business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from spes_p2p.config.schema import Config
from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Intent, Sealer
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.errors import NetworkError, StateError, StorageFull
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.files import storing
from spes_p2p.ids import PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob, Clock, Signer, Transport, Verifier
from spes_p2p.sync.chain import Chain, VoteBook, wall_clock_microseconds
from spes_p2p.sync.driver import Applied, Arithmetic, Disk, Driver
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.joining import Joining, Sources, rules_of
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.sealing import EnvelopeChecker

HELD_BYTES = 2**28
"""What contributions may take of memory here; a trainer allows itself more."""
INITIAL = frozenset({0})
RETRY_BEATS = 10


class Server:
    """`take_seat` once the run has begun; `driver` is there from then on. Hooks of the driver."""

    def __init__(
        self,
        info: RunInfo,
        config: Config,
        layout: Layout,
        folder: Path,
        transport: Transport,
        signer: Signer,
        verifier: Verifier,
        sealer: Sealer,
        chain: Chain,
        store: StateStore,
        clock: Clock,
        say: Callable[[str], None],
        failed: Callable[[BaseException], None],
        sources: Sources,
        max_upload: float | None = None,
        new_incarnation: Callable[[], int] = wall_clock_microseconds,
        first_sequence: int = 0,
        data: Callable[[DataRequest], Blob] | None = None,
    ) -> None:
        """`folder` holds votes and residuals beside `chain` and `store`; `failed` hears of what ends this node.

        `max_upload`: bytes a second, which the others are told. `sources` finds peers that may be asked. `data` answers
        what is asked of the run's data, where it is here.
        """
        self._info = info
        self._config = config
        self._layout = layout
        self._folder = folder
        self._transport = transport
        self._sealer = sealer
        self._checker = EnvelopeChecker(verifier)
        self._chain = chain
        self._store = store
        self._clock = clock
        self._say = say
        self._failed = failed
        self._sources = sources
        self._first_sequence = first_sequence
        self._data = data
        self._votes = VoteBook(folder / "votes", new_incarnation)
        self._joining = Joining(
            info, config, layout, folder, transport, signer, verifier, sealer, say, new_incarnation
        )  # fmt: skip
        self._intent = Intent(joining=True, serving=True, uplink_bytes_per_second=int(max_upload or 0))
        self._moved: Callable[[], None] = lambda: None
        self._gone = asyncio.Event()
        self._said = ""
        self.driver: Driver | None = None

    @property
    def member(self) -> Member:
        """As genesis names this node."""
        return Member(self._transport.peer_id, self._votes.incarnation, True, self._intent.link_class, trains=False)

    async def take_seat(self, moved: Callable[[], None]) -> None:
        """Makes the state here whole and takes part; `moved` is called after each commit.

        Tries again where nobody gives what is missing; this node serves no worse meanwhile.
        """
        self._moved = moved
        while self.driver is None:
            try:
                await self._begin()
            except (NetworkError, StateError, StorageFull) as error:
                self._say_once(f"this node cannot serve yet: {error}")
                await asyncio.sleep(RETRY_BEATS * self._config.swarm.heartbeat_seconds)

    async def _begin(self) -> None:
        place = await self._joining.settle(self._store, self._chain, self._votes, self._sources)
        identity = Identity(
            self._transport.peer_id, rules_of(self._config, self._info, self._layout), self._sealer, self._checker.check
        )
        start = Start(
            place.votes.incarnation, place.tip.manifest, place.tip, place.votes.record, self._intent,
            self._first_sequence, seeds=tuple(await self._sources()),
        )  # fmt: skip
        core = Consensus.begin(identity, start, Pace(self._config.swarm.heartbeat_seconds), self._clock.now())
        with storing(self._folder, 0):
            inputs = Inputs(self._folder / "inputs", self._layout)
            residuals = Residuals(self._folder / "residuals", self._layout)
        driver = Driver(
            core, self._info, self._transport, self._checker,
            Disk(place.store, place.chain, place.votes, inputs, residuals, data=self._data),
            Arithmetic(self._layout, self._config.sync.merge_top_k),
            self, self._clock, held_bytes=HELD_BYTES,
        )  # fmt: skip
        await driver.start()
        self.driver = driver
        self._moved()

    def greet(self, known: Iterable[PeerId]) -> None:
        """Who is in the DHT and no member hears from us too."""
        if self.driver is not None:
            self.driver.greet(known)

    async def leave(self, seconds: float) -> None:
        """Waits, no longer than so, for a manifest that does without this node."""
        if self.driver is None or not self.driver.core.state.is_member():
            return
        self.driver.wish(replace(self._intent, leaving=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()

    async def stop(self) -> None:
        if self.driver is not None:
            await self.driver.stop()

    # ---- Hooks of the driver ----

    def close_training(self) -> None:
        """Nothing is trained here, and so it is always READY."""

    def applied(self, event: Applied) -> None:
        if self.driver is not None and not self.driver.core.state.is_member():
            self._gone.set()
        self._moved()

    def rounds_in_use(self) -> frozenset[int]:
        return INITIAL

    def notice(self, notice: Notice) -> None:
        self._say_once(f"{notice.text} ({notice.kind})")

    def failed(self, error: BaseException) -> None:
        self._failed(error)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)
