"""The trainer of a simulated peer: it makes steps at its own speed, hands in, and carries on what was not counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spes_p2p.consensus import events as on
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import Commit, Work
from spes_p2p.data.leases import count
from spes_p2p.ids import Hash, sha256, short
from spes_p2p.testing.sim_state import BATCH_SEQUENCES, SEQUENCE_TOKENS, STEPS, Trained, trained_positions
from spes_p2p.testing.symbols import Died

if TYPE_CHECKING:
    from spes_p2p.testing.sim_peer import SimPeer
    from spes_p2p.testing.sim_process import SimProcess


class SimTrainer:
    """What one process trains: `_since` when, while it does."""

    def __init__(self, peer: SimPeer, process: SimProcess) -> None:
        self._peer = peer
        self._process = process
        self._core: Consensus = process.core
        self._world = peer.world
        self._trained: Trained | None = None
        self._work = Work()
        self._since: float | None = None

    def begin(self) -> None:
        """Begins the steps of a round, where it is a member of it."""
        peer = self._peer
        if not self._core.state.is_member() or self._since is not None or peer.intent.serving:
            return
        if peer.intent.leaving:
            self.hand_in()
            return
        self._since = self._world.now
        head = self._core.tip_hash
        peer.later(peer.round_seconds * (0.9 + 0.2 * self._world.random.random()), self._finish, head)
        if self._world.random.random() < 0.3:
            peer.later(0.5 * peer.round_seconds, self._tell_progress, head)

    def close(self) -> None:
        """The round closes: the running step is finished."""
        rest = self._world.random.random() * self._peer.step_seconds
        self._peer.later(rest, self._finish, self._core.tip_hash)

    def _tell_progress(self, head: Hash) -> None:
        if self._core.tip_hash == head and self._since is not None and not self._core.state.round.work.ready:
            self._process.driver.tell(on.TrainingProgressed(self._so_far(ready=False)))

    def _finish(self, head: Hash) -> None:
        if self._core.tip_hash == head and self._since is not None:
            self.hand_in()

    def hand_in(self) -> None:
        """Its work so far is READY."""
        core, peer = self._core, self._peer
        if core.state.round.work.ready or peer.intent.serving or (self._since is None and not peer.intent.leaving):
            return
        if self._process.driver.is_between_rounds:
            return
        self._work = self._so_far(ready=True)
        self._since = None
        work = self._work
        if work.sequences and core.state.is_member():
            life = next(self._world.lives)
            if core.state.rules.audited_share:
                work = replace(work, commitment=sha256(b"%d" % life))
            positions = trained_positions(core.tip, peer.name, work.sequences)
            self._trained = Trained(life, peer.name, core.tip_hash, work, positions, self._poison())
        self._process.driver.tell(on.TrainingProgressed(work))

    def _poison(self) -> frozenset[int]:
        chance, blocks = self._world.random, len(self._world.rules.block_tiles)
        return frozenset({chance.randrange(blocks)}) if chance.random() < self._world.poisoned else frozenset()

    def _so_far(self, ready: bool) -> Work:
        done, step_seconds = self._work, self._peer.step_seconds
        seconds = 0.0 if self._since is None else self._world.now - self._since
        steps = min(STEPS, int(seconds / step_seconds + 0.2))
        held = count(self._core.tip.leases.of(self._peer.name))
        steps = (min(held, done.sequences + steps * BATCH_SEQUENCES) - done.sequences) // BATCH_SEQUENCES
        sequences = done.sequences + steps * BATCH_SEQUENCES
        return Work(
            ready, sequences * SEQUENCE_TOKENS, done.steps + steps, sequences, seconds,
            0.0 if ready else step_seconds, STEPS * BATCH_SEQUENCES * SEQUENCE_TOKENS,
        )  # fmt: skip

    def counted(self, entry: Contribution, parent: Hash) -> Trained | None:
        """What this peer gives to a reducer: the values that the plan counts, while they are here."""
        return self._trained if self._trained is not None and self._core.is_counted(parent, entry) else None

    # ---- the committed state ----

    def stands_on(self, commits: Sequence[Commit], switched: bool) -> None:
        """Work that no commit counted is carried on if its data is still ours; on another history it is lost."""
        before, newest = self._core.tip, commits[-1]
        for commit in commits:
            self._carry(before, commit.manifest)
            before = commit.manifest
        if switched:
            self._work = Work()
            self._world.result.switches += 1
        self._trained, self._since = None, None
        self._world.note_commit(newest.manifest)
        name = short(newest.certificate.manifest)
        self._world.tell(f"{self._peer.name} stands on round {newest.manifest.round} {name}")

    def _carry(self, before: Manifest, after: Manifest) -> None:
        counted = any(entry.peer == self._peer.name for entry in after.roster)
        mine = trained_positions(before, self._peer.name, self._work.sequences)
        if counted or trained_positions(after, self._peer.name, self._work.sequences) != mine:
            self._work = Work()

    def goes_on(self) -> None:
        """The next round begins; who leaves and is named no more ends."""
        self._process.look()
        if self._peer.intent.leaving and not self._core.state.is_member():
            self._peer.crash()
            raise Died
        self.begin()
