"""The bootstrap node's part in a run: makes genesis when enough peers have come, and follows the chain from then on.

It trains nothing and has no vote. It keeps the newest certificates and the initial state for whoever asks; the run
goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.ids import PeerId, short
from spes_p2p.ownership.assign import Wish
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.membership import Member
from spes_p2p.swarm.ports import Blob, Clock, Transport
from spes_p2p.sync.chain import Chain, check_links
from spes_p2p.sync.genesis import RunInfo, check_same_run, sign_genesis
from spes_p2p.sync.messages import Commit, Envelope, Sealer, Status
from spes_p2p.sync.requests import Request, Serving
from spes_p2p.sync.rules import RunRules, genesis_manifest
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import Tasks
from spes_p2p.sync.transfer import Transfers
from spes_p2p.wire import pack, unpack

WAITING_BEATS = 10
"""A peer that was not heard for so many heartbeats before genesis is no longer waiting."""


@dataclass
class _Waiting:
    status: Status
    at: float


class Organiser:
    """Serves newcomers and followers of one run. All coroutines belong to one event loop."""

    def __init__(
        self,
        info: RunInfo,
        rules: RunRules,
        min_peers: int,
        heartbeat_seconds: float,
        transport: Transport,
        sealer: Sealer,
        checker: EnvelopeChecker,
        chain: Chain,
        store: StateStore,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """`store` holds the initial state as round 0; `say` is told what a person should read."""
        self.info = info
        self.chain = chain
        self._rules = rules
        self._min_peers = min_peers
        self._heartbeat_seconds = heartbeat_seconds
        self._transport = transport
        self._sealer = sealer
        self._checker = checker
        self._store = store
        self._clock = clock
        self._say = say
        self._waiting: dict[PeerId, _Waiting] = {}
        self._serving = Serving(info, chain, store, lambda parent, first, count: None)
        self._transfers = Transfers(transport, store.layout, lambda: 4 * heartbeat_seconds)
        self._tasks = Tasks(self._failed)
        self._following = False

    async def start(self) -> None:
        """Begins to answer."""
        await self._transport.serve(self)

    async def stop(self) -> None:
        """Ends what is under way."""
        await self._tasks.stop()

    @property
    def waiting(self) -> tuple[PeerId, ...]:
        """Peers that wait for genesis."""
        return tuple(self._waiting)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """Takes a status; answers with genesis, or with the newest commit."""
        envelope = self._checker.open(caller, request)
        check_same_run(envelope, self.info)
        for signed in envelope.statuses:
            if signed.author == signed.value.peer == caller:
                self._hear(signed.value)
        return pack(Envelope(self._transport.peer_id, commit=self._chain_answer(envelope)))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Run, headers, and tiles of the initial state."""
        asked = unpack(Request, request)
        return await self._tasks.in_thread(lambda: self._serving.answer(asked))

    def _chain_answer(self, envelope: Envelope) -> Commit | None:
        rounds = [signed.value.round for signed in envelope.statuses]
        if rounds and min(rounds) < 0:
            return self.chain.commit(0) if self.chain.length else None
        return self.chain.newest

    def _hear(self, status: Status) -> None:
        if self.chain.length == 0:
            self._await(status)
        elif status.round >= self.chain.length and not self._following:
            self._following = True
            self._tasks.spawn(self._follow(status.peer))

    def _await(self, status: Status) -> None:
        now = self._clock.now()
        limit = WAITING_BEATS * self._heartbeat_seconds
        for peer in [peer for peer, waiting in self._waiting.items() if now - waiting.at > limit]:
            self._gone(peer)
        if status.intent.leaving or not status.intent.joining:
            self._gone(status.peer)
            return
        if status.peer not in self._waiting:
            self._say(f"peer {short(status.peer)} has come, {len(self._waiting) + 1} of {self._min_peers}")
        self._waiting[status.peer] = _Waiting(status, now)
        if len(self._waiting) >= self._min_peers:
            try:
                self._begin()
            except StorageFull as error:
                self._say(f"the run cannot begin: {error}")

    def _gone(self, peer: PeerId) -> None:
        if self._waiting.pop(peer, None) is not None:
            self._say(f"peer {short(peer)} has gone, {len(self._waiting)} of {self._min_peers} are left")

    def _begin(self) -> None:
        """Genesis is on disk before anybody sees it, so that there is never a second one."""
        statuses = [waiting.status for _, waiting in sorted(self._waiting.items())]
        members = [Member(s.peer, s.incarnation, True, s.intent.link_class) for s in statuses]
        wishes = {s.peer: Wish(s.intent.max_columns, s.intent.claims, s.intent.releases) for s in statuses}
        manifest = genesis_manifest(self._rules, self._store.version(0).root, members, wishes)
        self.chain.append(sign_genesis(manifest, self._transport.peer_id, self._sealer))
        self._waiting.clear()

    async def _follow(self, peer: PeerId) -> None:
        """Takes newer headers from a peer; its state is not needed here."""
        try:
            while part := await self._transfers.chain(peer, self.chain.length):
                await self._tasks.in_thread(lambda part=part: self._extend(part))  # type: ignore[misc]
        except (NetworkError, RemoteProtocolError, StorageFull) as error:
            self._say(f"peer {short(peer)} could not give its newest certificates: {error}")
        finally:
            self._following = False

    def _extend(self, part: tuple[Commit, ...]) -> None:
        check_links(part, self.chain.newest, self.info, self._rules, self._checker.check)
        for commit in part:
            self.chain.append(commit)

    def _failed(self, error: BaseException) -> None:
        self._say(f"could not follow the run: {error!r}")
