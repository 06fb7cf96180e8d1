"""A model of somebody else's as the trainer sees it: blocks in and out, who is trained, what its loss may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_p2p.errors import ConfigError
from spes_p2p.model.own import OwnModel


class Two(nn.Module):
    """A table, and two experts of which both see every token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 7) for _ in range(2))

    def forward(self, token_BS: Tensor) -> Tensor:
        hidden = self.table(token_BS)
        return torch.stack([expert(hidden) for expert in self.experts]).sum(0)


BLOCKS = [["table.weight"], *([f"experts.{e}.weight", f"experts.{e}.bias"] for e in range(2))]
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1]])


def next_token(module: nn.Module, token_BS: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(token_BS[:, :-1]).flatten(0, 1), token_BS[:, 1:].flatten())


def made() -> OwnModel:
    torch.manual_seed(0)
    return OwnModel(Two(), next_token, BLOCKS)


def test_blocks_go_in_and_come_out() -> None:
    model = made()
    for block, size in enumerate((21, 28, 28)):
        values = np.arange(size, dtype=np.float32) + block
        model.load_block(block, values)
        assert np.array_equal(model.read_block(block), values)
    assert model.module.get_parameter("experts.0.bias").tolist() == [22, 23, 24, 25, 26, 27, 28]
    assert [(name, part.start, part.stop) for name, part in model.pieces(1)] == [
        ("experts.0.weight", 0, 21),
        ("experts.0.bias", 21, 28),
    ]


def test_only_what_is_owned_gets_a_gradient_and_others_pass_it_on() -> None:
    model = made()
    model.set_owned([1])
    model(TOKENS).total.backward()
    parameters = dict(model.module.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == {
        "table.weight",
        "experts.1.weight",
        "experts.1.bias",
    }
    whole = made()
    whole.set_owned([0, 1])
    whole(TOKENS).total.backward()
    found, expected = (one.module.get_parameter("table.weight").grad for one in (model, whole))
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_masked_sequences_do_not_count() -> None:
    model = made()
    model.set_owned([0, 1])
    some = model(TOKENS, torch.tensor([False, True]))
    assert some.targets == 3
    assert torch.equal(some.cross_entropy, model(TOKENS[1:]).cross_entropy)
    nothing = model(TOKENS, torch.tensor([False, False]), 1.0, 0.0)
    nothing.total.backward()
    assert nothing.targets == 0
    gradient = model.module.get_parameter("table.weight").grad
    assert gradient is not None
    assert not gradient.any()


def test_it_is_measured_without_dropout() -> None:
    model = OwnModel(
        nn.Sequential(Two(), nn.Dropout(0.5)), next_token, [[f"0.{n}" for n, _ in Two().named_parameters()]]
    )
    with torch.no_grad():
        assert model(TOKENS).cross_entropy == model(TOKENS).cross_entropy
    model.set_owned([])
    assert model(TOKENS).cross_entropy != model(TOKENS).cross_entropy


def test_what_the_head_weighs_scales_the_total_alone() -> None:
    model = made()
    parts = model(TOKENS, None, 1.0, 0.5)
    assert parts.total.item() == pytest.approx(parts.cross_entropy.item() / 2)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda module, tokens: 1.0, "returned a float"),
        (lambda module, tokens: module(tokens), r"a tensor of shape \(2, 4, 7\)"),
        (lambda module, tokens: module(tokens).sum().detach(), "a number without a gradient"),
    ],
)
def test_a_loss_that_is_none_is_named(loss: object, named: str) -> None:
    model = OwnModel(Two(), loss, BLOCKS)  # type: ignore[arg-type]
    model.set_owned([0])
    with pytest.raises(ConfigError, match=named) as caught:
        model(TOKENS)
    assert "return the mean loss" in caught.value.fix
