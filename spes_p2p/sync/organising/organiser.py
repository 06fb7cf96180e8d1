"""The bootstrap node as others meet it: makes genesis when enough peers have come, and answers from then on.

Without the organiser's key it is a mirror: it is given genesis, signs nothing, and does all else.

It trains nothing and, unless it is to serve, has no vote. It keeps the newest certificates and the initial state for
whoever asks, and with an archive the newest state (see `caretaker`); the run goes on without it. With a `Server` it is
a member too, through which others exchange their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from spes_p2p.consensus.messages import Commit, Envelope, Manifest, Status
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.errors import RemoteProtocolError, StorageFull
from spes_p2p.exchange.requests import HashesRequest, Request, TilesRequest, unpack_request
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import check_same_run, sign_genesis
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.organising.run_follower import RunFollower, members_of, or_fatal, said_by, wishes_of
from spes_p2p.sync.organising.serving import Server
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack

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
        run: Run,
        node: Node,
        files: RunFiles,
        server: Server | None = None,
        fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        """With an archive the newest states are kept there.

        With a `server` this node is a member from genesis on, on the same files. `fatal` is told what the node cannot
        go on without (None: it is only said).
        """
        self.chain = files.chain
        self._run = run
        self._node = node
        self._store = files.store
        self._has_key = node.me == run.info.organiser
        self._waiting: dict[PeerId, _Waiting] = {}
        self._server = server
        self._said = ""
        self._fatal = fatal or self._failed
        self._tasks = Tasks(self._failed)
        self._caretaker = RunFollower(run, node, files, self._tasks, self._fatal)
        stores = [files.store] if files.archive is None else [files.archive, files.store]
        self._serving = [
            Serving(run.info, self.chain, store, lambda parent, first, count: None, data=files.data) for store in stores
        ]

    async def start(self) -> None:
        """Begins to answer."""
        self._caretaker.start()
        await self._node.transport.serve(self, self.chain.names)
        self._take_seat()

    async def stop(self) -> None:
        """Ends what is under way."""
        await self._tasks.stop()
        if self._server is not None:
            await self._server.stop()

    def _take_seat(self) -> None:
        """From then on the server answers in our place: what we have, it has too."""
        if self._server is not None and self.chain.length:
            self._tasks.spawn(or_fatal(partial(self._caretaker.sit, self._server), self._fatal))

    @property
    def waiting(self) -> tuple[PeerId, ...]:
        """Peers that wait for genesis."""
        return tuple(self._waiting)

    @property
    def archived(self) -> Manifest | None:
        """The newest manifest whose state is in the archive; None without one, and while it is looked through."""
        return self._caretaker.archived

    def choose(self, children: Mapping[Hash, Hash]) -> None:
        """The organiser's word, by parent: the child that the run goes on with."""
        self._caretaker.choose(children)

    # ---------------------------------------------------------------- serving (ports.Handler)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """Takes a status; answers with genesis, or with the newest commit."""
        envelope = self._node.checker.open(caller, request)
        check_same_run(envelope, self._run.info)
        for status in said_by(caller, envelope, self._run.info):
            if self.chain.length == 0 and self._has_key:
                self._await(status)
            elif self.chain.length:
                self._caretaker.hear(status)
        return pack(replace(self._caretaker.word(), commit=self._chain_answer(envelope)))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Run, headers, and tiles of the initial state and of those in the archive."""
        asked = unpack_request(request)
        return await self._tasks.in_thread(lambda: self._answer(asked))

    def _answer(self, asked: Request) -> Blob:
        if isinstance(asked, HashesRequest | TilesRequest):
            for serving in self._serving[:-1]:
                with contextlib.suppress(RemoteProtocolError):  # not here: perhaps it is of the initial state
                    return serving.answer(asked)
        return self._serving[-1].answer(asked)

    def _chain_answer(self, envelope: Envelope) -> Commit | None:
        rounds = [signed.value.round for signed in envelope.statuses]
        if rounds and min(rounds) < 0:
            return self.chain.commit(0) if self.chain.length else None
        return self.chain.newest

    # ---------------------------------------------------------------- genesis

    def _await(self, status: Status) -> None:
        now = self._node.clock.now()
        limit = WAITING_BEATS * self._run.heartbeat_seconds
        for peer in [peer for peer, waiting in self._waiting.items() if now - waiting.at > limit]:
            self._gone(peer)
        if status.intent.leaving or status.intent.serving or not status.intent.joining:
            self._gone(status.peer)
            return
        if status.peer not in self._waiting:
            self._node.say(f"peer {short(status.peer)} has come, {len(self._waiting) + 1} of {self._run.min_peers}")
        self._waiting[status.peer] = _Waiting(status, now)
        if len(self._waiting) >= self._run.min_peers:
            try:
                self._begin()
            except StorageFull as error:
                self._node.say(f"the run cannot begin: {error}")

    def _gone(self, peer: PeerId) -> None:
        if self._waiting.pop(peer, None) is not None:
            self._node.say(f"peer {short(peer)} has gone, {len(self._waiting)} of {self._run.min_peers} are left")

    def _begin(self) -> None:
        """Genesis is on disk before anybody sees it, so that there is never a second one."""
        statuses = [waiting.status for _, waiting in sorted(self._waiting.items())]
        root = self._store.version(0).root
        members, wishes = members_of(statuses), wishes_of(statuses)
        if self._server is not None:
            members.append(self._server.member)
            wishes[self._server.member.peer] = OwnershipRequest(0)
        manifest = genesis_manifest(self._run.rules, root, members, wishes)
        self.begun(sign_genesis(manifest, self._node.me, self._node.sealer))

    def begun(self, genesis: Commit) -> None:
        """With this genesis, which somebody has checked, the run begins here. Raises StorageFull."""
        self.chain.append(genesis)
        self._waiting.clear()
        self._caretaker.begin()
        self._take_seat()

    def _failed(self, error: BaseException) -> None:
        """What is tried again in any case; once, though it may fail each time."""
        if (text := f"could not follow the run: {error!r}") != self._said:
            self._said = text
            self._node.say(text)
