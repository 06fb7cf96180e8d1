"""Places and blocks: what the model takes and gives back. Names and order are tested in tests/interop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spes_p2p.errors import StateError
from spes_p2p.model.params import (
    ExpertPlace,
    SharedPlace,
    load_block,
    named_shared,
    read_block,
)
from spes_p2p.model.transformer import Transformer
from tests.model.tiny import init_normal_, tiny_config, tiny_model, tiny_tokens

TABLE = ([SharedPlace("norm.weight"), SharedPlace("layers.1.moe.router.weight")], [ExpertPlace(1, 4, "down")])


def test_a_block_is_its_tensors_one_after_the_other() -> None:
    model = tiny_model((4,))
    flat = np.arange(16 + 8 * 16, dtype=np.float32)
    load_block(model, TABLE, 0, flat)
    assert model.norm.weight.tolist() == list(range(16))
    assert named_shared(model)["layers.1.moe.router.weight"][0, 0] == 16
    assert (read_block(model, TABLE, 0) == flat).all()


@pytest.mark.parametrize("owned", [(), (4,), (1, 4)], ids=str)
def test_a_column_goes_into_the_bank_and_into_the_master_if_owned(owned: tuple[int, ...]) -> None:
    model, flat = tiny_model(owned), np.arange(16 * 24, dtype=np.float32)
    load_block(model, TABLE, 1, flat)
    bank, values = model.banks[1], torch.from_numpy(flat).view(16, 24)
    assert torch.equal(bank.store.read("down", bank.slot(4)), values)
    assert torch.equal(bank.read(4, "down"), values)
    assert (read_block(model, TABLE, 1) == flat).all()
    if owned:
        master = bank.master("down")
        assert master is not None
        assert torch.equal(master[owned.index(4)], values)


def test_read_only_memory_is_enough() -> None:
    flat = np.zeros(16 + 8 * 16, dtype=np.float32)
    flat.flags.writeable = False
    load_block(tiny_model(), TABLE, 0, flat)


@pytest.mark.parametrize("flat", [np.zeros(3, np.float32), np.zeros(144, np.float64), np.zeros((2, 72), np.float32)])
def test_a_block_of_another_size_or_type_is_refused(flat: np.ndarray) -> None:
    with pytest.raises(StateError, match=r"not float32 of shape \(144,\)"):
        load_block(tiny_model(), TABLE, 0, flat)


def test_random_values_do_not_depend_on_who_owns_what() -> None:
    tokens = tiny_tokens()
    alike = [tiny_model(owned).logits(tokens) for owned in ((), (0, 7), tuple(range(8)))]
    assert torch.allclose(alike[0], alike[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(alike[0], alike[2], rtol=1e-5, atol=1e-6)


def test_a_model_that_nobody_loaded_says_nan() -> None:
    model = Transformer(tiny_config(), (1,))
    assert model.logits(tiny_tokens()).isnan().all()
    init_normal_(model, 0)
    assert model.logits(tiny_tokens()).isfinite().all()
