"""The bootstrap node's own place in a run that has begun: it runs the same driver as every peer, and trains nothing.

What it is there for is its `Duty`: to follow the run by its certificates, to keep the newest state too, or to be a
member. Genesis, and what becomes of a run that nobody carries on, are others' business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path

from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Admission, Member
from spes_p2p.consensus.messages import RENEWAL, Intent
from spes_p2p.errors import NetworkError, StateError, StorageFull
from spes_p2p.files import NODE_FOLDER, in_folder
from spes_p2p.ids import PeerId
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain, VoteBook
from spes_p2p.sync.driver import Driver, build_driver
from spes_p2p.sync.joining import Settling
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organiser_words import Words
from spes_p2p.sync.starting import Sources
from spes_p2p.sync.surroundings import Applied, Disk, Role
from spes_p2p.sync.tasks import Tasks

HELD_BYTES = 2**28
"""What contributions may take of memory here; a trainer allows itself more."""
INITIAL = frozenset({0})
RETRY_BEATS = 10


def vouch_fix(folder: Path, waiting: Iterable[PeerId]) -> str:
    """What to do where none of those who wait may vote. `folder`: the node's."""
    command = in_folder(f"spes-p2p run vouch {min(waiting, default='PEER')}", folder, NODE_FOLDER)
    return f"vouch for one (with {command}), or start this node with --serve"


class Duty(Enum):
    """What a bootstrap node does in a run.

    Only a server is a member. The others look on: a manifest that named them would make every round wait for them, and
    take their silence for a loss. Peers know by their status that they want to take no part.
    """

    CERTIFICATES = "follows the chain, for who joins and for the organiser"
    ARCHIVE = "keeps the newest state, so that a run outlives the moment in which all of its peers are gone"
    SERVER = "reduces, holds, votes and leads, as the public peer through which peers behind NAT exchange everything"


