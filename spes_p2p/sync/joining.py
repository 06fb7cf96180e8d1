"""Joins a run from an address: finds the run, checks it, and gets genesis and a state to start from.

Works the same before the run has begun (then it waits for genesis), in the middle of it, and after a restart with a
disk. What comes out is everything that a Driver needs; catching up with newer rounds is the driver's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from spes_p2p.checkpoint.load import load_checkpoint
from spes_p2p.checkpoint.save import STATE_FOLDER, checkpoint_folders
from spes_p2p.config.schema import Config
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Ballots, Commit, Intent, Status, Work
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import CheckpointError, NetworkError, RemoteProtocolError, StateError
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.ids import NO_HASH, PeerId, short
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.store import StateStore, Version
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.candidate_state import staged_state, whole_state
from spes_p2p.sync.catch_up import MOST_BEYOND, CatchUp, HistoryDiverged, TooManyRounds, commits_from
from spes_p2p.sync.chain import Chain, VoteBook
from spes_p2p.sync.chain_mending import opened_chain
from spes_p2p.sync.genesis import check_genesis
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.scrub import TileRepairer
from spes_p2p.sync.starting import TELL_SECONDS, Sources, end_all, fetch_start, first_answer
from spes_p2p.sync.surroundings import Disk
from spes_p2p.sync.tasks import in_thread
from spes_p2p.wire import pack

WITHDRAW_SECONDS = 2.0
MOST_TOLD_OF = 8
"""Strangers that gave no genesis, and of whom a person is told: they may come under new names without end."""
LONG_CHECK_BYTES = 2**30
"""A larger state takes seconds to hash: that is said."""


def waiting_text(config: Config, here: int) -> str:
    """For what a run waits that has not begun, with so many peers `here`, this one among them."""
    wanted, is_vouched = config.swarm.min_peers, config.swarm.trusted == "vouched"
    if is_vouched and here >= wanted:
        are = "peer is" if here == 1 else "peers are"
        return f"waiting: {here} {are} here, but none may vote; the organiser must vouch for one; Ctrl-C leaves"
    are = "is here (this one)" if here == 1 else "are here, with this one"
    return f"waiting for others: {here} of {wanted} peers {are}; the run begins by itself; Ctrl-C leaves"


class Joining:
    """Brings one peer to the point where its disk holds genesis (or more) and the state of its tip."""

    def __init__(self, run: Run, node: Node, folder: Path, sources: Sources, checkpoints: Path | None = None) -> None:
        """`folder` is the run's on this disk; `sources` finds peers that may be asked; from `checkpoints` of this peer
        lost parts of the state may be taken."""
        self._run = run
        self._node = node
        self._folder = folder
        self._sources = sources
        self._checkpoints = checkpoints
        self._told_of: set[PeerId] = set()
        self._said: set[str] = set()

    async def enter(self, intent: Intent, data: Callable[[DataRequest], Blob] | None = None) -> Disk:
        """Opens the disk and waits for genesis if there is none yet. `data`: see `Disk`.

        Raises StateError where the disk holds what does not fit, NetworkError where the initial state came out
        differently here and nobody gives it, and StorageFull. The store is closed again then.
        """
        store = StateStore(self._folder / "state", self._run.layout)
        try:
            return await self._begun(store, intent, data)
        except BaseException:
            store.close()
            raise

    async def _begun(self, store: StateStore, intent: Intent, data: Callable[[DataRequest], Blob] | None) -> Disk:
        chain = await opened_chain(self._folder / "chain", self._run, self._node, self._sources)
        votes = VoteBook(self._folder / "votes", self._node.new_incarnation)
        for problem in store.problems:
            self._node.say(str(problem))
        if self._checkpoints is not None:
            await asyncio.to_thread(partial(rebuild, store, chain, self._checkpoints, self._node.say))
        _drop_uncommitted(store, chain)
        is_new = store.latest() is None
        if is_new:
            await self._make_initial(store)
        if chain.length == 0:
            chain.append(await self._genesis(intent, votes.incarnation))
        files = RunFiles(self._folder, chain, store, data)
        return await Settling(self._run, self._node, files, votes, self._sources).settle(is_new)

    async def _make_initial(self, store: StateStore) -> None:
        run, model = self._run.config.run, self._run.config.model
        if run.initial_state:
            node = self._node
            await fetch_start(self._run, store, node.transport, node.checker.check, self._sources, in_thread, node.say)
            return
        self._node.say("computing the initial state")
        initial = InitialState(self._run.layout, run.seed, model.init_std)
        await asyncio.to_thread(lambda: store.create_initial(initial))

    async def _genesis(self, intent: Intent, incarnation: int) -> Commit:
        """Asks everybody for genesis with each heartbeat; genesis comes about because we announce that we want to join.

        A peer that answers slowly does not hold up the others.
        """
        sequence, asked = 0, tuple[PeerId, ...]()
        loop, told = asyncio.get_running_loop(), float("-inf")
        asking: dict[PeerId, asyncio.Task[Commit | None]] = {}
        try:
            while True:
                sequence += 1
                envelope, asked = self._newcomer(intent, incarnation, sequence), tuple(await self._sources())
                for peer in asked:
                    if peer not in asking:
                        asking[peer] = asyncio.create_task(self._ask_genesis(peer, envelope))
                found = await first_answer(asking, self._run.heartbeat_seconds)
                if found is not None:
                    return found
                if loop.time() >= told + TELL_SECONDS:
                    told = loop.time()
                    self._node.say(waiting_text(self._run.config, 1 + len({*asked} - {self._run.info.organiser})))
        except asyncio.CancelledError:
            await end_all(asking.values())
            await self._withdraw(self._newcomer(replace(intent, leaving=True), incarnation, sequence + 1), asked)
            raise
        finally:
            await end_all(asking.values())

    async def _withdraw(self, envelope: Envelope, asked: tuple[PeerId, ...]) -> None:
        """The run should not begin with a peer that is gone."""
        calls = (self._node.transport.call(peer, pack(envelope), WITHDRAW_SECONDS) for peer in asked)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _ask_genesis(self, peer: PeerId, envelope: Envelope) -> Commit | None:
        try:
            answer = await self._node.transport.call(peer, pack(envelope), 4 * self._run.heartbeat_seconds)
            commit = self._node.checker.open(peer, answer).commit
            if commit is None or commit.manifest.round > 0:
                # streams of its own for each, since some may never be done with theirs
                part = await commits_from(self._run.transfers(self._node.transport), peer, 0)
                commit = part[0] if part else None
            if commit is not None:
                check_genesis(commit, self._run.info, self._node.checker.check)
            return commit
        except (NetworkError, RemoteProtocolError) as error:
            text = f"peer {short(peer)} could not provide genesis: {error}"
            if peer == self._run.info.organiser:
                self._say_once(text)
            elif isinstance(error, RemoteProtocolError):  # others wait as we do
                self._say_of(peer, text)
            return None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._node.say(text)

    def _say_of(self, stranger: PeerId, text: str) -> None:
        """The first text about each of a few: it says another thing each time."""
        if stranger not in self._told_of and len(self._told_of) < MOST_TOLD_OF:
            self._told_of.add(stranger)
            self._node.say(text)

    def _newcomer(self, intent: Intent, incarnation: int, sequence: int) -> Envelope:
        name = self._run.info.fingerprint
        status = Status(name, self._node.me, incarnation, sequence, -1, NO_HASH, Work(), intent, Ballots())
        return Envelope(self._node.me, (self._node.sealer.seal(status),))


class Settling:
    """Brings one peer that has genesis and a state on disk to the newest commit whose state is whole there."""

    def __init__(self, run: Run, node: Node, files: RunFiles, votes: VoteBook, sources: Sources) -> None:
        """`sources` finds peers that may be asked."""
        self._run = run
        self._node = node
        self._files, self._store, self._chain = files, files.store, files.chain
        self._votes = votes
        self._sources = sources
        self._transfers = run.transfers(node.transport)
        self._has_parted = False
        """Whether somebody was found on a history without our tip."""

    async def settle(self, is_new: bool = False) -> Disk:
        """`is_new`: the state was made just now. Raises as `Joining.enter` does; the store stays open."""
        _drop_uncommitted(self._store, self._chain)
        tip = await self._tip()
        if not is_new:
            tip = await self._whole(tip)
        if not _stands_by(self._votes.record, self._store, self._chain, tip):
            self._node.say("what this peer voted for is no longer on its disk; it rejoins as a newcomer")
            self._votes.forget()
        return Disk.open(self._run, self._files, self._votes, tip)

    async def _tip(self) -> Commit:
        """The newest commit whose state is here whole; ends a commit that a crash cut between chain and state."""
        for round in sorted({*self._store.rounds(), *(one.round for one in self._store.stagings)}, reverse=True):
            tip = self._chain.commit(round) if round < self._chain.length else None
            if tip is None or whole_state(self._store, round, tip.manifest.state_root) is None:
                continue  # of a history that was left
            if round not in self._store.rounds() or self._store.version(round).root != tip.manifest.state_root:
                staged = staged_state(self._store, round, tip.manifest.state_root)
                assert staged is not None
                staged.publish()
            return tip
        latest = self._store.latest()
        assert latest is not None
        tip = self._chain.commit(latest.round)
        if latest.round > 0:
            raise StateError(
                f"the state of round {latest.round} in {self._files.folder} is not the one that was committed",
                fix="remove the folder and join again",
            )
        return await self._replace_initial(tip)

    async def _replace_initial(self, genesis: Commit) -> Commit:
        """Ours is not that of the run (our arithmetic gave another one): fetch what differs, or a newer state."""
        if self._run.config.run.initial_state:
            self._node.say("fetching the state of the run")
        else:
            self._node.say("the initial state computed on this machine differs from the run's; fetching it instead")
        reasons: list[str] = []
        found = await self._fetch_instead(genesis, reasons)
        if found is None:
            raise NetworkError(
                f"the initial state {short(genesis.manifest.state_root)} could not be fetched: "
                f"{'; '.join(reasons) or 'nobody to ask'}",
                fix="keep the bootstrap node running until all peers have started",
            )
        return found

    async def _fetch_instead(self, tip: Commit, reasons: list[str]) -> Commit | None:
        """A newer state than that of `tip`, or that one, from whoever has it; why not, in `reasons`."""
        run, check, round = self._run, self._node.checker.check, tip.manifest.round
        catch_up = CatchUp(run.info, run.rules, check, self._chain, self._store, self._transfers, asyncio.to_thread)
        waiting = dict.fromkeys(await self._sources(), round + MOST_BEYOND)
        while waiting:
            # whom the newest certificate names first: strangers may be many, and never done
            peer = min(waiting, key=lambda peer: (waiting[peer], self._is_stranger(peer)))
            most = waiting.pop(peer)
            try:
                newest = await catch_up.headers_instead(round, peer, most)
            except TooManyRounds:
                waiting[peer] = 4 * most  # all others first
                continue
            except HistoryDiverged:
                newest, self._has_parted = tip, True
            except (NetworkError, RemoteProtocolError):
                newest = tip
            for commit in dict.fromkeys((newest, tip)):
                try:
                    (await catch_up.state(commit.manifest, round, [peer])).publish()
                    return commit
                except (NetworkError, RemoteProtocolError) as error:
                    reasons.append(f"{short(peer)}: {error}")
        return None

    def _is_stranger(self, peer: PeerId) -> bool:
        return peer != self._run.info.organiser and not self._chain.names(peer)

    async def _whole(self, tip: Commit) -> Commit:
        """Hashes the state of the tip, and mends it; a newer tip where nobody has its bytes any more.

        Where nobody has those either, but somebody is on another history: an older tip, from which the driver chooses.
        Else raises TileDamaged.
        """
        version = self._store.version(tip.manifest.round)
        size_bytes = self._run.layout.num_values * VALUE_BYTES
        if size_bytes > LONG_CHECK_BYTES:
            self._node.say(f"checking the state of round {version.round} ({size_bytes / 1e9:.0f} GB)")
        damaged = await asyncio.to_thread(lambda: list(version.damaged_tiles()))
        if not damaged:
            return tip
        holders = tuple(await self._sources())
        left = await TileRepairer(self._store, self._transfers, asyncio.to_thread).mend(version, damaged, holders)
        mended = len(damaged) - len(left)
        if mended:
            self._node.say(f"{version.damage(damaged[0])}; {mended} damaged tiles of the state were repaired")
        if not left:
            return tip
        self._node.say(f"{version.damage(left[0])}; no peer that answers has it: looking for a newer state")
        if (newer := await self._fetch_instead(tip, [])) is not None:
            return newer
        older = self._committed_before(version.round)
        if older is None or not self._has_parted:
            raise version.damage(left[0])
        self._node.say(f"others are on another history of the run: going on from round {older.manifest.round}")
        return await self._whole(older)

    def _committed_before(self, round: int) -> Commit | None:
        """The newest commit before `round` whose state is here."""
        before = (at for at in reversed(self._store.rounds()) if at < round)
        found = next((at for at in before if _is_committed(self._store.version(at), self._chain)), None)
        return None if found is None else self._chain.commit(found)


def _drop_uncommitted(store: StateStore, chain: Chain) -> None:
    """Removes states without a certificate from the store."""
    for round in [round for round in store.rounds() if round >= max(chain.length, 1)]:
        store.drop(round)


def _stands_by(record: VoteRecord, store: StateStore, chain: Chain, tip: Commit) -> bool:
    """Whether a restarted elector can still stand by its votes: it is where it voted, or later, with that state."""
    if record.parent == NO_HASH:
        return True
    if record.parent != manifest_hash(tip.manifest):
        return chain.knows(record.parent, tip.manifest.round)
    manifests = [content.manifest for content in record.contents]
    return all(whole_state(store, manifest.round, manifest.state_root) is not None for manifest in manifests)


def rebuild(store: StateStore, chain: Chain, checkpoints: Path, say: Callable[[str], None]) -> None:
    """Brings the newest committed state back where it cannot be read, or is gone. Raises StorageFull.

    From then on, the store also finds tiles in the checkpoints.
    """
    store.spare_folders = lambda: [folder / STATE_FOLDER for folder in reversed(checkpoint_folders(checkpoints))]
    for round in range(chain.length - 1, max(chain.length - 3, -1), -1):
        root = chain.commit(round).manifest.state_root
        if whole_state(store, round, root) is not None:
            return
        if store.salvage(round, root) is not None:
            say(f"the state of round {round} is damaged on disk; the damaged parts are fetched again")
            return
    _adopt(store, chain, checkpoints, say)


def _adopt(store: StateStore, chain: Chain, checkpoints: Path, say: Callable[[str], None]) -> None:
    """The newest checkpoint that is a committed state, if the store has none as new."""
    here = [at for at in store.rounds() if at < chain.length and _is_committed(store.version(at), chain)]
    for folder in reversed(checkpoint_folders(checkpoints)):
        saved = _opened(folder, store)
        if saved is None or saved.round >= chain.length or not _is_committed(saved, chain):
            continue
        if saved.round > max(here, default=-1):
            say(f"the committed state is not under {store.directory}: it is rebuilt from {folder.name}")
            store.adopt(saved.folder, saved.round)
        return


def _is_committed(version: Version, chain: Chain) -> bool:
    return version.root == chain.commit(version.round).manifest.state_root


def _opened(folder: Path, store: StateStore) -> Version | None:
    try:
        return load_checkpoint(folder, verify_state=False).version(store.layout)
    except (CheckpointError, StateError):  # said when training state is looked for
        return None
