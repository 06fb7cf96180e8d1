"""What the peer around a driver provides, and what it hears: its disk, its role, `Hooks`, and `Applied`.

`PeerContext` is all of it in one, for the driver's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import Contribution, Manifest
from spes_p2p.consensus.messages import Commit, Intent
from spes_p2p.consensus.rules import RunRules
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.files import storing
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore, Version
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.chain import Chain, VoteBook
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.node import Node, Run, RunFiles
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.tasks import Tasks


@dataclass(frozen=True)
class Applied:
    """A commit that is the state here now.

    `counted` is what the first round after `previous` counted of this peer; `handed_in` says whether its values were in
    `Inputs` by then, and `uncounted` are the tiles whose slice did not take them; `caught_up` is true when the peer was
    behind and skipped rounds.
    """

    commit: Commit
    previous: Manifest
    counted: Contribution | None
    handed_in: bool
    uncounted: frozenset[int]
    caught_up: bool
    seconds: dict[str, float]
    bytes_sent: int
    bytes_received: int
    deadline_seconds: float
    leavers: frozenset[PeerId]
    """Peers that had announced that they leave."""
    switched: bool = False
    """The commit is of another history than `previous`: ours was left, with `lost_tokens` that it had counted."""
    lost_tokens: int = 0
    own_tokens: int = 0
    """Tokens of this peer among `lost_tokens`."""
    stale_columns: tuple[int, ...] = ()
    """Columns that were not handed out when it was their turn."""
    refused: tuple[PeerId, ...] = ()
    """Peers whose values a reducer found unfit, as far as this peer knows."""


class Hooks(Protocol):
    """What happens around the protocol. Called on the loop's thread; must not block."""

    def close_training(self) -> None:
        """Finish the running inner step and call `Driver.progressed`."""

    def applied(self, event: Applied) -> None: ...

    def rounds_in_use(self) -> frozenset[int]:
        """Rounds whose states somebody still reads: they stay on disk."""

    def notice(self, notice: do.Notice) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Something broke that is not part of the protocol: the peer should stop and say so."""


@dataclass
class Disk:
    """Where one peer keeps its part of a run."""

    tip: Commit
    """The newest commit whose state was here when it was opened."""
    store: StateStore
    chain: Chain
    votes: VoteBook
    inputs: Inputs
    residuals: Residuals
    data: Callable[[DataRequest], Blob] | None = None
    """Answers what others ask of the run's data (see `pieces`); none where none is here."""
    keeps_states: bool = True
    """If False, this node follows only the certificates, and its store does not change."""

    @classmethod
    def open(cls, run: Run, files: RunFiles, votes: VoteBook, tip: Commit) -> Disk:
        """That of a node whose state of `tip` is there. Raises StorageFull."""
        folder, layout = files.folder, run.layout
        with storing(folder, 0):
            inputs = Inputs(folder / "inputs", layout)
            residuals = Residuals(folder / "residuals", layout)
        return cls(tip, files.store, files.chain, votes, inputs, residuals, data=files.data)


@dataclass(frozen=True)
class Role:
    """How a peer takes part: what it wants, and who else it should hear from.

    `held_bytes`: what contributions that are being reduced may take of memory, if not the usual.
    """

    intent: Intent
    seeds: tuple[PeerId, ...]
    held_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class PeerContext:
    """What each part of one peer's driver works with. Of `core` it asks what is known; only the dispatcher tells it."""

    core: Consensus
    run: Run
    node: Node
    disk: Disk
    hooks: Hooks
    tasks: Tasks

    @property
    def rules(self) -> RunRules:
        return self.core.state.rules

    @property
    def layout(self) -> Layout:
        return self.run.layout

    def tip_state(self) -> Version:
        """The committed state."""
        return self.disk.store.version(self.core.tip.round)

    def committed(self, head: Hash) -> Version | None:
        """The state of our tip, if that is `head`. Called in threads."""
        current = self.core.state.round  # one look: the loop goes on beside this thread
        if current.tip_hash != head:
            return None
        version = self.disk.store.version(current.tip.round)
        return version if version.root == current.tip.state_root else None  # else another history is taking our place
