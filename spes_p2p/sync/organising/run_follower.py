"""What the bootstrap node does for a run that has begun: follows it, keeps its newest state, and renews it.

Says what can be had from it. Who calls, and how a run begins, is `organiser`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spes_p2p.consensus.forks import Line, Standing, Way, choose
from spes_p2p.consensus.membership import LINK_CLASSES, LINK_PRIVATE, Member
from spes_p2p.consensus.messages import (
    Ballots,
    Commit,
    Envelope,
    Intent,
    Manifest,
    Signed,
    Status,
    Work,
    manifest_hash,
)
from spes_p2p.consensus.rules import renewed_manifest
from spes_p2p.consensus.timing import Pace
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError, StorageFull
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.files import storing, write_whole
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.state.store import StateStore
from spes_p2p.sync.catch_up import CatchUp
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.genesis import RunInfo, sign_renewal
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organising.archive import Archive, FewStreams
from spes_p2p.sync.organising.following import Following
from spes_p2p.sync.organising.renewal import LivenessMonitor
from spes_p2p.sync.organising.serving import Server
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack, unpack

MOST_ROUNDS_LOST = 10
"""Where the newest state is lost the run may go on from an archived one, but not from one that is older than this."""
RETRY_BEATS, FULL_BEATS = 2, 30
"""So long after a failed try the archive tries again, and after a disk that was full."""


class RunFollower:
    """Follows one run from its genesis on. All coroutines belong to one event loop."""

    def __init__(
        self, run: Run, node: Node, files: RunFiles, tasks: Tasks, fatal: Callable[[BaseException], None]
    ) -> None:
        """As `Organiser`; `tasks` are its own."""
        self._run = run
        self._node = node
        self._files = files
        self._chain = files.chain
        self._tasks = tasks
        self._said: set[str] = set()
        self._fatal = fatal
        self._failing: dict[str, str] = {}
        self._driver: Driver | None = None
        self._choices: Mapping[Hash, Hash] = {}
        self._follows = True
        self._listened_at = float("-inf")
        self._vigil: LivenessMonitor | None = None
        self._sequence = node.first_sequence
        self._status: Signed[Status] | None = None
        transfers = Transfers(node.transport, run.layout, self._stall_seconds, patient=True)
        self._following = Following(
            self._chain,
            self._catch_up(files.store, transfers),
            tasks,
            self._moved,
            node.say,
            node.clock,
            RETRY_BEATS * run.heartbeat_seconds,
            self._way_to,
        )
        self.archive: Archive | None = None
        self._archiving = False
        self._archive_again_at = float("-inf")
        if files.archive is not None:
            few = FewStreams(node.transport, run.layout, self._stall_seconds)
            states = self._catch_up(files.archive, few)
            self.archive = Archive(files.archive, self._chain, states, tasks.in_thread, node.say)

    def _catch_up(self, store: StateStore, transfers: Transfers) -> CatchUp:
        run, check = self._run, self._node.checker.check
        return CatchUp(run.info, run.rules, check, self._chain, store, transfers, self._tasks.in_thread)

    def start(self) -> None:
        """An archive is looked through beside."""
        self.begin()
        if self.archive is not None:
            self._archiving = True
            self._tasks.spawn(or_fatal(partial(self._open_archive, self.archive), self._fatal))
        self._tasks.spawn(or_fatal(self._tick_for_ever, self._fatal))

    async def sit(self, server: Server) -> None:
        """From now on this node is a member: its driver follows the run and keeps its state."""
        self._follows = False
        while self._following.under_way:
            await asyncio.sleep(0.1 * self._run.heartbeat_seconds)
        await server.take_seat(self._moved)
        self._driver = server.driver
        self.choose(self._choices)

    def choose(self, children: Mapping[Hash, Hash]) -> None:
        """The organiser's word, by parent: the child that the run goes on with."""
        self._choices = children
        self._following.reconsider()
        if self._driver is not None:
            self._driver.choose(children)

    def begin(self) -> None:
        """There may be a chain to follow now."""
        if self._chain.newest is not None:
            pace = Pace(self._run.heartbeat_seconds)
            self._vigil = LivenessMonitor(pace, self._chain.newest.manifest, self._node.clock.now())

    @property
    def archived(self) -> Manifest | None:
        """The newest manifest whose state is kept here; None where none is, and while the archive is looked through."""
        if self._driver is not None:
            return self._driver.core.tip
        return self.archive.newest if self.archive is not None and self.archive.is_open else None

    def word(self) -> Envelope:
        """What we have to say."""
        return Envelope(self._node.me, (self._status,) if self._status is not None else ())

    def hear(self, status: Status) -> None:
        """A peer itself has said this."""
        if self._vigil is not None:
            self._vigil.hear(status, self._node.clock.now())
            if self._follows:
                self._following.hear(status)

    async def _tick_for_ever(self) -> None:
        while True:
            if self._vigil is not None:
                self._tick(self._vigil, self._node.clock.now())
            await asyncio.sleep(self._run.heartbeat_seconds)

    def _tick(self, vigil: LivenessMonitor, now: float) -> None:
        self._try("watch the members", self._watch, vigil, now)
        if self._node.me == self._run.info.organiser:  # else it is a mirror, without the key
            self._try("renew the run", self._renew_if_due, vigil, now)
        self._try("keep the newest state", self._keep_newest, vigil, now)
        self._try("say what can be had here", self._speak, vigil, now)

    def _try(
        self, what: str, part: Callable[[LivenessMonitor, float], None], vigil: LivenessMonitor, now: float
    ) -> None:
        """A part of a tick. What fails unexpectedly is told once, and is tried again with the next tick."""
        try:
            part(vigil, now)
        except Exception as error:  # noqa: BLE001 (nobody else cares for the run: the other parts go on)
            if self._failing.get(what) != type(error).__name__:
                self._failing[what] = type(error).__name__
                self._node.say(f"this node could not {what}, and tries again: {error!r}")
        else:
            self._failing.pop(what, None)

    def _watch(self, vigil: LivenessMonitor, now: float) -> None:
        vigil.tick(now)
        if self._driver is not None:
            self._listen(self._driver, vigil, now)
        for peer in vigil.to_probe(now):
            self._tasks.spawn(self._probe(vigil, peer))

    def _listen(self, driver: Driver, vigil: LivenessMonitor, now: float) -> None:
        """What the driver has heard since the last time, and what it says itself."""
        core, since = driver.core, self._listened_at
        self._listened_at = now
        for status in (core.status(), *(c.status for c in core.state.others.contacts.values() if c.direct_at > since)):
            vigil.hear(status, now)

    def _way_to(self, ours: Line, theirs: Line) -> Way:
        may_take = self._vigil is not None and self._vigil.may_take(self._node.clock.now())
        return choose(ours, theirs, Standing(may_take, self._run.rules.final_rounds, chosen=self._choices.values()))

    def _moved(self) -> None:
        """The chain is another one than before."""
        newest, now = self._chain.newest, self._node.clock.now()
        if self._vigil is not None and newest is not None:
            self._vigil.enter(newest.manifest, now)
            self._keep_newest(self._vigil, now)
            self._speak(self._vigil, now)

    async def _probe(self, vigil: LivenessMonitor, peer: PeerId) -> None:
        """Calls a silent elector: it may not know our address."""
        if self._driver is not None:  # which speaks to all members itself
            return
        with contextlib.suppress(NetworkError, RemoteProtocolError):  # then it stays silent
            answer = await self._node.transport.call(peer, pack(self.word()), 4 * self._run.heartbeat_seconds)
            for status in said_by(peer, self._node.checker.open(peer, answer), self._run.info):
                self.hear(status)

    def _speak(self, vigil: LivenessMonitor, now: float) -> None:
        """Says which state can be had here, and nothing where it is of no use: the newest one is lost."""
        if self._driver is not None:  # which says it itself
            return
        tip, manifest = vigil.tip, self.archived
        if manifest is not None and manifest != tip and not vigil.is_led(now):
            manifest = None
        newest = self._chain.newest
        if manifest is None and newest is not None and newest.certificate.by_organiser:
            manifest = tip
        if manifest is None:
            self._status = None
            return
        self._sequence += 1
        self._status = self._node.sealer.seal(
            Status(
                self._run.info.fingerprint, self._node.me, 1, self._sequence, manifest.round,
                manifest_hash(manifest), Work(), Intent(can_vote=False), Ballots(),
            )
        )  # fmt: skip

    # ---------------------------------------------------------------- the archive

    async def _open_archive(self, archive: Archive) -> None:
        try:
            await self._tasks.in_thread(lambda: archive.open(self._files.store.version(0)))
            if (newest := archive.newest) is not None and newest.round:
                self._node.say(f"archive: it has the state of round {newest.round}")
        except StorageFull as error:
            self._node.say(f"there is no archive: {error} ({error.fix})")
        finally:
            self._archiving = False

    def _keep_newest(self, vigil: LivenessMonitor, now: float) -> None:
        """Begins to fetch the newest state, one at a time, unless it is here or nobody who has it is heard."""
        archive, commit = self.archive, self._chain.newest
        if archive is None or not archive.is_open or self._archiving or now < self._archive_again_at:
            return
        if commit is None or archive.has(commit.manifest):
            return
        holders = vigil.standing_on(commit.manifest.round, manifest_hash(commit.manifest), now)
        if holders or archive.has_content(commit.manifest):
            self._archiving = True
            turn = commit.manifest.round % max(1, len(holders))
            self._tasks.spawn(self._keep(archive, commit, [*holders[turn:], *holders[:turn]]))

    async def _keep(self, archive: Archive, commit: Commit, holders: list[PeerId]) -> None:
        is_kept = False
        try:
            is_kept = await archive.keep(commit, holders)
        finally:
            if not is_kept:
                beats = FULL_BEATS if archive.is_full else RETRY_BEATS
                self._archive_again_at = self._node.clock.now() + beats * self._run.heartbeat_seconds
            self._archiving = False
        self._moved()

    # ---------------------------------------------------------------- renewal

    def _renew_if_due(self, vigil: LivenessMonitor, now: float) -> None:
        """Where nobody is left who can vote, and others wait: they become the members (design section 4)."""
        waiting = vigil.waiting(now)
        if vigil.is_led(now) or not waiting:
            self._said.clear()
            return
        if self._following.is_hopeful or self._archiving or vigil.is_outrun(now, self._following.is_hollow):
            return
        if self._driver is not None and (
            self._driver.core.state.round.adopting or self._driver.core.state.round.following
        ):
            return
        root, is_lost = self._state_to_go_on_from(vigil, waiting)
        if vigil.silent_seconds(now) > vigil.wait_seconds(is_lost) / 2:  # at first they may be fetching the state
            self._say_what_comes(vigil, is_lost, root is not None)
        chosen = vigil.to_name(self._run.min_peers, is_lost, now)
        if root is not None and chosen:
            try:
                self._renew(vigil.tip, root, chosen)
            except (StorageFull, StateError) as error:
                self._say_once(f"the run cannot go on: {error} ({error.fix})", type(error).__name__)

    def _state_to_go_on_from(self, vigil: LivenessMonitor, waiting: list[Status]) -> tuple[Hash | None, bool]:
        """The root of a state that can be had, None for none; and whether it is an older one than the newest."""
        tip, kept = vigil.tip, self.archived
        head = manifest_hash(tip)
        has_it = any(status.head == head for status in waiting)
        if self._driver is not None and has_it and tip != kept:  # a moment: the driver gets it from there
            return None, False
        if tip.round == 0 or tip == kept or has_it:
            return tip.state_root, False
        if kept is not None and kept.round > 0 and tip.round - kept.round <= MOST_ROUNDS_LOST:
            return kept.state_root, True
        return None, True

    def _say_what_comes(self, vigil: LivenessMonitor, is_lost: bool, goes_on: bool) -> None:
        tip, kept, seconds = vigil.tip, self.archived, vigil.wait_seconds(is_lost)
        text = f"nobody answers who could go on from round {tip.round}"
        if is_lost:
            text += f", and its state is lost unless a former peer comes back with --resume ({_addition(tip, kept)})"
        if goes_on:
            text += f"; after {seconds:.0f} s of silence the peers that wait become its members"
        if goes_on and is_lost and kept is not None:
            text += f", and {tip.tokens - kept.tokens:,} tokens are lost"
        self._say_once(text)

    def _say_once(self, text: str, about: str = "") -> None:
        """Once until the run is led again; `about`: what stands for a text with numbers that change."""
        if (key := about or text) not in self._said:
            self._said.add(key)
            self._node.say(text)

    def _renew(self, tip: Manifest, root: Hash, chosen: list[Status]) -> None:
        """On disk before anybody sees it: there is never another one on the same parent."""
        path = self._chain.directory.parent / "renewals" / manifest_hash(tip).hex()
        if path.exists():
            commit = _kept_renewal(path)
        else:
            if self._driver is not None:
                chosen = [*chosen, self._driver.core.status()]
            manifest = renewed_manifest(self._run.rules, tip, root, members_of(chosen), wishes_of(chosen))
            commit = sign_renewal(manifest, self._node.me, self._node.sealer)
            with storing(path.parent, 0):
                path.parent.mkdir(exist_ok=True)
            write_whole(path, pack(commit))
        self._chain.append(commit)
        names = ", ".join(short(member.peer) for member in commit.manifest.members)
        self._node.say(f"the run goes on with new members: {names}")
        self._moved()
        if self._driver is not None:
            self._tasks.spawn(self._driver.renewed(commit))

    def _stall_seconds(self) -> float:
        return 4 * self._run.heartbeat_seconds


