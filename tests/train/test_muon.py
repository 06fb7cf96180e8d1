"""Muon by its formula, written out matrix by matrix in fp64 with numpy; AdamW for the rest; what is kept and saved."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spes_p2p.checkpoint.private import read_private, write_private
from spes_p2p.planning.memory import OPTIMIZER, Workload, predict
from spes_p2p.train import muon
from spes_p2p.train.moment_store import Piece
from spes_p2p.train.muon import orthogonalised
from spes_p2p.train.schedule import learning_rate
from spes_p2p.train.trainer import Trainer
from tests.train.small import batch_of, same_bits, small_config, trainer_of, values_of

MUON = "optimizer.name=muon"


def newton_schulz(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    x = matrix / (np.sqrt((matrix**2).sum()) + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.T if transposed else x


def test_a_step_is_the_formula_for_each_matrix_and_adamw_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of a peer against the gradients that it had; stacks are cut small, so that there are several."""
    monkeypatch.setattr(muon, "STACK_VALUES", 300)
    config = small_config(MUON, "optimizer.grad_clip=0.5", "optimizer.weight_decay=0.2")
    trainer = trainer_of(config)
    learner = trainer.learner
    values = {(g.column, n): v.double().numpy().copy() for g, n, v in learner.trained_tensors()}
    momenta = {key: np.zeros_like(value) for key, value in values.items()}
    squares = {key: np.zeros_like(value) for key, value in values.items()}
    found: dict[tuple[int | None, str], NDArray[np.float64]] = {}
    update = learner.optimizer.step

    def look(lr: float) -> None:
        for group in learner.optimizer.groups:
            for name, place in group.tensors.items():
                assert place.gradient is not None
                found[group.column, name] = place.gradient.double().numpy().copy()
        update(lr)

    monkeypatch.setattr(learner.optimizer, "step", look)
    matrices = 0
    for step in range(1, 4):
        trainer.train_step(batch_of(step))
        lr = learning_rate(config, step)
        for key, w in values.items():
            g, m = found[key], momenta[key]
            column, name = key
            parts = 2 if name.endswith("gate_up") else 1
            if w.ndim == 2 and (column is not None or ".attention." in name):
                matrices += parts
                m[:] = 0.95 * m + g
                for rows in np.split(np.arange(len(w)), parts):
                    u = newton_schulz((g + 0.95 * m)[rows])
                    w[rows] = w[rows] * (1 - lr * 0.2) - lr * 0.2 * math.sqrt(max(u.shape)) * u
            else:
                m[:], v = 0.9 * m + 0.1 * g, squares[key]
                v[:] = 0.95 * v + 0.05 * g**2
                w *= 1 - lr * 0.2
                w -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
    layers, owned = config.model.num_layers, 2
    assert matrices == 3 * layers * (4 + 3 * owned)
    for group, name, trained in learner.trained_tensors():
        np.testing.assert_allclose(trained.numpy(), values[group.column, name], atol=2e-5)


def test_an_expert_that_no_token_goes_to_stays_where_it_is_and_goes_on_later() -> None:
    """Orthogonalised, its fading momentum would make steps as large as ever: AdamW's fade with it."""
    torch.manual_seed(0)
    kind = muon.Muon(small_config(MUON, "optimizer.weight_decay=0").optimizer)
    values, gradient = torch.randn(2, 16, 8).flatten(0, 1), torch.randn(32, 8)
    idle, fed = slice(0, 16), slice(16, 32)
    moments = kind.fresh(values, matrices=2)
    piece = Piece(values, gradient, moments, matrices=2)
    kind.update([piece], steps=1, lr=0.01)
    before, momentum = values.clone(), moments["momentum"].clone()
    gradient[idle] = 0
    for step in range(2, 300):
        kind.update([piece], step, lr=0.01)
    assert torch.equal(values[idle], before[idle])
    assert torch.equal(moments["momentum"][idle], momentum[idle])
    assert (values[fed] - before[fed]).norm() > 0.5 * before[fed].norm()
    gradient[idle] = 1e-3
    kind.update([piece], 300, lr=0.01)
    assert (values[idle] - before[idle]).norm() > 0.01


def test_all_directions_become_nearly_as_strong_as_each_other() -> None:
    stack = torch.randn(5, 24, 10, generator=torch.Generator().manual_seed(0))
    strengths = torch.linalg.svdvals(orthogonalised(stack))
    assert 0.6 < float(strengths.min()) < float(strengths.max()) < 1.25
    assert not orthogonalised(torch.zeros(2, 4, 6)).any()


def test_four_bytes_a_value_are_kept_of_matrices_as_planned() -> None:
    config = small_config(MUON)
    trainer = trainer_of(config)
    trainer.train_step(batch_of(0))
    sizes = {(group.column, name): values.numel() for group, name, values in trainer.learner.trained_tensors()}
    thin = sum(size for (column, name), size in sizes.items() if column is not None or ".attention." in name)
    norms = sum(size for (_, name), size in sizes.items() if ".attention." in name and "norm" in name)
    assert trainer.learner.held.moments == 4 * (thin - norms) + 8 * (sum(sizes.values()) - thin + norms)
    assert predict(Workload.of(config, 2)).parts[OPTIMIZER] == trainer.learner.held.moments


def test_it_learns() -> None:
    trainer, batch = trainer_of(small_config(MUON)), batch_of(0)
    losses = [trainer.train_step(batch).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def train(trainer: Trainer, steps: int, first: int = 0) -> list[float]:
    return [trainer.train_step(batch_of(seed)).loss for seed in range(first, first + steps)]


def test_an_interrupted_peer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, second = trainer_of(small_config(MUON)), trainer_of(small_config(MUON), owned=(2,))
    train(whole, 3)
    write_private(tmp_path, whole.private_state())
    second.load_private_state(read_private(tmp_path))
    assert train(second, 3, first=3) == train(whole, 3, first=3)
    assert same_bits(values_of(second), values_of(whole))


@pytest.mark.parametrize("names", [("muon", "adamw"), ("adamw", "muon")])
def test_a_peer_may_choose_anew_when_it_resumes(names: tuple[str, str]) -> None:
    first, second = (trainer_of(small_config(f"optimizer.name={name}")) for name in names)
    losses = train(first, 10)
    second.load_private_state(first.private_state())
    assert train(second, 10, first=10)[-1] < 1.1 * losses[-1]
