"""Renews a run with the organiser's key: where nobody is left who can vote, and others wait, they become the members.

When that is due is up to the `LivenessMonitor`, which hears what the driver of this node hears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.child_checks import check_child
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import LINK_CLASSES, LINK_PRIVATE, Member
from spes_p2p.consensus.messages import Commit, Status
from spes_p2p.consensus.rules import renewed_manifest
from spes_p2p.consensus.timing import Pace
from spes_p2p.errors import RemoteProtocolError, StateError, StorageFull
from spes_p2p.files import storing, write_whole
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.genesis import sign_renewal
from spes_p2p.sync.organising.renewal import LivenessMonitor
from spes_p2p.sync.organising.seat import Duty, Seat, vouch_fix
from spes_p2p.wire import pack, unpack

MOST_ROUNDS_LOST = 10
"""Where the newest state is lost the run may go on from an archived one, but not from one that is older than this."""
RENEWALS = "renewals"
"""Folder of the run with what was signed here, by the hash of the parent."""
TRIES = 3
"""A peer that failed this often to provide what it announced is no longer waited for; nor is any that is no member,
after so many times the wait for electors."""


class Renewer:
    """Looks once a heartbeat, on one event loop, from genesis on. A mirror, without the key, only looks."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._run, self._node, self._files = seat.run, seat.node, seat.files
        self._chain = seat.files.chain
        self._said: set[str] = set()
        self._failing = ""
        self._listened_at = float("-inf")
        self._monitor: LivenessMonitor | None = None

    async def run_for_ever(self) -> None:
        """Looks for ever. An unexpected error is reported once, and the work is tried again."""
        while True:
            try:
                await self._look()
                self._failing = ""
            except Exception as error:  # noqa: BLE001 (nobody else cares for a run without members)
                if self._failing != type(error).__name__:
                    self._failing = type(error).__name__
                    self._node.say(f"this node could not renew the run, and tries again: {error!r}")
            await asyncio.sleep(self._run.heartbeat_seconds)

    async def _look(self) -> None:
        driver, newest, now = self._seat.driver, self._chain.newest, self._node.clock.now()
        if driver is None or newest is None:
            return
        if self._monitor is None:
            self._monitor = LivenessMonitor(Pace(self._run.heartbeat_seconds), newest.manifest, now)
        monitor = self._monitor
        monitor.enter(newest.manifest, now)
        monitor.tick(now)
        self._listen(driver, monitor, now)
        if self._is_at_hand(driver, newest.manifest):
            await driver.renewed(newest)
        self._hide(driver, monitor, newest, now)
        if self._seat.has_key:
            self._renew_if_due(driver, monitor, now)

    def _listen(self, driver: Driver, monitor: LivenessMonitor, now: float) -> None:
        """What the driver has heard since the last time, and what a member says itself."""
        core, since = driver.core, self._listened_at
        self._listened_at = now
        if core.state.is_member():
            monitor.hear(core.status(), now)
        for contact in core.state.others.contacts.values():
            if contact.direct_at > since:
                monitor.hear(contact.status, now)

    def _is_at_hand(self, driver: Driver, newest: Manifest) -> bool:
        """Whether the newest commit can be adopted without a fetch: its values are our tip's, or no states are kept."""
        tip = driver.core.tip
        is_later = tip.round < newest.round and self._chain.has(driver.core.tip_hash, tip.round)
        return is_later and (self._seat.duty is Duty.CERTIFICATES or tip.state_root == newest.state_root)

    def _hide(self, driver: Driver, monitor: LivenessMonitor, newest: Commit, now: float) -> None:
        """Makes a node without a vote announce its state, unless that is useless because the newest state is lost."""
        if self._seat.duty is Duty.CERTIFICATES:
            driver.hide_status(not newest.certificate.by_organiser)
        elif self._seat.duty is Duty.ARCHIVE:
            driver.hide_status(driver.core.tip != newest.manifest and not monitor.has_live_elector(now))

    def _renew_if_due(self, driver: Driver, monitor: LivenessMonitor, now: float) -> None:
        """Where nobody is left who can vote, and others wait: they become the members (design section 4)."""
        waiting = monitor.waiting(now)
        if monitor.has_live_elector(now) or not waiting:
            self._said.clear()
            return
        root, is_lost = self._state_to_go_on_from(monitor, waiting)
        is_late = monitor.silent_seconds(now) > TRIES * monitor.wait_seconds(is_lost)
        is_hollow = partial(self._is_hollow, driver, is_late)
        round, asked = driver.core.state.round, driver.core.state.others.asked_last
        is_coming = round.following and (asked is None or not is_hollow(asked))
        if round.adopting or is_coming or monitor.has_newer_history(now, is_hollow):
            return
        if monitor.silent_seconds(now) > monitor.wait_seconds(is_lost) / 2:  # at first they may be fetching the state
            self._say_what_comes(monitor, is_lost, root is not None)
        admission = self._seat.admission()
        chosen = monitor.new_members(self._run.min_peers, is_lost, now, admission.is_banned)
        is_served = self._seat.duty is Duty.SERVER
        if chosen and not is_served and not any(admission.may_vote(status.peer) for status in chosen):
            fix = vouch_fix(self._files.folder.parent, [status.peer for status in chosen])
            self._say_once(f"the run can continue when somebody is here who may vote: {fix}", "no vote")
            return
        if root is not None and chosen:
            try:
                self._renew(driver, monitor.tip, root, chosen)
            except (StorageFull, StateError) as error:
                self._say_once(f"the run cannot continue: {error} ({error.fix})", type(error).__name__)

    def _is_hollow(self, driver: Driver, is_late: bool, peer: PeerId) -> bool:
        """Whether a non-member failed to provide what it announced, or `is_late`: others did, under ever new names. A
        member may just be impossible to dial.
        """
        failed = driver.core.state.others.asked_in_vain[peer] >= TRIES
        return (failed or is_late) and not self._chain.names(peer)

    def _state_to_go_on_from(self, monitor: LivenessMonitor, waiting: list[Status]) -> tuple[Hash | None, bool]:
        """The root of a state that can be had, None for none; and whether it is an older one than the newest."""
        tip, kept = monitor.tip, self._seat.kept
        has_it = any(status.head == manifest_hash(tip) for status in waiting)
        if has_it and kept not in (None, tip):  # a moment: the driver gets it from there
            return None, False
        if tip.round == 0 or tip == kept or has_it:
            return tip.state_root, False
        if kept is not None and kept.round > 0 and tip.round - kept.round <= MOST_ROUNDS_LOST:
            return kept.state_root, True
        return None, True

    def _say_what_comes(self, monitor: LivenessMonitor, is_lost: bool, goes_on: bool) -> None:
        tip, kept, seconds = monitor.tip, self._seat.kept, monitor.wait_seconds(is_lost)
        text = f"no node that answers can continue from round {tip.round}"
        if is_lost:
            text += f", and its state is lost unless a former peer comes back ({_addition(kept)})"
        if goes_on:
            text += f"; after {seconds:.0f} s of silence the waiting peers become the new members"
        if goes_on and is_lost and kept is not None:
            text += f", and {tip.tokens - kept.tokens:,} tokens are lost"
        self._say_once(text)

    def _say_once(self, text: str, about: str = "") -> None:
        """Says `text` once until the run is led again. `about`: a key to recognise a text whose numbers change."""
        if (key := about or text) not in self._said:
            self._said.add(key)
            self._node.say(text)

    def _renew(self, driver: Driver, tip: Manifest, root: Hash, chosen: list[Status]) -> None:
        """Signs a renewal and saves it before anybody sees it: there must never be two on the same parent."""
        path = self._files.folder / RENEWALS / manifest_hash(tip).hex()
        if path.exists():
            commit = self._kept_renewal(path, tip)
        else:
            if self._seat.duty is Duty.SERVER:
                chosen = [*chosen, driver.core.status()]
            roll, ledger = self._seat.admission().roll, self._chain.ledger(tip.round)
            members, wishes = members_of(chosen), wishes_of(chosen)
            manifest = renewed_manifest(self._run.rules, tip, ledger, root, members, wishes, roll)
            commit = sign_renewal(manifest, self._node.me, self._node.sealer)
            with storing(path.parent, 0):
                path.parent.mkdir(exist_ok=True)
            write_whole(path, pack(commit))
        self._chain.append(commit)
        names = ", ".join(short(member.peer) for member in commit.manifest.members)
        self._node.say(f"the run continues with new members: {names}")

    def _kept_renewal(self, path: Path, tip: Manifest) -> Commit:
        """Raises StateError where it is not what was signed: another one must not be signed on the same parent."""
        try:
            commit = unpack(Commit, path.read_bytes())
            check_child(self._run.rules, tip, self._chain.ledger(tip.round), commit.manifest)
            check_certificate(tip, commit.manifest, commit.certificate, self._node.checker.check, self._run.rules.seals)
        except RemoteProtocolError as error:
            raise StateError(
                f"{path}, which names the new members, is damaged: {error}",
                fix="restore it from a backup; remove it only if no peer has ever received it",
            ) from error
        return commit


def members_of(statuses: Sequence[Status]) -> list[Member]:
    """The first members of a manifest, from what they say of themselves."""
    return [Member(s.peer, s.incarnation, True, _link_class(s), not s.intent.serving) for s in statuses]


def _link_class(status: Status) -> int:
    """The link class that a peer announces; unknown ones count as the class that leads last."""
    return status.intent.link_class if status.intent.link_class in LINK_CLASSES else LINK_PRIVATE


def wishes_of(statuses: Sequence[Status]) -> dict[PeerId, OwnershipRequest]:
    """What they want to own."""
    return {s.peer: OwnershipRequest(s.intent.max_columns, s.intent.claims, s.intent.releases) for s in statuses}


def _addition(kept: Manifest | None) -> str:
    if kept is None:
        return "a bootstrap node with --archive DIR would keep it"
    return f"the archive has the state of round {kept.round}"
