"""The model as a whole: causality, the losses against plain numpy, checkpointing, and construction without values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import ModelConfig
from spes_p2p.errors import ConfigError
from spes_p2p.experts.bank import MATRICES
from spes_p2p.experts.stores import PARTS
from spes_p2p.model.losses import LossParts, LossWeights
from spes_p2p.model.params import masters_of, named_shared
from spes_p2p.model.router import Router
from spes_p2p.model.transformer import Layer, Transformer
from tests.model.tiny import tiny_config, tiny_model, tiny_tokens

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))
Array = NDArray[np.float64]


def test_a_token_changes_nothing_before_it() -> None:
    model, tokens = tiny_model(), tiny_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 19
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[0, :7], after[0, :7], atol=1e-6)
    assert not torch.allclose(before[0, 7], after[0, 7], atol=1e-3)


def test_int32_tokens_are_taken_as_they_come() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    assert torch.equal(model(tokens).total, model(tokens.int()).total)


def logsumexp(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return np.asarray(np.log(np.exp(x - top).sum(-1)) + top[..., 0])


def routers(model: Transformer) -> list[Router]:
    return [cast(Layer, layer).moe.router for layer in model.layers]


def router_logits(model: Transformer, tokens: torch.Tensor) -> list[Array]:
    """What each layer's router computes, from a second look at its input."""
    seen: list[Array] = []

    def look(router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append((inputs[0].double() @ router.weight.double().T).detach().numpy())

    hooks = [router.register_forward_pre_hook(look) for router in routers(model)]
    model.logits(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def expected_parts(model: Transformer, tokens: torch.Tensor, counted: list[bool], factor: float) -> dict[str, float]:
    """The formulas of the losses in plain numpy."""
    logits, targets = model.logits(tokens).double().detach().numpy()[:, :-1], tokens.numpy()[:, 1:]
    total = logsumexp(logits)
    cross_entropy = total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    num_experts, top_k, balance, router_z = model.config.num_experts, model.config.top_k, 0.0, 0.0
    layers = router_logits(model, tokens)
    for router in layers:
        probability = np.exp(router - logsumexp(router)[:, None])
        chosen = np.argsort(-probability, axis=1)[:, :top_k]
        for expert in range(num_experts):
            weight = factor if expert in model.owned else 1.0
            balance += weight * float((chosen == expert).sum()) * float(probability[:, expert].mean())
        router_z += float((logsumexp(router) ** 2).mean())
    return {
        "cross_entropy": float(cross_entropy[counted].mean()),
        "load_balancing": num_experts / (len(layers) * tokens.numel() * top_k) * balance,
        "router_z": router_z,
        "output_z": float((total[counted] ** 2).mean()),
        "targets": float(targets[counted].size),
    }


@pytest.mark.parametrize(
    ("counted", "factor"), [([True] * 3, 1.0), ([True, False, True], 1.0), ([False, True, False], 0.7)]
)
def test_losses_equal_their_formulas(counted: list[bool], factor: float) -> None:
    model, tokens = tiny_model(), tiny_tokens()
    model.loss_weights = LossWeights(0.3, 0.2, 0.1)
    got: LossParts = model(tokens, torch.tensor(counted), owned_balance_factor=factor)
    want = expected_parts(model, tokens, counted, factor)
    scalars = {name: float(value) for name, value in got._asdict().items() if name not in ("total", "count_LE")}
    assert scalars == pytest.approx(want, rel=1e-5)
    assert got.count_LE.sum(dim=1).tolist() == [tokens.numel() * model.config.top_k] * model.config.num_layers
    sides = 0.3 * want["load_balancing"] + 0.2 * want["router_z"] + 0.1 * want["output_z"]
    assert float(got.total.detach()) == pytest.approx(want["cross_entropy"] + sides, rel=1e-5)


def test_weights_of_zero_leave_the_cross_entropy() -> None:
    model = tiny_model()
    model.loss_weights = LossWeights(0.0, 0.0, 0.0)
    parts = model(tiny_tokens())
    assert torch.equal(parts.total, parts.cross_entropy)


def test_nothing_counted_is_no_loss_and_no_nan() -> None:
    model = tiny_model()
    parts = model(tiny_tokens(), torch.tensor([False] * 3))
    parts.total.backward()
    assert float(parts.cross_entropy) == float(parts.targets) == 0.0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_even_routing_has_a_load_balancing_loss_of_one() -> None:
    model = tiny_model()
    with torch.no_grad():
        for router in routers(model):
            router.weight.zero_()
    assert float(model(tiny_tokens()).load_balancing) == pytest.approx(1.0)


CHECKPOINTING = ["none", "selective", "full"]


@pytest.mark.parametrize("mode", CHECKPOINTING[1:])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_no_value(mode: str, autocast: bool) -> None:
    """Over two micro-batches."""
    plain, thrifty = tiny_model(), tiny_model(activation_checkpointing=mode)
    losses: list[LossParts] = []
    for model in (plain, thrifty):
        for seed in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                parts = model(tiny_tokens(seed=seed), torch.tensor([True, False, True]))
            parts.total.backward()
        losses.append(parts)
    assert all(map(torch.equal, *losses))
    for left, right in zip(plain.parameters(), thrifty.parameters()):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_added_in_place_are_those_of_autograd(mode: str, autocast: bool) -> None:
    plain, direct = (tiny_model(activation_checkpointing=mode) for _ in range(2))
    direct.add_gradients_in_place()
    for seed, weight in enumerate((0.25, 0.75)):
        for model in (plain, direct):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                parts = model(tiny_tokens(seed=seed), torch.tensor([True, False, True]), 1.0, 0.5, weight)
            parts.total.backward()
    for left, right in zip(plain.parameters(), direct.parameters()):
        assert left.grad is not None
        assert right.grad is not None
        assert right.grad.dtype == torch.float32
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-5, atol=1e-6)


def test_a_weight_scales_the_whole_gradient_and_no_reported_part() -> None:
    one, half = tiny_model(), tiny_model()
    parts = one(tiny_tokens()), half(tiny_tokens(), None, 1.0, 1.0, 0.5)
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(parts[1].total, 0.5 * parts[0].total)
    for name in ("cross_entropy", "load_balancing", "router_z", "output_z"):
        torch.testing.assert_close(getattr(parts[1], name), getattr(parts[0], name))
    for left, right in zip(one.parameters(), half.parameters()):
        torch.testing.assert_close(right.grad, 0.5 * left.grad if left.grad is not None else None)


@pytest.mark.parametrize("mode", CHECKPOINTING)
def test_compiled_parts_have_the_same_values(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a second micro-batch and without gradients; captured and differentiated, but not made into kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = tiny_model(), tiny_model(activation_checkpointing=mode, torch_compile=True)
    for seed in range(2):
        for model in (plain, compiled):
            model(tiny_tokens(seed=seed)).total.backward()
    for left, right in zip(plain.parameters(), compiled.parameters()):
        assert left.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled.logits(tiny_tokens()), plain.logits(tiny_tokens()))


class _Storages(TorchDispatchMode):
    """Every memory that is made, and whether it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for storage, size in self._seen.values() if not storage.expired())


def test_checkpointing_keeps_less_and_selective_repeats_no_product() -> None:
    """Of the layers alone: what the loss needs is made before its backward pass and the same in all modes."""
    kept, products = [], []
    for mode in CHECKPOINTING:
        model = tiny_model(activation_checkpointing=mode)
        with _Storages() as storages:
            x_BSD, routings = model._hidden(tiny_tokens(4, 64))
            kept.append(storages.live_bytes())
            forward_products = storages.products
            (x_BSD.sum() + sum(routing.z_loss for routing in routings)).backward()
        products.append(storages.products - forward_products)
    none, selective, full = kept
    assert full < 0.5 * selective < 0.4 * none, kept
    assert products[0] == products[1] < products[2]


def parameters(model: ModelConfig) -> tuple[int, int]:
    """(shared, one expert column) by hand."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = {"none": 0, "full": queries + keys, "head": 2 * model.head_dim}[model.qk_norm] + 2 * model.d_model
    layer = 2 * model.d_model * (queries + keys) + norms + model.num_experts * model.d_model
    shared = 2 * model.embedding_rows * model.d_model + model.d_model + model.num_layers * layer
    return shared, model.num_layers * 3 * model.d_model * model.expert_ffn


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_run_builds_on_the_meta_device(path: Path) -> None:
    config = load_config(path, []).model
    shared, column = parameters(config)
    for owned in [(), (1, 3), tuple(range(config.num_experts))]:
        model = Transformer(config, owned, device="meta")
        assert sum(parameter.numel() for parameter in named_shared(model).values()) == shared
        assert sum(master.numel() for master in masters_of(model)) == len(owned) * column
        banks = sum(bank.matrices(part).numel() for bank in model.banks for part in PARTS)
        assert banks == config.num_experts * column
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_default_device_is_respected() -> None:
    with torch.device("meta"):
        assert Transformer(tiny_config(), (0,)).head.weight.is_meta


def test_owned_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"owned experts are \(8,\)"):
        Transformer(tiny_config(), (8,))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_bf16_autocast_is_close_to_fp32(kind: str) -> None:
    host = tiny_model(d_model=64, expert_ffn=64, init_std=0.05, top_k=8)  # rounding can flip no choice of all experts
    device = Transformer(host.config, host.owned, device=kind, expert_dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in named_shared(device).items():
            parameter.copy_(host.get_parameter(name))
    for theirs, ours in zip(host.banks, device.banks):
        for which in MATRICES:
            for expert in range(host.config.num_experts):
                ours.load(expert, which, theirs.read(expert, which))
    tokens = tiny_tokens(8, 32)
    want = host(tokens)
    with torch.autocast(kind, torch.bfloat16):
        got = device(tokens.to(kind))
    want.total.backward()
    got.total.backward()
    assert float(got.total.detach()) == pytest.approx(float(want.total.detach()), rel=2e-2)
    for left, right in zip(host.parameters(), device.parameters()):
        assert left.grad is not None
        assert right.grad is not None
        assert right.grad.dtype == torch.float32
        assert (left.grad - right.grad.cpu()).norm() <= 2e-2 * left.grad.norm()
