"""Strangers who lie, beside trusted peers: real trainers and the arithmetic of slices, without a network.

A liar knows all that honest peers changed in the round, and what the rule is. Each of its changes has, in every slice,
the length and the cosine with the honest mean that honest ones have, where the attack is not a cruder one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import numpy as np
import torch
from numpy.typing import NDArray

from spes_p2p.config.schema import Config
from spes_p2p.data.loader import LocalLoader, held_out_batches
from spes_p2p.data.manifest import Dataset
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout
from spes_p2p.model.params import read_block
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout, Tile, Values
from spes_p2p.sync.slice_mean import hand_out, sent_values
from spes_p2p.sync.trusted_mean import CHUNK, LARGEST_PULL, trusted_mean
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.step import accumulate_gradient
from spes_p2p.train.trainer import Trainer

CPU = torch.device("cpu")
CLIMB_BATCHES = 16
"""Batches of which a liar's gradient is made."""
ASCENT_STEPS = 5
ROW = 32
"""Of the head: the logit of a frequent byte, the space."""
HEAD = "lm_head.weight"
Blocks = dict[int, Values]
"""The values of blocks that somebody has, or changes of them."""


class State(Blocks):
    """A block source."""

    def block(self, index: int) -> Values:
        return self[index]


@dataclass(frozen=True)
class Scene:
    """What a liar sees of a slice in a round: changes, fp32."""

    own: Values
    """Its own: honest, or trained on turned labels where its attack says so."""
    honest: NDArray[np.float32]
    """Of all who are honest, [N, size]."""
    harm: Values
    """The direction of its attack; zeros where that leaves the slice alone."""
    rng: np.random.Generator

    @property
    def mean(self) -> Values:
        found: Values = self.honest.mean(0)
        return found


def disguised(scene: Scene) -> Values:
    """As long as honest changes and as near to their mean; all else of it points to the harm."""
    middle = scene.mean / max(float(np.linalg.norm(scene.mean)), 1e-30)
    lengths = np.maximum(np.linalg.norm(scene.honest, axis=1), 1e-30)
    cosine = float(np.median(scene.honest @ middle / lengths)) if len(lengths) > 1 else 0.75
    across = scene.harm - middle * float(scene.harm @ middle)
    size = float(np.linalg.norm(across))
    if size == 0:
        return scene.own
    made: Values = np.median(lengths) * (cosine * middle + np.sqrt(max(0.0, 1 - cosine**2)) / size * across)
    return made.astype(np.float32)


def noise(scene: Scene) -> Values:
    """Random values, as long as an honest change."""
    random = scene.rng.standard_normal(len(scene.own), np.float32)
    return random * np.float32(np.linalg.norm(scene.honest[0]) / np.linalg.norm(random))


@dataclass(frozen=True)
class Attack:
    """`values` makes the change to a slice. `harm`: which direction it takes, "" where it has none."""

    values: Callable[[Scene], Values]
    harm: str = ""
    turns_labels: bool = False


ATTACKS: Mapping[str, Attack] = {
    "turned-sign": Attack(lambda scene: -scene.mean),
    "times-1000": Attack(lambda scene: 1000 * scene.mean),
    "noise": Attack(noise),
    "nothing": Attack(lambda scene: np.zeros_like(scene.mean)),
    "copy": Attack(lambda scene: scene.honest[0].copy()),
    "alie": Attack(lambda scene: scene.mean - scene.honest.std(0)),
    "inner-product": Attack(lambda scene: np.float32(-0.5) * scene.mean),
    "turned-labels": Attack(lambda scene: scene.own, turns_labels=True),
    "poison": Attack(lambda scene: disguised(replace(scene, harm=scene.own)), turns_labels=True),
    "mix": Attack(disguised, "fixed"),
    "row": Attack(disguised, "row"),
    "climb": Attack(disguised, "gradient"),
    "ascent": Attack(disguised, "ascent"),
}
"""`alie` is arXiv 1902.06156, `inner-product` 1903.03936. `mix` hides one random direction, the same in all rounds;
`climb` the way in which the loss rises, `row` turns one row of the head around. `ascent` climbs in several steps from
where the honest mean leads to, as far as honest changes differ in each chunk: the most that somebody could do who knew
that mean before it is made."""


