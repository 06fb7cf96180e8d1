"""What a rank trains in columns of others: AdamW or Muon in coordinates, by the gradients that owners would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.checkpoint.private import read_private, write_private
from spes_p2p.config.schema import Config
from spes_p2p.ids import Hash
from spes_p2p.interop.hf import place_table
from spes_p2p.model.params import ExpertPlace
from spes_p2p.planning.memory import Workload, guest_bytes
from spes_p2p.planning.sizes import Sizes
from spes_p2p.state.basis import Basis, first_basis, matrices
from spes_p2p.state.layout import Values
from spes_p2p.train.schedule import learning_rate
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import LocalRanks
from tests.train.small import (
    CPU,
    batch_of,
    initial,
    largest_difference,
    small_config,
    small_layout,
    transformer_of,
    values_of,
)

RANK, OWNED = 3, (1, 4)
FOREIGN = (0, 2, 3, 5)


def guest_config(*overrides: str) -> Config:
    return small_config(f"model.guest_rank={RANK}", "optimizer.grad_clip=1e6", *overrides)


def mark(number: int) -> Hash:
    return Hash(bytes([number]) * 32)


def bases(config: Config, columns: tuple[int, ...] = FOREIGN, number: int = 0) -> dict[int, Basis]:
    return {column: first_basis(small_layout(config), column, mark(number)) for column in columns}


def guest(config: Config, columns: tuple[int, ...] = FOREIGN) -> Trainer:
    trainer = Trainer(config, small_layout(config), CPU)
    trainer.adopt(OWNED, initial(config), 0)
    trainer.use_bases(bases(config, columns))
    return trainer


def full_gradients(config: Config) -> dict[int, list[torch.Tensor]]:
    """Of every matrix of every column, by a model that owns them all: plain autograd, in the order of the blocks."""
    everything = Trainer(config, small_layout(config), CPU)
    everything.adopt(tuple(range(config.model.num_experts)), initial(config), 0)
    rank = everything.rank
    transformer_of(rank)(torch.from_numpy(batch_of(0).tokens)).total.backward()
    found: dict[int, list[torch.Tensor]] = {}
    for column in range(config.model.num_experts):
        for place in place_table(config.model)[1 + column]:
            assert isinstance(place, ExpertPlace)
            bank = transformer_of(rank).banks[place.layer]
            part, rows = bank.rows_of(place.which)
            master = bank.master(part)
            assert master is not None
            assert master.grad is not None
            found.setdefault(column, []).append(master.grad[bank.slot(column), rows])
    return found


def inside(config: Config) -> dict[int, list[torch.Tensor]]:
    """The full gradient of every matrix of foreign columns in the coordinates of its basis."""
    found, gradients = {}, full_gradients(config)
    for column, basis in bases(config).items():
        pairs = zip(gradients[column], matrices(small_layout(config), column, basis.values), strict=True)
        found[column] = [gradient @ torch.from_numpy(q) for gradient, (_, q) in pairs]
    return found


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_coordinates_do_not_decay(name: str) -> None:
    """Without a gradient they stay as they are, while what is owned shrinks."""
    trainer = guest(guest_config(f"optimizer.name={name}", "optimizer.weight_decay=0.5"))
    trainer.train_step(batch_of(0))
    before, owned = trainer.coordinates(), trainer.rank.contribution(1 + OWNED[0])
    for group in (*trainer.rank.optimizer.groups, *trainer.rank.optimizer.guests.values()):
        group.moments.clear()
    trainer.rank.optimizer.step(0.1, torch.zeros_like)
    after = trainer.coordinates()
    assert all(np.array_equal(after[column].values, before[column].values) for column in FOREIGN)
    assert before[FOREIGN[0]].values.any()
    np.testing.assert_allclose(trainer.rank.contribution(1 + OWNED[0]), 0.95 * owned, rtol=1e-5)


def test_a_step_is_adamw_in_the_coordinates() -> None:
    config = guest_config()
    trainer, gradients = guest(config), inside(config)
    trainer.train_step(batch_of(0))
    lr = learning_rate(config, 1)
    for column, coordinates in trainer.coordinates().items():
        assert coordinates.mark == mark(0)
        flat = torch.cat([each.flatten() for each in gradients[column]])
        wanted = -lr * flat / (flat.abs() + config.optimizer.eps)  # the first step of AdamW, whatever its betas
        found, large = torch.from_numpy(coordinates.values), flat.abs() > 1e-5
        assert float((found - wanted).abs()[large].max()) < 1e-2 * lr
        assert bool(large.any())


def test_with_muon_a_step_is_muon_in_the_coordinates() -> None:
    """The first one by singular vectors: each direction of the gradient moves by nearly one step's size."""
    config = guest_config("optimizer.name=muon")
    trainer, gradients = guest(config), inside(config)
    trainer.train_step(batch_of(0))
    size = learning_rate(config, 1) * 0.2
    for column, coordinates in trainer.coordinates().items():
        at, flat = 0, torch.from_numpy(coordinates.values)
        for gradient in gradients[column]:
            step = flat[at : at + gradient.numel()].view(gradient.shape) / (size * max(gradient.shape) ** 0.5)
            at += gradient.numel()
            left, strengths, right = torch.linalg.svd(gradient, full_matrices=False)
            along = -(left.mT @ step @ right.mT)
            off = (along - along.diagonal().diag()).abs().max()
            assert float(strengths.min()) > 0
            assert 0.6 < float(along.diagonal().min()) < float(along.diagonal().max()) < 1.25
            assert float(off) < 0.02


