"""The newest state on the bootstrap node's disk, so that a run outlives the moment in which all of its peers are gone.

One state at a time is fetched, over few streams and in shares from all who have it, so that the run does not feel it.
Which state, and who has it, is told from outside; whatever goes wrong here ends nothing but this attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from spes_p2p.consensus.messages import Commit, Manifest
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError, StorageFull
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import PeerId
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.candidate_state import FETCHED
from spes_p2p.sync.catch_up import CatchUp, InThread
from spes_p2p.sync.chain import Chain

KEPT = 2
"""States on disk: the newest, and the one before it for those who are fetching it."""


class FewStreams(Transfers):
    """Takes little of the others' uplinks at a time."""

    PARALLEL = 2


class Archive:
    """Keeps states of `chain` in `store`, which nobody else writes to."""

    def __init__(
        self, store: StateStore, chain: Chain, catch_up: CatchUp, in_thread: InThread, say: Callable[[str], None]
    ) -> None:
        """`catch_up` works on `store`; `say` is told what a person should read."""
        self.store = store
        self._chain = chain
        self._catch_up = catch_up
        self._in_thread = in_thread
        self._say = say
        self.is_open = False
        self.is_full = False
        self._staged = -1

    def open(self, initial: Version) -> None:
        """Looks at what is here: what cannot be read, is damaged, or was never committed goes. Takes a while.

        Where nothing is left it begins with the initial state. Raises StorageFull.
        """
        for problem in self.store.problems:
            self._say(f"archive: {problem}")
        for round in self.store.rounds():
            try:
                self.store.verify(round)
            except StateError as error:
                self._say(f"archive: {error}; it is fetched again")
                self.store.drop(round)
        self._drop(set(self.store.rounds()) - set(self._committed()))
        if self.store.latest() is None:
            self.store.adopt(initial.folder, initial.round)
        self.is_open = True

    @property
    def newest(self) -> Manifest | None:
        """The newest manifest whose state is here; None before genesis."""
        commits = (self._commit_of(round) for round in reversed(self.store.rounds()))
        return next((commit.manifest for commit in commits if commit is not None), None)

    def has(self, manifest: Manifest) -> bool:
        """Whether this very state is here, as that of its round."""
        round = manifest.round
        return round in self.store.rounds() and self.store.version(round).root == manifest.state_root

    def has_content(self, manifest: Manifest) -> bool:
        """Whether these values are here, perhaps as those of an earlier round: a renewal changes none."""
        base = self.store.latest()
        return base is not None and base.root == manifest.state_root

    async def keep(self, commit: Commit, holders: Sequence[PeerId]) -> bool:
        """Fetches the state of a commit of the chain, unless it is here; whether it is here now."""
        manifest = commit.manifest
        base = self.store.latest()
        assert base is not None
        if self._staged != manifest.round:  # what is half here of another one is in nobody's way any more
            self.store.unstage(self._staged, FETCHED)
            self._staged = manifest.round
        try:
            if base.root == manifest.state_root:  # a round without work
                staging = self.store.stage(manifest.round, base.round, FETCHED)
                await self._in_thread(staging.finish)
            else:
                staging = await self._catch_up.state(manifest, base.round, holders)
            await self._in_thread(staging.publish)
        except (NetworkError, RemoteProtocolError):  # who had it has gone on; the next state is tried
            return False
        except StorageFull as error:
            await self._in_thread(partial(self._no_room, error))
            return False
        if self.is_full:
            self.is_full = False
            self._say("archive: there is room again")
        await self._in_thread(self._drop_old)
        return True

    def _no_room(self, error: StorageFull) -> None:
        """Makes room by the older state; says so once where that is not enough."""
        rounds = self._committed()
        if len(rounds) >= KEPT:
            self._drop(set(rounds[:-1]))
        elif not self.is_full:
            self.is_full = True
            held = f"it keeps that of round {rounds[-1]}" if rounds else "it keeps none"
            self._say(f"archive: no newer state is taken, {held}: {error} ({error.fix})")

    def _drop_old(self) -> None:
        self._drop(set(self.store.rounds()) - set(self._committed()[-KEPT:]))

    def _drop(self, rounds: set[int]) -> None:
        for round in rounds:
            self.store.drop(round)

    def _committed(self) -> list[int]:
        """The rounds of states here that the chain knows, oldest first."""
        return [round for round in self.store.rounds() if self._commit_of(round) is not None]

    def _commit_of(self, round: int) -> Commit | None:
        """The commit of the state of a round that is here, None where it was never committed in our history."""
        found = self._chain.find(round)
        return found if found is not None and found.manifest.state_root == self.store.version(round).root else None