class Seat:
    """`take` once the run has begun; `driver` is there from then on. Hooks of the driver."""

    def __init__(
        self,
        run: Run,
        node: Node,
        files: RunFiles,
        duty: Duty,
        sources: Sources,
        fatal: Callable[[BaseException], None],
        max_upload: float | None = None,
    ) -> None:
        """`sources` finds peers that may be asked. `fatal` hears of what ends this node: what a member fails with.

        `max_upload`: bytes a second, which the others are told.
        """
        self.duty = duty
        self.run = run
        self.node = node
        self.files = files
        self.has_key = node.me == run.info.organiser
        """Whether this is the organiser's node; a mirror signs nothing."""
        self._sources = sources
        self.fatal = fatal
        self._is_member = duty is Duty.SERVER
        name = "votes" if self._is_member else "looking-on"  # who looks on stands by no vote of its own
        self._votes = VoteBook(files.folder / name, node.new_incarnation)
        self._intent = Intent(uplink_bytes_per_second=int(max_upload or 0))
        if self._is_member:
            self._intent = replace(self._intent, joining=True, serving=True)
        self._gone = asyncio.Event()
        self._said: set[str] = set()
        self.words = Words()
        """The organiser's, as far as this node has heard of them."""
        self._tasks = Tasks(self.fatal)
        self._is_checked = False
        self.driver: Driver | None = None

    @property
    def member(self) -> Member:
        """As genesis names this node."""
        return Member(self.node.me, self._votes.incarnation, True, self._intent.link_class, trains=False)

    @property
    def kept(self) -> Manifest | None:
        """The newest manifest whose state is here, as far as this node is to keep any."""
        return self.driver.core.tip if self.driver is not None and self.duty is not Duty.CERTIFICATES else None

    def take(self) -> None:
        """Completes the state on this disk and then takes part, in the background.

        Retries while no peer provides what is missing; meanwhile, this node serves others as before.
        """
        self._tasks.spawn(self._take())

    async def _take(self) -> None:
        while self.driver is None:
            try:
                self.driver = await self._begin()
                self.driver.obey(self.words)
            except (NetworkError, StateError, StorageFull) as error:
                self._say_once(f"this node cannot {'serve' if self._is_member else 'follow the run'} yet: {error}")
                await asyncio.sleep(RETRY_BEATS * self.run.heartbeat_seconds)

    async def _begin(self) -> Driver:
        disk = await self._disk()
        role = Role(self._intent, tuple(await self._sources()), HELD_BYTES)
        disk.keeps_states = self.duty is not Duty.CERTIFICATES
        driver = build_driver(self.run, self.node, disk, role, self)
        self._hide(driver)
        await driver.start()
        return driver

    def _hide(self, driver: Driver) -> None:
        """Without states a node does not say where it stands, or others come for one: but on a renewal all have it."""
        commit = driver.core.state.own.commit
        is_renewal = commit is not None and commit.certificate.kind == RENEWAL
        driver.hide_status(self.duty is Duty.CERTIFICATES and not is_renewal)

    async def _disk(self) -> Disk:
        store, chain = self.files.store, self.files.chain
        if self.duty is Duty.CERTIFICATES:
            assert chain.newest is not None
            return Disk.open(self.run, self.files, self._votes, chain.newest)
        if self.duty is Duty.ARCHIVE and not self._is_checked:
            await self._tasks.in_thread(lambda: drop_damaged(store, chain, self.node.say))
            self._is_checked = True
        return await Settling(self.run, self.node, self.files, self._votes, self._sources).settle()

    def obey(self, words: Words) -> None:
        """See `Driver.obey`."""
        self.words = words
        if self.driver is not None:
            self.driver.obey(words)

    def admission(self) -> Admission:
        """Who may take part and who may vote, by the organiser's newest word."""
        return self.words.admission(self.run.rules)

    def greet(self, known: Iterable[PeerId]) -> None:
        """Sends our status also to nodes in the DHT that are not members."""
        if self.driver is not None:
            self.driver.greet(known)

    async def leave(self, seconds: float) -> None:
        """Waits at most `seconds` for a manifest that no longer names this node."""
        if self.driver is None or not self.driver.core.state.is_member():
            return
        self.driver.wish(replace(self._intent, leaving=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()

    async def stop(self) -> None:
        await self._tasks.stop()
        if self.driver is not None:
            await self.driver.stop()

    # ---- Hooks of the driver ----

    def close_training(self) -> None:
        """Nothing is trained here, and so a member is always READY."""

    def applied(self, event: Applied) -> None:
        self._said.clear()
        if self.driver is not None:
            self._hide(self.driver)
        if self.driver is not None and not self.driver.core.state.is_member():
            self._gone.set()

    def rounds_in_use(self) -> frozenset[int]:
        return INITIAL

    def notice(self, notice: Notice) -> None:
        if self.duty is not Duty.ARCHIVE or notice.kind != "behind":  # who had it has gone on: the next state is tried
            self._say_once(f"{notice.text} ({notice.kind})")

    def failed(self, error: BaseException) -> None:
        """Who looks on begins again: nobody waits for it."""
        if self._is_member:
            self.fatal(error)
        elif self.driver is not None:
            self._say_once(f"could not follow the run: {error!r}")
            driver, self.driver = self.driver, None
            driver.halt()
            self._tasks.spawn(self._begin_again(driver))

    async def _begin_again(self, driver: Driver) -> None:
        await driver.stop()
        await asyncio.sleep(RETRY_BEATS * self.run.heartbeat_seconds)
        await self._take()

    def _say_once(self, text: str) -> None:
        """Says `text` once until the next commit."""
        if text not in self._said:
            self._said.add(text)
            self.node.say(text)


def drop_damaged(store: StateStore, chain: Chain, say: Callable[[str], None]) -> None:
    """Drops states that are damaged or were never committed, but for the first: others can mend that. Takes a while."""
    for problem in store.problems:
        say(f"archive: {problem}")
    for round in reversed(store.rounds()):
        commit = chain.find(round)
        is_committed = commit is not None and commit.manifest.state_root == store.version(round).root
        try:
            if is_committed:
                store.version(round).verify()
        except StateError as error:
            say(f"archive: {error}; it is fetched again")
            is_committed = False
        if round > 0 and not is_committed:
            store.drop(round)
    newest = store.latest()
    if newest is not None and newest.round:
        say(f"archive: holds the state of round {newest.round}")