@pytest.mark.parametrize(("name", "kept"), [("adamw", 2), ("muon", 1)])
def test_foreign_experts_themselves_are_not_trained(name: str, kept: int) -> None:
    config, alone = (small_config(f"optimizer.name={name}", f"model.guest_rank={rank}") for rank in (RANK, 0))
    trainer = guest(config)
    rank = trainer.rank
    before = {column: rank.trained.read_block(1 + column) for column in FOREIGN}
    for seed in range(3):
        trainer.train_step(batch_of(seed))
    assert all(np.array_equal(rank.trained.read_block(1 + column), before[column]) for column in FOREIGN)
    thin = config.model.num_layers * (2 * config.model.expert_ffn + config.model.d_model) * RANK * 4
    plain = Trainer(alone, small_layout(alone), CPU)
    plain.adopt(OWNED, initial(alone), 0)
    plain.train_step(batch_of(0))
    assert trainer.rank.held.gradients - plain.rank.held.gradients == config.model.num_experts * thin
    assert trainer.rank.held.moments - plain.rank.held.moments == len(FOREIGN) * kept * thin
    assert trainer.rank.held.trained - plain.rank.held.trained == len(FOREIGN) * thin
    work = Workload.of(config, len(OWNED))
    values = config.model.num_experts * (thin + work.compute_bytes * Sizes.of(config.model).bases)
    assert guest_bytes(work) == values + len(FOREIGN) * kept * thin


def test_it_learns_what_it_could_not_without() -> None:
    config = guest_config("optimizer.lr=0.01")
    losses = []
    for columns in ((), FOREIGN):
        trainer, batch = guest(config, columns), batch_of(0)
        for _ in range(20):
            trainer.train_step(batch)
        committed = trainer.evaluate([batch])
        losses.append(trainer.train_step(batch).loss)
        if columns:  # what is committed has no guests' changes
            assert committed > 1.005 * losses[-1]
        else:
            assert committed == pytest.approx(losses[-1], rel=1e-5)
    assert losses[1] < losses[0]


def test_coordinates_go_on_in_the_same_basis_and_begin_anew_in_another() -> None:
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    before = trainer.coordinates()
    trainer.adopt(OWNED, initial(config), 1)
    trainer.use_bases(bases(config) | bases(config, (2,), number=1))
    after = trainer.coordinates()
    assert after[2].mark == mark(1)
    assert not after[2].values.any()
    assert all(np.array_equal(after[column].values, before[column].values) for column in (0, 3, 5))
    trainer.use_bases(bases(config, (0, 3)))
    assert set(trainer.coordinates()) == {0, 3}


def carried_over(config: Config, values: Values, column: int = 2) -> Values:
    """B Qᵀ Q' of coordinates in a column, from its first basis to its next one."""
    layout, at, parts = small_layout(config), 0, list[Values]()
    old, new = (bases(config, (column,), number)[column].values for number in (0, 1))
    for (placed, q), (_, q_new) in zip(matrices(layout, column, old), matrices(layout, column, new), strict=True):
        stop = at + placed.tensor.shape[0] * RANK
        parts.append((values[at:stop].reshape(-1, RANK) @ q.T @ q_new).reshape(-1).astype(np.float32))
        at = stop
    return np.concatenate(parts)