@dataclass(frozen=True)
class Cast:
    """Who takes part: the first `trusted` of `peers` are trusted, the last `liars` lie."""

    peers: int
    trusted: int
    liars: int = 0
    attack: str = ""


@dataclass
class Trial:
    """A run of `cast`. `plain`: with the plain weighted mean of all instead of the rule."""

    config: Config
    dataset: Dataset
    cast: Cast
    plain: bool = False
    counted: list[float] = field(default_factory=list)
    """Of each change of a liar to a slice; of a stranger where nobody lies."""

    def __post_init__(self) -> None:
        self.layout: Layout = state_layout(self.config)
        initial = InitialState(self.layout, self.config.run.seed, self.config.model.init_std)
        self.base = State({block.index: np.array(initial.block(block.index)) for block in self.layout.model_blocks})
        self._attack = ATTACKS.get(self.cast.attack)
        self._honest = self.cast.peers - self.cast.liars
        training = self.cast.peers if self._attack is not None and self._attack.turns_labels else self._honest
        names = [PeerId(f"peer-{number:03d}") for number in range(training + 1)]
        self._trainers = [Trainer(self.config, self.layout, CPU) for _ in names]
        self._loaders = [LocalLoader(self.dataset, self.config, name) for name in names]
        self._unsent: dict[tuple[int, int], Values] = {}

    def loss(self, rounds: int, steps: int) -> float:
        """Held-out, after so many rounds."""
        for number in range(rounds):
            self._round(number, steps)
        evaluator = self._trainers[-1]
        evaluator.adopt((), self.base, 0)
        return evaluator.evaluate(held_out_batches(self.dataset, self.config, self.config.eval.sequences))

    def owned(self, peer: int) -> tuple[int, ...]:
        """The expert columns that it trains: of all experts in turn."""
        experts = self.config.model.num_experts
        return tuple(sorted((peer + at) % experts for at in range(self.config.swarm.experts_per_peer)))

    def _round(self, number: int, steps: int) -> None:
        trained = [self._trained(peer, number * steps, steps) for peer in range(len(self._trainers) - 1)]
        harm = self._harm(trained[: self._honest])
        after = State({block: values.copy() for block, values in self.base.items()})
        most = self.config.sync.slice_tiles
        for block in self.layout.model_blocks:
            every = self.layout.tiles_of(block.index)
            for tiles in (every[at : at + most] for at in range(0, len(every), most)):
                part = slice(tiles[0].start, tiles[-1].stop)
                after[block.index][part] = self._reduced(number, tiles, trained, harm)
        self.base = after

    def _trained(self, peer: int, step: int, steps: int) -> Blocks:
        trainer, owned = self._trainers[peer], self.owned(peer)
        trainer.adopt(owned, self.base, step)
        for _ in range(steps):
            batch = self._loaders[peer].next_batch(self.config.optimizer.batch_sequences)
            if peer >= self._honest:
                batch = replace(batch, tokens=self.config.model.vocab_size - 1 - batch.tokens)
            trainer.train_step(batch)
        return {block: trainer.contribution(block) for block in (0, *(1 + column for column in owned))}

    def _reduced(self, number: int, tiles: Sequence[Tile], trained: Sequence[Blocks], harm: Blocks) -> Values:
        """The new values of a slice, as its reducer hands them out."""
        block, part = tiles[0].block, slice(tiles[0].start, tiles[-1].stop)
        before = self.base[block][part]
        who = [peer for peer in range(self.cast.peers) if block == 0 or block - 1 in self.owned(peer)]
        roles = [peer < self.cast.trusted for peer in who]
        if not any(roles):
            return before
        own = {peer: trained[peer][block][part] - before for peer in who if peer < len(trained)}
        honest = np.stack([own[peer] for peer in who if peer < self._honest])
        values = []
        for at, peer in enumerate(who):
            change = own.get(peer, honest[at % len(honest)])
            if peer >= self._honest and self._attack is not None:
                rng = np.random.default_rng((self.config.run.seed, number, peer, tiles[0].id))
                change = self._attack.values(Scene(change, honest, harm[block][part], rng))
            values.append(self._sent(peer, tiles, before + change, before))
        if self.plain:
            roles = [True] * len(who)
        found, counted = trusted_mean(values, before, [1] * len(who), roles)
        first = self._honest if self.cast.liars else self.cast.trusted
        self.counted += [count for count, peer in zip(counted, who, strict=True) if peer >= first]
        return self._sent(-1, tiles, found, before)

    def _sent(self, peer: int, tiles: Sequence[Tile], values: Values, before: Values) -> Values:
        """What arrives of values, by the run's codec; what it loses goes along the next time. -1: of the reducer."""
        if self.layout.codec_of(tiles[0].block) == "fp32":
            return values
        made = hand_out(self.layout, tiles, values, before, lambda tile: self._unsent.get((peer, tile)))
        for tile, (_, left) in zip(tiles, made, strict=True):
            assert left is not None
            self._unsent[peer, tile.id] = left
        return sent_values(self.layout, tiles, memoryview(b"".join(bytes(data) for data, _ in made)), before)

    def _harm(self, honest: Sequence[Blocks]) -> Blocks:
        """The direction of the attack, of all values; `honest`: what those who do not lie have trained."""
        kind = self._attack.harm if self._attack is not None else ""
        if kind == "gradient":
            gradient = self._gradient(self.base)
            small = np.float32(1e-4 * max(float(np.abs(values).max()) for values in gradient.values()))
            return {block: np.divide(values, np.abs(values) + small) for block, values in gradient.items()}
        if kind == "ascent":
            return self._ascent(honest)
        harm = {block: np.zeros_like(values) for block, values in self.base.items()}
        if kind == "row":
            block, *_ = self.layout.locate(HEAD)
            self.layout.view(harm[block], HEAD)[ROW] = -self.layout.view(self.base[block], HEAD)[ROW]
        elif kind == "fixed":
            rng = np.random.default_rng(self.config.run.seed)
            harm = {block: rng.standard_normal(len(values), np.float32) for block, values in harm.items()}
        return harm

    def _ascent(self, honest: Sequence[Blocks]) -> Blocks:
        """Steps up the loss, each as long in every chunk as honest changes differ there; see `ATTACKS`."""
        found = {
            block: [one[block] for one in honest if block in one] or [values] for block, values in self.base.items()
        }
        means: Blocks = {block: np.mean(values, axis=0) for block, values in found.items()}
        spreads = {block: _chunk_lengths(np.std(values, axis=0)) for block, values in found.items()}
        harm = {block: np.zeros_like(values) for block, values in self.base.items()}
        for _ in range(ASCENT_STEPS):
            here = State({block: means[block] + np.float32(LARGEST_PULL / 2) * harm[block] for block in harm})
            for block, slope in self._gradient(here).items():
                summed = harm[block] + _stretched(slope, spreads[block])
                harm[block] = _stretched(summed, spreads[block])
        return harm

    def _gradient(self, at: State) -> Blocks:
        """Of the loss, by text of the liars' own."""
        trainer, loader = self._trainers[-1], self._loaders[-1]
        trainer.adopt(tuple(range(self.config.model.num_experts)), at, 0)
        model, settings = trainer.learner.model, self.config.optimizer
        batch = loader.next_batch(CLIMB_BATCHES * settings.batch_sequences)
        accumulate_gradient(model, batch, Ranks(device=CPU), settings.micro_batch_sequences, 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
        trainer.learner.clear_gradients()
        return {
            block.index: read_block(model, trainer.learner.table, block.index) for block in self.layout.model_blocks
        }


def _chunk_lengths(values: Values) -> Values:
    """Of the chunk that each value is in."""
    starts = np.arange(0, len(values), CHUNK)
    lengths: Values = np.sqrt(np.add.reduceat(np.square(values), starts)).astype(np.float32)
    return np.repeat(lengths, CHUNK)[: len(values)]


def _stretched(values: Values, lengths: Values) -> Values:
    """So that each chunk is as long as `lengths` say."""
    return np.multiply(values, lengths / np.maximum(_chunk_lengths(values), np.float32(1e-30)), dtype=np.float32)


def mean_counted(trials: Sequence[Trial]) -> float | None:
    """How much of what liars gave counted, in all trials; of strangers where nobody lies."""
    found = [count for trial in trials for count in trial.counted]
    return mean(found) if found else None
