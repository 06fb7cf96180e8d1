"""Documents of one sequence: each gets what it gets alone, in every way that the model can be computed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from spes_p2p.model.params import named_shared
from spes_p2p.model.transformer import Layer, Transformer
from tests.model.tiny import tiny_model

END = 18
MODES: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"num_kv_heads": 4},
    {"torch_compile": True},
    {"torch_compile": True, "activation_checkpointing": "full"},
    {"torch_compile": True, "activation_checkpointing": "selective"},
]


@pytest.fixture(autouse=True)
def _no_c_compiler_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: real(function, backend="aot_eager", **named))


def packed() -> Tensor:
    """Documents that begin and end inside, that are an end token alone, that go on beyond; and none that ends."""
    rows = [[3, 1, 4, END, 5, 9, 2, 6, END, END, 5, 3], [END, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, END], list(range(12))]
    return torch.tensor(rows)


def documents(row: list[int]) -> list[list[int]]:
    """Cut by hand: each with its end."""
    found: list[list[int]] = [[]]
    for token in row:
        found[-1].append(token)
        if token == END:
            found.append([])
    return [document for document in found if document]


def alone(model: Transformer, tokens: Tensor) -> Tensor:
    """Each document as a sequence of its own."""
    rows = [
        torch.cat([model.logits(torch.tensor([document]))[0] for document in documents(row)]) for row in tokens.tolist()
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("options", MODES)
def test_each_document_gets_what_it_gets_alone(options: dict[str, Any]) -> None:
    plain, model = tiny_model(**(options | {"torch_compile": False})), tiny_model(document_end=END, **options)
    expected, got = alone(plain, packed()), model.logits(packed())
    assert torch.allclose(got, expected, atol=2e-5)
    compiled = [cast(Layer, layer)._compiled for layer in model.layers]
    assert all((one is not None and one.is_compiled) == ("torch_compile" in options) for one in compiled)
    assert not torch.allclose(plain.logits(packed()), expected, atol=1e-2)
    target_BS = packed()[:, 1:]
    for logits in (expected, got):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target_BS.flatten()).backward()
    for name, value in named_shared(plain).items():
        gradient = named_shared(model)[name].grad
        assert gradient is not None
        assert value.grad is not None
        assert torch.allclose(gradient, value.grad, atol=1e-5), name


@pytest.mark.parametrize("options", MODES)
def test_the_loss_is_that_of_documents_alone(options: dict[str, Any]) -> None:
    """Every token but a sequence's first is a target, also the first of a document."""
    plain, model = tiny_model(num_kv_heads=options.get("num_kv_heads", 2)), tiny_model(document_end=END, **options)
    logits, target_BS = alone(plain, packed())[:, :-1], packed()[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target_BS.flatten())
    parts = model(packed())
    parts.total.backward()
    assert parts.cross_entropy.item() == pytest.approx(expected.item(), rel=1e-5)
    gradient = model.embedding.grad
    assert gradient is not None
    assert gradient.isfinite().all()


def test_nothing_of_another_document_is_seen() -> None:
    model, tokens = tiny_model(document_end=END), packed()
    changed = tokens.clone()
    changed[0, 5] = 11
    before, after = model.logits(tokens)[0], model.logits(changed)[0]
    differs = (before - after).abs().amax(-1) > 1e-4
    assert differs.tolist() == [5 <= place <= 8 for place in range(12)]


def test_autocast_masks_in_its_own_type() -> None:
    plain, model = tiny_model(), tiny_model(document_end=END)
    with torch.autocast("cpu", torch.bfloat16):
        got = model.logits(packed()).float()
    assert (got - alone(plain, packed())).abs().mean() < 0.05


def test_int32_tokens_are_taken_as_they_come() -> None:
    model = tiny_model(document_end=END)
    assert torch.equal(model.logits(packed()), model.logits(packed().int()))


def test_a_run_without_end_tokens_is_the_plain_model() -> None:
    plain, model, row = tiny_model(), tiny_model(document_end=END), packed()[2:]
    assert torch.allclose(plain.logits(row), model.logits(row), atol=1e-5)
