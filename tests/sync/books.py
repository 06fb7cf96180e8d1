"""Holds every round of an in-memory swarm against the independent ledger, bit for bit, but for merges.

For lossy codecs, turns, and an outer optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.ids import PeerId
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Values
from tests import lossy_oracle, oracle
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.simulation.pretend_peer import HandedIn
from tests.sync.swarm_cases import Blocks, Recorder, commits, outer_of


class Books:
    """Make it before the swarm starts. `kept`: rounds that a peer settled before it died, as (name, round)."""

    def __init__(self, swarm: MemorySwarm, kept: frozenset[tuple[str, int]] = frozenset()) -> None:
        self.swarm, self.recorder, self.kept = swarm, Recorder(swarm), kept
        layout = swarm.layout
        tiles = [(tile.block, tile.start, tile.stop) for tile in layout.tiles[: layout.num_model_tiles]]
        self.ledger = lossy_oracle.Ledger(tiles, [layout.codec_of(block.index) for block in layout.model_blocks])
        self.merges = 0
        self.trained: dict[tuple[PeerId, int], Values] = {}
        """By how much a peer has trained what had no turn in this round; zeros elsewhere."""
        self.lives: dict[PeerId, PretendPeer] = {}
        """Which life of a peer the last round counted."""

    def check(self) -> int:
        """All rounds of the chain; how many tiles have something kept in the end."""
        layout, config = self.swarm.layout, self.swarm.config
        initial = InitialState(layout, config.run.seed, config.model.init_std)
        self.recorder.blocks[0] = [np.array(initial.block(block.index)) for block in layout.blocks]
        for parent, child in pairwise(commit.manifest for commit in commits(self.swarm)):
            self._check_round(parent, child)
        return len(self.ledger.sent) + len(self.ledger.handed)

    def _check_round(self, parent: Manifest, child: Manifest) -> None:
        before, after = (dict(enumerate(self.recorder.blocks[manifest.round])) for manifest in (parent, child))
        lives = {entry.peer: self._life(entry.peer, parent) for entry in child.roster}
        brought = {peer: life.handed_in[parent.round] for peer, life in lives.items()}
        self._check_starts(parent, before, brought, lives)
        values = {peer: handed.values for peer, handed in brought.items()}
        self.trained = {
            (peer, block): self._not_done(child, block, value - self._masters(parent, before, peer, block))
            for peer, blocks in values.items()
            for block, value in blocks.items()
        }
        expected = self._stepped(child, before, self.ledger.round(parent, child, before, values))
        self.lives = lives
        self._forget_the_dead(child)
        if child.merge is None:
            for block, value in enumerate(expected):
                assert np.array_equal(after[block], value), f"block {block} of round {child.round}"
            return
        self.merges += 1
        sources = Blocks(dict(enumerate(expected))), Blocks(after)
        made, found = (self.recorder.tensors(source, range(len(expected))) for source in sources)
        oracle.check_equal(found, oracle.merged(made, child.merge.alpha, self.swarm.config.sync.merge_top_k))

    def _stepped(self, child: Manifest, before: Mapping[int, Values], means: list[Values]) -> list[Values]:
        """The state before the merge, from what the slices give: the outer step, where the run has one."""
        blocks = len(means)
        outer = outer_of(self.swarm.config)
        if outer is None:
            return means
        after = means + [np.array(before[blocks + block]) for block in range(blocks)]
        for block in {piece.block for piece in child.slices}:
            after[block], after[blocks + block] = lossy_oracle.nesterov(
                means[block], before[block], before[blocks + block], outer.lr, outer.momentum
            )
        return after

    def _check_starts(
        self,
        parent: Manifest,
        before: Mapping[int, Values],
        brought: Mapping[PeerId, HandedIn],
        lives: Mapping[PeerId, PretendPeer],
    ) -> None:
        """What had its turn is begun from the committed values, or what a sole owner is ahead; the rest goes on."""
        counted = {entry.peer for entry in parent.roster}
        for peer, handed in brought.items():
            if peer not in counted:  # it may have had work that was not counted yet
                continue
            for block, start in handed.started.items():
                expected = self._masters(parent, before, peer, block)
                if (peer, block) in self.trained and self.lives[peer] is lives[peer]:
                    expected = expected + self.trained[peer, block]
                expected = self._with_ahead(parent, lives[peer], block, expected)
                assert np.array_equal(start, expected), f"block {block} at {peer} after round {parent.round}"

    def _with_ahead(self, parent: Manifest, life: PretendPeer, block: int, start: Values) -> Values:
        """And what it trained while the round of `parent` was synced."""
        ahead = life.ahead.get(parent.round - 1, {}).get(block)
        if ahead is None:
            return start
        snapshot = life.handed_in[parent.round - 1].values[block]
        return start + ((snapshot + ahead) - snapshot)

    def _not_done(self, child: Manifest, block: int, change: Values) -> Values:
        for tile_id in (tile_id for piece in child.slices for tile_id in piece.tile_ids):
            tile = self.swarm.layout.tiles[tile_id]
            if tile.block == block:
                change[tile.start : tile.stop] = 0.0
        return change

    def _masters(self, manifest: Manifest, values: Mapping[int, Values], peer: PeerId, block: int) -> Values:
        """What a peer trains on after a manifest that counted all its work."""
        sole = block > 0 and manifest.ownership[block - 1] == (peer,)
        return self.ledger.ahead(peer, block, values[block]) if sole else values[block]

    def _forget_the_dead(self, child: Manifest) -> None:
        """Who was killed before it settled the round that counts it has lost what rounding left of that round."""
        for peer, life in self.lives.items():
            applied = {event.commit.manifest.round for event in life.applied_events}
            if not life.is_up and max(applied, default=0) < child.round and (peer, child.round) not in self.kept:
                self.ledger.forget(peer, child.slices)

    def _life(self, name: PeerId, parent: Manifest) -> PretendPeer:
        lives = [life for life in self.swarm.lives if life.name == name]
        (found,) = [
            life for life in lives if parent.round in life.handed_in and life.handed_in[parent.round].manifest == parent
        ]
        return found
