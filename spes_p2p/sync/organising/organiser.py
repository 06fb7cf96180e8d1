"""The bootstrap node as others meet it: makes genesis when enough peers have come; from then on its driver answers.

Without the organiser's key it is a mirror: it is given genesis, signs nothing, and does all else. It trains nothing;
what it does in a run that has begun is its seat's business (see `seat`), and the run goes on without it, but for
renewals (see `renewing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import Commit, Status
from spes_p2p.consensus.renewing import known_link_class
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.consensus.sizes import most_members
from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.exchange.requests import unpack_request
from spes_p2p.ids import PeerId, short
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.swarm.door import Door
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import RunInfo, check_genesis, check_same_run, sign_genesis
from spes_p2p.sync.organising.seat import Duty, Seat, vouch_fix
from spes_p2p.sync.sealing import SIGNATURES
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack

WAITING_BEATS = 10
"""A peer that was not heard for so many heartbeats before genesis is no longer waiting."""
MOST_ASKED = 8
"""Peers that are asked at once for a genesis that was lost here: some may never be done."""


@dataclass
class _Waiting:
    status: Status
    at: float


class Organiser:
    """Serves newcomers and followers of one run. All coroutines belong to one event loop."""

    def __init__(self, seat: Seat) -> None:
        run, node, files = seat.run, seat.node, seat.files
        self.seat = seat
        self.chain = files.chain
        self._run, self._node, self._files = run, node, files
        self._waiting: dict[PeerId, _Waiting] = {}
        self._asked: set[PeerId] = set()
        """Who is asked for a genesis that was lost here."""
        self._has_asked = False
        self._door = Door(SIGNATURES, self.chain.names, node.clock)
        self._tasks = Tasks(seat.fatal)
        self._serving = Serving(run.info, self.chain, files.store, lambda parent, first, count: None, data=files.data)

    async def start(self) -> None:
        """Begins to answer."""
        await self._node.transport.serve(self, self.chain.names)
        if self.chain.length:
            self.seat.take()

    async def stop(self) -> None:
        """Ends what is under way."""
        await self._tasks.stop()
        await self.seat.stop()

    @property
    def waiting(self) -> tuple[PeerId, ...]:
        """Peers that wait for genesis."""
        return tuple(self._waiting)

    # ---------------------------------------------------------------- until the seat is taken (ports.Handler)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """Takes a status; answers with genesis, or with the newest commit."""
        envelope = self._node.checker.open(caller, request, self._door)
        check_same_run(envelope, self._run.info)
        for status in said_by(caller, envelope, self._run.info):
            if self.chain.length == 0 and self.seat.has_key:
                if status.round < 0:
                    self._await(status)
                elif caller not in self._asked and len(self._asked) < MOST_ASKED:
                    self._asked.add(caller)
                    self._tasks.spawn(self._take_genesis_of(caller))
        return pack(Envelope(self._node.me, commit=self.chain.newest))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Run, headers, and tiles of the states that are here."""
        asked = unpack_request(request)
        return await self._tasks.in_thread(lambda: self._serving.answer(asked, caller))

    # ---------------------------------------------------------------- genesis

    async def _take_genesis_of(self, holder: PeerId) -> None:
        """It says that the run has begun: this folder was lost, and a second genesis would split the run."""
        try:
            part = await commits_from(self._run.transfers(self._node.transport), holder, 0)
            if part and self.chain.length == 0:
                check_genesis(part[0], self._run.info, self._node.checker.check)
                self._node.say(
                    f"the run has begun, and its history is not in this folder: peer {short(holder)} gives it"
                )
                self.begun(part[0])
        except (NetworkError, RemoteProtocolError):
            pass  # anybody may say so
        except StorageFull as error:
            self._node.say(f"the run cannot be followed: {error}")
        finally:
            self._asked.remove(holder)

    def _await(self, status: Status) -> None:
        now = self._node.clock.now()
        limit = WAITING_BEATS * self._run.heartbeat_seconds
        for peer in [peer for peer, waiting in self._waiting.items() if now - waiting.at > limit]:
            self._gone(peer)
        is_banned = self.seat.admission().is_banned(status.peer)
        if status.intent.leaving or status.intent.serving or not status.intent.joining or is_banned:
            self._gone(status.peer)
            return
        if status.peer not in self._waiting:
            count, needed = len(self._waiting) + 1, self._run.min_peers
            here = f"{count} of {needed}" if count <= needed else f"{count} are here ({needed} are enough)"
            self._node.say(f"peer {short(status.peer)} has joined, {here}")
        self._waiting[status.peer] = _Waiting(status, now)
        if len(self._waiting) >= self._run.min_peers:
            if not self._has_voter():
                self._ask_to_vouch()
                return
            try:
                self._begin()
            except StorageFull as error:
                self._node.say(f"the run cannot start: {error}")

    def _ask_to_vouch(self) -> None:
        if not self._has_asked:
            self._has_asked = True
            fix = vouch_fix(self._files.folder.parent, self._waiting)
            self._node.say(f"the run can begin when somebody is here who may vote: {fix}")

    def _has_voter(self) -> bool:
        served = [self._node.me] if self.seat.duty is Duty.SERVER else []
        return any(map(self.seat.admission().is_trusted, [*self._waiting, *served]))

    def _gone(self, peer: PeerId) -> None:
        if self._waiting.pop(peer, None) is not None:
            self._node.say(f"peer {short(peer)} has left, {len(self._waiting)} of {self._run.min_peers} are waiting")

    def _begin(self) -> None:
        """Genesis is on disk before anybody sees it, so that there is never a second one.

        Where too many wait, those who may vote come first; one place is the organiser's."""
        is_trusted = self.seat.admission().is_trusted
        order = sorted(self._waiting, key=lambda peer: (not is_trusted(peer), peer))[
            : most_members(self._run.rules) - 1
        ]
        statuses = [self._waiting[peer].status for peer in sorted(order)]
        root = self._files.store.version(0).root
        members = [Member(s.peer, s.incarnation, True, known_link_class(s), not s.intent.serving) for s in statuses]
        wishes = {s.peer: OwnershipRequest(s.intent.max_columns, s.intent.claims, s.intent.releases) for s in statuses}
        if self.seat.duty is Duty.SERVER:
            members.append(self.seat.member)
            wishes[self._node.me] = OwnershipRequest(0)
        manifest = genesis_manifest(self._run.rules, root, members, wishes, self.seat.admission().roll)
        self.begun(sign_genesis(manifest, self._node.me, self._node.sealer))

    def begun(self, genesis: Commit) -> None:
        """With this genesis, which somebody has checked, the run begins here. Raises StorageFull."""
        self.chain.append(genesis)
        self._waiting.clear()
        self.seat.take()


def said_by(peer: PeerId, envelope: Envelope, info: RunInfo) -> list[Status]:
    """What a peer says of itself, of this run; what it passes on is left out."""
    statuses = [signed.value for signed in envelope.statuses if signed.author == signed.value.peer == peer]
    return [status for status in statuses if status.fingerprint == info.fingerprint]
