"""Moments in 8 bits and gradients in bf16: close to AdamW in fp32, smaller, saved exactly, and handed over as fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from spes_p2p.checkpoint.private import read_private, write_private
from spes_p2p.errors import ConfigError
from spes_p2p.train import moment_store
from spes_p2p.train.kept_gradients import KeptGradients
from spes_p2p.train.moment_store import MOMENTS, SMALLEST_VALUES, EightBit, is_packed, stored_shapes, unpacked
from spes_p2p.train.step import accumulate_gradient
from spes_p2p.train.trainer import Trainer
from tests.train.small import batch_of, same_bits, small_config, trainer_of, values_of

EIGHT_BIT, BF16 = "optimizer.name=adamw8bit", "optimizer.gradient_dtype=bf16"


def wide_trainer(*overrides: str, owned: tuple[int, ...] = (1, 4)) -> Trainer:
    """Wide enough that experts and attention are kept in 8 bits."""
    return trainer_of(small_config("model.d_model=64", "model.expert_ffn=64", *overrides), owned)


def train(trainer: Trainer, steps: int, first: int = 0) -> list[float]:
    return [trainer.train_step(batch_of(seed)).loss for seed in range(first, first + steps)]


@pytest.mark.parametrize("chosen", [(EIGHT_BIT,), (BF16,), (EIGHT_BIT, BF16)], ids=str)
def test_it_trains_as_fp32_adamw_does(chosen: tuple[str, ...]) -> None:
    losses = [train(wide_trainer("optimizer.lr=0.003", *overrides), 20) for overrides in ((), chosen)]
    assert losses[0][-1] < 0.6 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_two_bytes_and_scales_a_value_instead_of_eight() -> None:
    plain, packed = wide_trainer(), wide_trainer(EIGHT_BIT)
    for trainer in (plain, packed):
        train(trainer, 1)
    sizes = [parameter.numel() for _, _, parameter in packed.rank.trained_tensors()]
    large, small = ([size for size in sizes if (size >= SMALLEST_VALUES) is wanted] for wanted in (True, False))
    assert plain.rank.held.moments == 8 * sum(sizes)
    assert packed.rank.held.moments == sum(2 * size + 2 * 4 * (size // 256) for size in large) + 8 * sum(small)
    assert packed.rank.held.moments < 0.35 * plain.rank.held.moments


def test_an_interrupted_peer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, second = wide_trainer(EIGHT_BIT), wide_trainer(EIGHT_BIT, owned=(2,))
    train(whole, 3)
    write_private(tmp_path, whole.private_state())
    second.load_private_state(read_private(tmp_path))
    assert train(second, 3, first=3) == train(whole, 3, first=3)
    assert same_bits(values_of(second), values_of(whole))


@pytest.mark.parametrize(
    ("before", "after"), [(EIGHT_BIT, "optimizer.name=adamw"), ("optimizer.name=adamw", EIGHT_BIT)]
)
def test_a_peer_may_choose_anew_when_it_resumes(before: str, after: str) -> None:
    first, second = wide_trainer(before), wide_trainer(after)
    train(first, 3)
    second.load_private_state(first.private_state())
    assert (second.rank.held.moments > first.rank.held.moments) is (before == EIGHT_BIT)
    assert train(second, 3, first=3) == pytest.approx(train(first, 3, first=3), rel=1e-2)


def test_moments_survive_packing_where_nothing_was_ever_seen() -> None:
    kind = EightBit(small_config().optimizer)
    zeros = {which: torch.zeros(70, 100) for which in MOMENTS}
    packed, fresh = kind.stored(zeros), kind.fresh(torch.zeros(70, 100))
    for kept in (packed, fresh):
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()} == stored_shapes(
            torch.Size((70, 100)), form="8bit"
        )
        assert all(not values.any() for values in unpacked(kept).values())
    assert kind.stored(packed) is packed
    assert not is_packed(kind.fresh(torch.zeros(SMALLEST_VALUES - 1)))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_gradients_that_are_stepped_in_pieces_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (wide_trainer(BF16, f"optimizer.name={name}") for _ in range(2))
    train(whole, 3)
    monkeypatch.setattr(moment_store, "PIECE_VALUES", 1024)
    train(parts, 3)
    assert same_bits(values_of(whole), values_of(parts))


def test_gradients_in_bf16_are_close_to_those_in_fp32() -> None:
    """Added up over four micro-batches, one of them without targets."""
    gradients = []
    for overrides in ((), (BF16,)):
        rank = wide_trainer("optimizer.micro_batch_sequences=2", *overrides).rank
        assert rank.forward is not None
        accumulate_gradient(rank.forward, batch_of(0, masked=(4, 5)), rank.ranks, 2, 1.0)
        kept = rank.forward.gradient if isinstance(rank.forward, KeptGradients) else lambda parameter: parameter.grad
        gradients.append({name: kept(parameter) for name, parameter in rank.model.named_parameters()})
    for name, exact in gradients[0].items():
        rounded = gradients[1][name]
        assert exact is not None
        assert rounded is not None
        assert rounded.dtype == torch.bfloat16
        assert (rounded - exact).norm() <= 2e-2 * exact.norm()


def test_gradients_in_bf16_take_half_the_memory_and_are_clipped_alike() -> None:
    plain, half = wide_trainer("optimizer.grad_clip=0.1"), wide_trainer("optimizer.grad_clip=0.1", BF16)
    results = [trainer.train_step(batch_of(0)) for trainer in (plain, half)]
    assert results[0].grad_norm > 0.2
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=2e-3)
    assert half.rank.held.gradients == plain.rank.held.gradients // 2
    exact, rounded = (trainer.rank.optimizer.groups[1].moments for trainer in (plain, half))
    for name, kept in exact.items():
        assert (rounded[name][MOMENTS[0]] - kept[MOMENTS[0]]).norm() <= 2e-2 * kept[MOMENTS[0]].norm()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    moment_store._bitsandbytes.cache_clear()
    with pytest.raises(ConfigError, match="bitsandbytes") as caught:
        wide_trainer(EIGHT_BIT)
    assert "scripts/venv.sh optim8bit" in caught.value.fix
    moment_store._bitsandbytes.cache_clear()
