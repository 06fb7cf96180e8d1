"""A run small enough that a step takes milliseconds, and its state, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.loader import Batch
from spes_p2p.interop.hf import state_layout
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.initial import InitialState
from spes_p2p.state.layout import Layout, Values
from spes_p2p.train import learner
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.trainer import Trainer

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCABULARY = 32

_SMALL = (
    f"model.vocab_size={VOCABULARY}",
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_experts=6",
    "model.expert_ffn=8",
    "model.init_std=0.1",
    "data.sequence_length=12",
    "optimizer.batch_sequences=8",
    "optimizer.lr=0.01",
    "scheduler.warmup_steps=0",
    "sync.steps_per_round=100",
    "sync.tile_values=1024",
    "swarm.experts_per_peer=2",
)


def small_config(*overrides: str) -> Config:
    return load_config(bundled_config("tiny"), [*_SMALL, *overrides])


def small_layout(config: Config) -> Layout:
    return state_layout(config)


def initial(config: Config) -> InitialState:
    """The state of step 0."""
    return InitialState(small_layout(config), config.run.seed, config.model.init_std)


def trainer_of(config: Config, owned: tuple[int, ...] = (1, 4), step: int = 0, ranks: Ranks | None = None) -> Trainer:
    """A trainer that has adopted the initial state."""
    trainer = Trainer(config, small_layout(config), CPU, ranks)
    trainer.adopt(owned, initial(config), step)
    return trainer


def batch_of(seed: int, sequences: int = 8, masked: tuple[int, ...] = ()) -> Batch:
    """Random sequences in which each token follows from the one before, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    tokens = (rng.integers(VOCABULARY, size=(sequences, 1)) + 3 * np.arange(12)) % VOCABULARY
    mask = np.ones(sequences, np.bool_)
    mask[list(masked)] = False
    return Batch(tokens.astype(np.int64), mask, np.arange(sequences, dtype=np.int64))


def values_of(trainer: Trainer) -> dict[int, Values]:
    """Everything that is trained, by block."""
    return {block: trainer.contribution(block) for block in (0, *(1 + column for column in trainer.learner.owned))}


def same_bits(left: dict[int, Values], right: dict[int, Values]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[block], right[block]) for block in left)


def largest_difference(left: dict[int, Values], right: dict[int, Values]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[block] - right[block]).max()) for block in left)


class Blocks:
    """A block source from a function, for states that differ from the initial one."""

    def __init__(self, block: Callable[[int], Values]) -> None:
        self._block = block

    def block(self, index: int) -> Values:
        return self._block(index)


class SmallDevice:
    """A hook of the model that runs out of memory as a GPU does, in the middle of the forward pass.

    It holds so many sequences at once, and twice as many where layers are computed again.
    """

    def __init__(self, trainer: Trainer, sequences: int) -> None:
        self.model, self.sequences = trainer.learner.model, sequences
        self.model.layers[1].register_forward_pre_hook(self)

    def __call__(self, layer: object, inputs: tuple[torch.Tensor, ...]) -> None:
        room = self.sequences * (2 if self.model.config.activation_checkpointing == "full" else 1)
        if torch.is_grad_enabled() and len(inputs[0]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words")


@contextmanager
def in_bf16() -> Iterator[None]:
    """Trainers made inside have experts in bf16, the rest in fp32, as on a GPU: masters are halved."""
    with patch.object(learner, "Transformer", partial(Transformer, expert_dtype=torch.bfloat16)):
        yield