def test_what_was_trained_ahead_is_carried_into_the_next_basis() -> None:
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    handed_in = trainer.coordinates()[2].values
    trainer.run_ahead()
    trainer.train_step(batch_of(1))
    ahead = trainer.coordinates()[2].values - handed_in
    trainer.adopt(OWNED, initial(config), 1)
    trainer.use_bases(bases(config) | bases(config, (2,), number=1))
    np.testing.assert_allclose(trainer.coordinates()[2].values, carried_over(config, ahead), atol=1e-6)
    assert ahead.any()


def test_what_was_trained_ahead_is_carried_also_where_other_columns_are_owned_from_now_on() -> None:
    """The experts lie elsewhere then. What is owned now, or was until now, has nothing ahead as a guest."""
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    handed_in = trainer.coordinates()
    trainer.run_ahead()
    trainer.train_step(batch_of(1))
    ahead = trainer.coordinates()[2].values - handed_in[2].values
    bank = transformer_of(trainer.rank).banks[0]
    slot = bank.slot(2)
    trainer.adopt((0,), initial(config), 1)
    assert bank.slot(2) != slot
    trainer.use_bases(bases(config, tuple(range(6))) | bases(config, (2,), number=1))
    found = trainer.coordinates()
    np.testing.assert_allclose(found[2].values, carried_over(config, ahead), atol=1e-6)
    assert ahead.any()
    assert set(found) == {1, 2, 3, 4, 5}
    assert not found[1].values.any()


def test_who_was_left_out_carries_all_of_it_into_the_next_basis() -> None:
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    trainer.run_ahead()
    trainer.train_step(batch_of(1))
    whole = trainer.coordinates()
    trainer.adopt(OWNED, initial(config), 1)
    trainer.use_bases(bases(config) | bases(config, (2,), number=1), left_out=FOREIGN)
    found = trainer.coordinates()
    np.testing.assert_allclose(found[2].values, carried_over(config, whole[2].values), atol=1e-6)
    assert found[2].values.any()
    assert all(np.array_equal(found[column].values, whole[column].values) for column in (0, 3, 5))


def test_work_in_a_column_that_a_round_did_not_take_in_is_carried_beside_what_it_took() -> None:
    """Columns 2 and 3 have new bases: the work in 2 was taken in, that in 3 was not, as it had no turn."""
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    whole = trainer.coordinates()
    trainer.adopt(OWNED, initial(config), 1)
    trainer.use_bases(bases(config) | bases(config, (2, 3), number=1), left_out=(3, 5))
    found = trainer.coordinates()
    assert not found[2].values.any()
    np.testing.assert_allclose(found[3].values, carried_over(config, whole[3].values, 3), atol=1e-6)
    assert found[3].values.any()
    assert all(np.array_equal(found[column].values, whole[column].values) for column in (0, 5))


def test_a_parked_guest_carries_on_nothing_that_a_round_has_taken_in() -> None:
    """A round counts it and gives column 2 another basis; then rounds leave it out, which give it to 2 and 3."""
    config = guest_config()
    parked, other = guest(config, tuple(range(6))), guest(config, tuple(range(6)))
    for trainer in (parked, other):
        trainer.adopt((), initial(config), 0)
        trainer.train_step(batch_of(0))
    parked.park()
    second = bases(config) | bases(config, (2,), number=1)
    for trainer in (parked, other):
        for news, left_out in ((second, ()), (second | bases(config, (2, 3), number=2), range(6))):
            trainer.adopt((), initial(config), 1)
            trainer.use_bases(news, left_out)
    assert parked.rank.parked is not None
    parked.wake()
    found, wanted = parked.coordinates(), other.coordinates()
    assert not wanted[2].values.any()
    assert wanted[3].values.any()
    assert all(np.array_equal(found[column].values, wanted[column].values) for column in FOREIGN)
    parked.use_bases(second)  # what came while it was parked is not done once more
    wanted = parked.coordinates()
    parked.park()
    parked.wake()
    found = parked.coordinates()
    assert all(np.array_equal(found[column].values, wanted[column].values) for column in FOREIGN)
    assert [found[column].mark for column in FOREIGN] == [wanted[column].mark for column in FOREIGN]


