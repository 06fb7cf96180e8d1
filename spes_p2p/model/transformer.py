"""The decoder-only MoE transformer, from tokens to logits or to the loss. Hugging Face names live in interop/hf.py.

Each layer: x += attention(norm(x)); x += experts(norm(x)). The output head is not tied to the embedding. Values are NaN
until loaded (params.py). Nothing here knows peers, rounds or optimizers.

Legend: B sequences, S positions, N counted positions of all sequences, D d_model, V embedding rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spes_p2p.config.schema import ModelConfig
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.choice import LayerShape, resolve_backend
from spes_p2p.experts.gradients import add_in_place
from spes_p2p.experts.kernels import half_dtype
from spes_p2p.experts.stores import PARTS, Foreign
from spes_p2p.model.attention import Attention, Context, context_of
from spes_p2p.model.compiling import Compiled, compiles_on
from spes_p2p.model.layers import Linear, RMSNorm, embedded, unloaded
from spes_p2p.model.losses import LossParts, LossWeights, combine, target_weight
from spes_p2p.model.output_loss import head_sums
from spes_p2p.model.router import Router, Routing


class MoE(nn.Module):
    """A router and its bank of experts: y = sum of the chosen experts' outputs, weighted by the router.

    No shared expert, no capacity limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        owned: Sequence[int],
        backend: Backend,
        device: torch.device | None,
        dtype: torch.dtype,
        foreign: Foreign | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(config, device)
        self.experts = ExpertBank(
            config.num_experts, config.d_model, config.expert_ffn, owned, backend, device, dtype, foreign
        )

    def route(self, x_BSD: Tensor) -> Routing:
        """Which experts will see the tokens of [B, S, D]."""
        return cast(Routing, self.router(x_BSD.flatten(0, 1)))

    def forward(self, x_BSD: Tensor, routing: Routing) -> Tensor:
        """[B, S, D] to [B, S, D], with the tokens routed so."""
        return cast(Tensor, self.experts(x_BSD.flatten(0, 1), routing.expert_TK, routing.weight_TK)).view_as(x_BSD)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        owned: Sequence[int],
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        foreign: Foreign,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.rms_eps, device)
        self.attention = Attention(config, device)
        self.moe_norm = RMSNorm(config.d_model, config.rms_eps, device)
        self.moe = MoE(config, owned, backend, device, dtype, foreign)
        self._compiled = Compiled(self._before_experts) if compiles_on(device, config.torch_compile) else None

    def forward(self, x_BSD: Tensor, context: Context, selective: bool = False) -> tuple[Tensor, Routing]:
        """[B, S, D] to [B, S, D], and how the tokens were routed.

        With `selective`, what is cheap is computed again in the backward pass, as compiled code does in any case. The
        experts keep little as it is.
        """
        compiled = self._compiled if self._compiled is not None and self._compiled.is_compiled else None
        before: Callable[..., tuple[Tensor, Tensor, Routing]] = compiled or self._before_experts
        if selective and compiled is None:
            before = partial(recomputed_but_products, before)
        x_BSD, normed_BSD, routing = before(x_BSD, context)
        return x_BSD + self.moe(normed_BSD, routing), routing

    def _before_experts(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Routing]:
        """The residual stream after attention, its norm, and the routing of that."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        normed_BSD = self.moe_norm(x_BSD)
        return x_BSD, normed_BSD, self.moe.route(normed_BSD)


class Transformer(nn.Module):
    """The model of one peer: everything for the forward pass, trainable where it is shared or owned."""

    def __init__(
        self,
        config: ModelConfig,
        owned: Sequence[int],
        loss_weights: LossWeights | None = None,
        device: torch.device | str | None = None,
        expert_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocates the model; `device` may be "meta".

        `owned` are the expert columns trained here. `expert_dtype`, the dtype of the banks, is by default bf16 on CUDA
        (fp16 on older cards) and fp32 elsewhere. Raises ConfigError for owned experts out of range or a backend that
        does not run here.
        """
        super().__init__()
        device = torch.get_default_device() if device is None else torch.device(device)
        dtype = expert_dtype or (half_dtype(device) if device.type == "cuda" else torch.float32)
        self.config = config
        self.loss_weights = loss_weights or LossWeights()
        self.backend, _ = resolve_backend(
            config.expert_backend,
            device,
            dtype,
            LayerShape(config.num_experts, config.top_k, config.d_model, config.expert_ffn, len(owned)),
        )
        self.embedding = unloaded(config.embedding_rows, config.d_model, device=device)
        foreign = Foreign(config.foreign_dtype)
        self.layers = nn.ModuleList(
            Layer(config, owned, self.backend, device, dtype, foreign) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, config.rms_eps, device)
        self.head = Linear(config.d_model, config.embedding_rows, device)
        # DDP reads this: it must neither compare nor broadcast the banks, which ranks refresh alike by themselves
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    @property
    def banks(self) -> tuple[ExpertBank, ...]:
        """The expert bank of each layer."""
        return tuple(cast(Layer, layer).moe.experts for layer in self.layers)

    @property
    def owned(self) -> tuple[int, ...]:
        """The expert columns trained here."""
        return self.banks[0].owned

    def set_owned(self, owned: Sequence[int]) -> None:
        """Changes the expert columns trained here in every layer (see ExpertBank.set_owned for what must follow)."""
        for bank in self.banks:
            bank.set_owned(owned)

    def add_gradients_in_place(self) -> None:
        """Of the experts, the head and the embedding, as long as `set_owned` makes no new ones. Not under DDP."""
        masters = (bank.master(part) for bank in self.banks for part in PARTS)
        for parameter in (self.embedding, self.head.weight, *masters):
            if parameter is not None:
                add_in_place(parameter)

    @contextmanager
    def masters_in_fp32(self) -> Iterator[None]:
        """Those of all banks at once (see ExpertBank.masters_in_fp32), which takes as much memory."""
        with ExitStack() as stack:
            for bank in self.banks:
                stack.enter_context(bank.masters_in_fp32())
            yield

    def logits(self, token_BS: Tensor) -> Tensor:
        """Next-token logits [B, S, V] in the compute dtype."""
        x_BSD, _ = self._hidden(token_BS)
        return cast(Tensor, self.head(x_BSD))

    def forward(
        self,
        token_BS: Tensor,
        counted_B: Tensor | None = None,
        owned_balance_factor: float = 1.0,
        head_factor: float = 1.0,
        weight: float = 1.0,
    ) -> LossParts:
        """The losses of predicting positions 1..S-1 of each sequence from what stands before them.

        `counted_B` (bool) leaves whole sequences out of the cross entropy and the output z-loss. `owned_balance_factor`
        scales the load-balancing term of owned experts (the decayed auxiliary loss of the SPES code). `head_factor`
        scales cross entropy and output z-loss in the total: what this micro-batch's targets weigh beside its tokens;
        `weight` scales all of the total. Where gradients are added in place, scale it so and in no other way.
        """
        x_BSD, routings = self._hidden(token_BS)
        target_BS = token_BS[:, 1:].long()
        counted_BS = torch.ones_like(target_BS, dtype=torch.float32)
        if counted_B is not None:
            counted_BS = counted_BS * counted_B[:, None]
        targets = counted_BS.sum()
        sums = head_sums(
            x_BSD[:, :-1].flatten(0, 1),
            self.head.weight,
            target_BS.flatten(),
            counted_BS.flatten() * target_weight(targets, head_factor, weight),
            self.loss_weights.output_z,
        )
        factor_E = torch.where(self.banks[0].owned_mask(), owned_balance_factor, 1.0)
        return combine(sums, targets, routings, factor_E, self.loss_weights, head_factor, weight)

    def _hidden(self, token_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        """The normalised last hidden states [B, S, D], and the routing of each layer."""
        x_BSD = embedded(token_BS, self.embedding)
        context = context_of(token_BS, self.config)
        routings = []
        for layer in self.layers:
            x_BSD, routing = self._run(layer, x_BSD, context)
            routings.append(routing)
        return self.norm(x_BSD), routings

    def _run(self, layer: nn.Module, x_BSD: Tensor, context: Context) -> tuple[Tensor, Routing]:
        mode = self.config.activation_checkpointing if torch.is_grad_enabled() else "none"
        if mode == "full":
            return recomputed(layer, x_BSD, context)
        return cast("tuple[Tensor, Routing]", layer(x_BSD, context, mode == "selective"))


Result = TypeVar("Result")

_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recomputed(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), all of it once more in the backward pass."""
    return cast(Result, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))


def recomputed_but_products(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), once more in the backward pass save for what is costly: matrix products and attention."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return cast(Result, result)


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
