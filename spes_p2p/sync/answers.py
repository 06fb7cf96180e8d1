"""Answers what other peers send and ask: one envelope for one, and bytes by what they are (`ports.Handler`)."""

from __future__ import annotations

from spes_p2p import failpoints
from spes_p2p.consensus import events as on
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import Contribution
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange.requests import ValuesRequest, kind_of, unpack_request
from spes_p2p.exchange.retention import Retention
from spes_p2p.failpoints import reached
from spes_p2p.ids import PeerId
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.disk_history import DiskHistory
from spes_p2p.sync.dispatcher import Dispatcher
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import RunInfo, check_same_run
from spes_p2p.sync.outbox import Outbox
from spes_p2p.sync.outgoing import check_asker
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import unpack


class Answers:
    """What one peer says when it is asked."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        info: RunInfo,
        history: DiskHistory,
        outbox: Outbox,
        serving: Serving,
        retention: Retention,
        tasks: Tasks,
    ) -> None:
        self._core = dispatcher.core
        self._dispatcher = dispatcher
        self._info = info
        self._outbox = outbox
        self._serving = serving
        self._retention = retention
        self._tasks = tasks
        self._history = history

    def knows(self, caller: PeerId) -> bool:
        """Whether `caller` is the organiser, or a member by the chain's newest commit (maybe newer than our tip)."""
        return caller == self._info.organiser or self._history.disk.chain.names(caller)

    def hear(self, envelope: Envelope) -> None:
        """A message came."""
        self._dispatcher.tell(on.MessageReceived(envelope))
        self._history.hear(envelope.commit)

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        """One envelope in, our envelope out."""
        self._require_life()
        envelope = self._outbox.open(caller, request)
        check_same_run(envelope, self._info)
        self.hear(envelope)
        return self._outbox.answer(caller, self._dispatcher.reply_to(caller))

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        """Values, tiles, headers: see `requests`."""
        self._require_life()
        asked = unpack_request(request)
        if isinstance(asked, ValuesRequest):
            rules = self._core.state.rules
            check_asker(self._history.disk.store.layout, rules, self._core.tip, caller, asked.first_tile, asked.count)
            entry = unpack(Contribution, asked.work)
            if not (self._core.is_counted(asked.parent, entry) or self._core.has_counted(asked.parent, entry)):
                raise RemoteProtocolError("this peer no longer has the requested work")
        reached(failpoints.SERVE + kind_of(asked), peer=self._core.me, round=self._core.tip.round + 1, caller=caller)
        blob = await self._tasks.in_thread(lambda: self._serving.answer(asked))
        if self._is_behind(caller):
            self._retention.asked(caller, asked)
        return blob

    def _is_behind(self, caller: PeerId) -> bool:
        """Whether it may need a state for longer than we would keep it anyway; a stranger may."""
        contact = self._core.state.others.contacts.get(caller)
        return contact is None or contact.status.round < self._core.tip.round - 1

    def _require_life(self) -> None:
        if self._dispatcher.halted:
            raise RemoteProtocolError("this peer is shutting down")
