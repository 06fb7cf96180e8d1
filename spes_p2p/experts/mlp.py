"""The experts of one layer as one differentiable function: everything from tokens to tokens.

Kept for the backward pass: the tokens, the gate and up products of all rows, the routing. Everything else is cheap to
make again: rows are gathered a second time, hidden values fall out of the pass that gives their gradient, and the
outputs of experts are needed by nobody, since the router's weight is applied before the last product (swiglu.py).

The masters take no part in the forward pass: they are inputs so that autograd asks for their gradient, which is one
product over the rows of the first `n_owned` slots. They always get one, of zeros where an expert saw no token, so that
DDP never waits for it.

Legend: T tokens, K experts a token, N = T * K rows sorted by slot, D d_model, F expert ffn, E experts, O owned experts.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spes_p2p.experts import swiglu
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import Order
from spes_p2p.experts.stores import Store


def experts_of(
    x_TD: Tensor,
    weight_TK: Tensor,
    order: Order,
    store: Store,
    master_gate_up: Tensor | None,
    master_down: Tensor | None,
    backend: Backend,
) -> Tensor:
    """y_TD = sum over k of weight[t, k] * down @ (silu(gate @ x) * (up @ x)) of the expert; no token is dropped."""
    return cast(Tensor, _Experts.apply(x_TD, weight_TK, *order, store, master_gate_up, master_down, backend))


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_TK: Tensor,
        order_N: Tensor,
        inverse_TK: Tensor,
        ends_E: Tensor,
        slot_N: Tensor,
        store: Store,
        master_gate_up: Tensor | None,
        master_down: Tensor | None,
        backend: Backend,
    ) -> Tensor:
        order = Order(order_N, inverse_TK, ends_E, slot_N)
        weight_N = weight_TK.flatten().index_select(0, order_N)
        gate_up_N2F = backend.rows(backend.gather(x_TD, order), store.matrices("gate_up").mT, ends_E)
        hidden_NF = swiglu.forward(gate_up_N2F, weight_N)
        ctx.save_for_backward(x_TD, weight_N, gate_up_N2F, *order)
        ctx.store, ctx.backend = store, backend
        ctx.num_owned = 0 if master_down is None else master_down.shape[0]
        return backend.combine(backend.rows(hidden_NF, store.matrices("down").mT, ends_E), order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_N, gate_up_N2F, *order_parts = ctx.saved_tensors
        order, backend = Order(*order_parts), cast(Backend, ctx.backend)
        store, owned_ends = cast(Store, ctx.store), order.ends_E[: ctx.num_owned]
        dy_ND = backend.gather(dy_TD.to(x_TD.dtype), order)
        d_hidden_NF = backend.rows(dy_ND, store.matrices("down"), order.ends_E)
        hidden_NF, d_gate_up_N2F, d_weight_N = swiglu.backward(d_hidden_NF, gate_up_N2F, weight_N)
        d_down = backend.outer(dy_ND, hidden_NF, owned_ends) if ctx.num_owned else None
        del dy_ND, d_hidden_NF, hidden_NF
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_TD = backend.combine(backend.rows(d_gate_up_N2F, store.matrices("gate_up"), order.ends_E), order)
        d_gate_up = backend.outer(d_gate_up_N2F, backend.gather(x_TD, order), owned_ends) if ctx.num_owned else None
        d_weight_TK = d_weight_N[order.inverse_TK]
        return dx_TD, d_weight_TK, *(None,) * len(order), None, d_gate_up, d_down, None