async def or_fatal(work: Callable[[], Coroutine[Any, Any, None]], fatal: Callable[[BaseException], None]) -> None:
    """For `work` that a node cannot do without: `fatal` is told what it fails with."""
    try:
        await work()
    except Exception as error:  # noqa: BLE001 (nobody waits for it)
        fatal(error)


def _kept_renewal(path: Path) -> Commit:
    """Raises StateError where it is damaged: another one must not be signed on the same parent."""
    try:
        return unpack(Commit, path.read_bytes())
    except RemoteProtocolError as error:
        raise StateError(
            f"{path}, which names the new members, is damaged: {error}",
            fix="bring it back from a backup; remove it only where no peer was ever told of it",
        ) from error


def said_by(peer: PeerId, envelope: Envelope, info: RunInfo) -> list[Status]:
    """What a peer says of itself, of this run; what it passes on is left out."""
    statuses = [signed.value for signed in envelope.statuses if signed.author == signed.value.peer == peer]
    return [status for status in statuses if status.fingerprint == info.fingerprint]


def members_of(statuses: Sequence[Status]) -> list[Member]:
    """The first members of a manifest, from what they say of themselves."""
    return [Member(s.peer, s.incarnation, True, _link_class(s), not s.intent.serving) for s in statuses]


def _link_class(status: Status) -> int:
    """As it says; whose word is none that there is leads last."""
    return status.intent.link_class if status.intent.link_class in LINK_CLASSES else LINK_PRIVATE


def wishes_of(statuses: Sequence[Status]) -> dict[PeerId, OwnershipRequest]:
    """What they want to own."""
    return {s.peer: OwnershipRequest(s.intent.max_columns, s.intent.claims, s.intent.releases) for s in statuses}


def _addition(tip: Manifest, kept: Manifest | None) -> str:
    if kept is None:
        return "a bootstrap node with --archive DIR keeps it"
    return f"the archive has that of round {kept.round}"
