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

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Intent
from spes_p2p.errors import NetworkError, StateError, StorageFull
from spes_p2p.ids import PeerId
from spes_p2p.sync.chain import VoteBook
from spes_p2p.sync.composition import Role, build_driver, open_disk
from spes_p2p.sync.driver import Applied, Driver
from spes_p2p.sync.joining import Joining
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.starting import Sources

HELD_BYTES = 2**28
"""What contributions may take of memory here; a trainer allows itself more."""
INITIAL = frozenset({0})
RETRY_BEATS = 10


class Server:
    """`take_seat` once the run has begun; `driver` is there from then on. Hooks of the driver."""

    def __init__(
        self,
        run: Run,
        node: Node,
        files: RunFiles,
        sources: Sources,
        failed: Callable[[BaseException], None],
        max_upload: float | None = None,
    ) -> None:
        """`failed` hears of what ends this node.

        `max_upload`: bytes a second, which the others are told. `sources` finds peers that may be asked.
        """
        self._run = run
        self._node = node
        self._files = files
        self._failed = failed
        self._sources = sources
        self._votes = VoteBook(files.folder / "votes", node.new_incarnation)
        self._joining = Joining(run, node, files.folder)
        self._intent = Intent(joining=True, serving=True, uplink_bytes_per_second=int(max_upload or 0))
        self._moved: Callable[[], None] = lambda: None
        self._gone = asyncio.Event()
        self._said = ""
        self.driver: Driver | None = None

    @property
    def member(self) -> Member:
        """As genesis names this node."""
        return Member(self._node.me, self._votes.incarnation, True, self._intent.link_class, trains=False)

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
                await asyncio.sleep(RETRY_BEATS * self._run.heartbeat_seconds)

    async def _begin(self) -> None:
        place = await self._joining.settle(self._files.store, self._files.chain, self._votes, self._sources)
        role = Role(self._intent, tuple(await self._sources()), HELD_BYTES)
        disk = open_disk(place, self._files.folder, self._run.layout, self._files.data)
        driver = build_driver(self._run, self._node, place.tip, disk, role, self)
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
            self._node.say(text)