def test_columns_that_change_hands() -> None:
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    before = trainer.coordinates()
    trainer.adopt((2, 4), initial(config), 1)
    trainer.use_bases(bases(config, (0, 1, 2, 3, 4, 5)))  # peers know the bases of their own columns, too
    after = trainer.coordinates()
    assert set(after) == {0, 1, 3, 5}
    assert not after[1].values.any()
    assert all(np.array_equal(after[column].values, before[column].values) for column in (0, 3, 5))
    trainer.train_step(batch_of(1))
    assert trainer.coordinates()[1].values.any()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_interrupted_guest_goes_on_bit_for_bit_in_the_same_basis(tmp_path: Path, name: str) -> None:
    config = guest_config(f"optimizer.name={name}")
    whole, second = guest(config), Trainer(config, small_layout(config), CPU)
    whole.train_step(batch_of(0))
    write_private(tmp_path, whole.private_state())
    second.adopt(OWNED, initial(config), 0)
    second.load_private_state(read_private(tmp_path))
    second.use_bases(bases(config) | bases(config, (2,), number=1))
    found, before = second.coordinates(), whole.coordinates()
    assert all(np.array_equal(found[column].values, before[column].values) for column in (0, 3, 5))
    assert not found[2].values.any()
    whole.use_bases(bases(config) | bases(config, (2,), number=1))
    assert second.train_step(batch_of(1)).loss == whole.train_step(batch_of(1)).loss
    after, again = whole.coordinates(), second.coordinates()
    assert all(np.array_equal(after[column].values, again[column].values) for column in FOREIGN)


def test_a_running_guest_goes_back_to_what_was_saved(tmp_path: Path) -> None:
    config = guest_config()
    trainer = guest(config)
    trainer.train_step(batch_of(0))
    saved = trainer.coordinates()
    write_private(tmp_path, trainer.private_state())
    losses = [trainer.train_step(batch_of(seed)).loss for seed in (1, 2)]
    trainer.adopt((1, 3), initial(config), 1)  # and from 3 it is no guest any more
    trainer.use_bases(bases(config, (0, 2, 5)))
    trainer.adopt(OWNED, initial(config), 0)
    trainer.load_private_state(read_private(tmp_path))
    trainer.use_bases(bases(config))
    found = trainer.coordinates()
    assert all(np.array_equal(found[column].values, saved[column].values) for column in FOREIGN)
    assert [trainer.train_step(batch_of(seed)).loss for seed in (1, 2)] == losses
    trainer.load_private_state(read_private(tmp_path))
    trainer.use_bases(bases(config, (0, 3)))
    assert set(trainer.coordinates()) == {0, 3}
    for bank in transformer_of(trainer.rank).banks:
        assert bank.guests is not None
        assert not bank.guests.coordinates("up")[bank.slot(2)].any()
        assert not bank.guests.basis("up")[bank.slot(2)].any()


@pytest.mark.parametrize("names", [("muon", "adamw"), ("adamw", "muon")])
def test_an_interrupted_guest_may_go_on_with_another_optimizer(tmp_path: Path, names: tuple[str, str]) -> None:
    first, then = (guest_config(f"optimizer.name={name}") for name in names)
    whole, second = guest(first), Trainer(then, small_layout(then), CPU)
    whole.train_step(batch_of(0))
    write_private(tmp_path, whole.private_state())
    second.adopt(OWNED, initial(then), 0)
    second.load_private_state(read_private(tmp_path))
    second.use_bases(bases(then))
    assert np.array_equal(second.coordinates()[2].values, whole.coordinates()[2].values)
    second.train_step(batch_of(1))
    assert np.isfinite(second.coordinates()[2].values).all()
    assert not np.array_equal(second.coordinates()[2].values, whole.coordinates()[2].values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("micro", "sharding", "name"),
    [(8, "none", "adamw"), (2, "none", "adamw"), (2, "none", "muon"), (2, "zero2", "adamw"), (2, "zero3", "adamw")],
)
def test_two_ranks_are_one_guest(micro: int, sharding: str, name: str) -> None:
    config = guest_config(
        f"optimizer.name={name}",
        f"optimizer.micro_batch_sequences={micro}",
        "optimizer.load_balancing_weight=0.0",
        "optimizer.eps=1e-3",
        f"optimizer.sharding={sharding}",
    )
    one = guest(config)
    with LocalRanks(2, CPU) as ranks:
        two = Trainer(config, small_layout(config), CPU, ranks.ranks)
        two.adopt(OWNED, initial(config), 0)
        two.use_bases(bases(config))
        for seed in range(3):
            one.train_step(batch_of(seed))
            two.train_step(batch_of(seed))
        assert len(set(two.value_hashes())) == 1
        assert largest_difference(values_of(two), values_of(one)) < 1e-5
        for column, coordinates in two.coordinates().items():
            np.testing.assert_allclose(coordinates.values, one.coordinates()[column].values, atol=1e-6)
        two.close()
