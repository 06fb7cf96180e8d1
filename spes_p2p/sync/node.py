"""What all parts of a node share: the run that it is in, its transport, its keys and its clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from spes_p2p.config.schema import Config, SyncConfig, steps_per_round_at
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.sizes import MAX_CONTENT_BYTES, most_members, state_bytes
from spes_p2p.consensus.turns import AS_OFTEN, Vocabulary
from spes_p2p.errors import ConfigError
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.exchange.transfers import Transfers
from spes_p2p.ids import NO_HASH, NOBODY, Hash, PeerId
from spes_p2p.interop.hf import vocabulary_tiles
from spes_p2p.state.layout import Layout
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.ports import Blob, Clock, Network, Transport
from spes_p2p.sync import merge
from spes_p2p.sync.chain import Chain, wall_clock_microseconds
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer


@dataclass(frozen=True)
class Run:
    """A run: its record, its config with this peer's own choices on top, and the grid of its state."""

    info: RunInfo
    config: Config
    layout: Layout

    @cached_property
    def rules(self) -> RunRules:
        return rules_of(self.config, self.info, self.layout)

    @property
    def min_peers(self) -> int:
        return self.config.swarm.min_peers

    @property
    def heartbeat_seconds(self) -> float:
        return self.config.swarm.heartbeat_seconds

    @property
    def stall_seconds(self) -> float:
        """How long a stream may pause while nothing is known of the others' links."""
        return max(5.0, 5 * self.config.swarm.heartbeat_seconds)

    def transfers(self, transport: Transport) -> Transfers:
        """For who is in no round, and so knows nothing of the others' links."""
        return Transfers(transport, self.layout, lambda: self.stall_seconds, patient=True)


def wall_clock_milliseconds() -> int:
    """A number that rises across restarts, as the sequence numbers of one peer's messages must."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Node:
    """This machine in the network of a run. `say` is told what a person should read.

    `new_incarnation` gives numbers that rise over restarts, `first_sequence` one above all that this node ever sent.
    From `secret` follows whom it tells what it heard of a vote, which nobody must know before.
    """

    network: Network
    clock: Clock
    say: Callable[[str], None]
    new_incarnation: Callable[[], int] = wall_clock_microseconds
    first_sequence: int = field(default_factory=wall_clock_milliseconds)
    secret: bytes = field(default_factory=lambda: os.urandom(32))

    @property
    def me(self) -> PeerId:
        return self.network.signer.peer_id

    @property
    def transport(self) -> Transport:
        return self.network.transport

    @cached_property
    def sealer(self) -> KeySealer:
        return KeySealer(self.network.signer)

    @cached_property
    def checker(self) -> EnvelopeChecker:
        return EnvelopeChecker(self.network.verifier)


@dataclass(frozen=True)
class RunFiles:
    """What a node keeps of a run for others: `store` has some of its states, a bootstrap node's the initial one too.

    Votes and residuals lie beside, in `folder`. `data` answers what is asked of the run's data, where it is here.
    """

    folder: Path
    chain: Chain
    store: StateStore
    data: Callable[[DataRequest], Blob] | None = None


LEAST_MEMBERS = 64
"""A run in which a manifest has room for fewer does not begin."""


def check_sizes(config: Config, layout: Layout) -> None:
    """Raises ConfigError where what a round decides, with all that it follows from, would not fit into a message."""
    sync, rules = config.sync, _rules_of(config, layout)
    tiles = rules.block_tiles
    slices = sum(-(-count // sync.slice_tiles) for count in tiles)
    if (most := most_members(rules)) < LEAST_MEMBERS:
        raise ConfigError(
            f"the model has {sum(tiles):,} tiles (sync.tile_values={sync.tile_values}) in {slices:,} slices "
            f"(sync.slice_tiles={sync.slice_tiles}); a round's result would take {state_bytes(rules) / 2**20:.1f} MiB, "
            f"and leave room for {most} members in a message of {MAX_CONTENT_BYTES / 2**20:.1f}",
            fix="raise sync.tile_values, or sync.slice_tiles",
        )
    if sync.vocabulary_rounds > 1 and not vocabulary_of(layout, sync).tiles:
        raise ConfigError(
            f"sync.vocabulary_rounds is {sync.vocabulary_rounds}, but no tile of {sync.tile_values:,} values "
            "(sync.tile_values) holds embedding and head alone",
            fix="set sync.vocabulary_rounds=1, or a smaller sync.tile_values",
        )


def vocabulary_of(layout: Layout, sync: SyncConfig) -> Vocabulary:
    """What of the shared block is averaged more seldom than the rest of it."""
    return Vocabulary(vocabulary_tiles(layout), sync.vocabulary_rounds) if sync.vocabulary_rounds > 1 else AS_OFTEN


def rules_of(config: Config, info: RunInfo, layout: Layout) -> RunRules:
    """What rounds need to know of a run. Raises ConfigError (see `check_sizes`)."""
    check_sizes(config, layout)
    return _rules_of(config, layout, info.fingerprint, info.dataset, info.organiser)


def _rules_of(
    config: Config, layout: Layout, fingerprint: Hash = NO_HASH, dataset: Hash = NO_HASH, organiser: PeerId = NOBODY
) -> RunRules:
    sync = config.sync
    merges = sync.enabled and sync.merge_alpha > 0 and layout.num_columns > 1

    def alpha(step: int) -> float:
        return merge.merge_alpha(sync.merge_alpha, sync.merge_decay_steps, step) if merges else 0.0

    return RunRules(
        fingerprint=fingerprint,
        block_tiles=tuple(len(layout.tile_ids_of(block.index)) for block in layout.model_blocks),
        slice_tiles=sync.slice_tiles,
        sequence_tokens=config.data.sequence_length,
        batch_sequences=config.optimizer.batch_sequences,
        block_sequences=config.data.block_sequences,
        leased=dataset != NO_HASH,
        target_replicas=config.swarm.target_replicas,
        steps_per_round=lambda step: steps_per_round_at(config, step),
        merge_interval=sync.merge_interval,
        merge_alpha=alpha,
        exchange=sync.enabled,
        expert_rounds=sync.expert_rounds,
        vocabulary=vocabulary_of(layout, sync),
        outer=(sync.outer_lr, sync.outer_momentum) if sync.outer == "nesterov" else None,
        faults=Faults(config.swarm.faults),
        has_strangers=config.swarm.trusted == "vouched",
        organiser=organiser,
        renew_after_seconds=config.swarm.renew_after_seconds,
    )
