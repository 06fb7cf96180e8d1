"""The experts of one layer as one differentiable function: everything from tokens to tokens.

Kept for the backward pass: the tokens, the gate and up products of all rows, the routing. Everything else is cheap to
make again: rows are gathered a second time, hidden values fall out of the pass that gives their gradient, and the
outputs of experts are needed by nobody, since the router's weight is applied before the last product (swiglu.py). Rows
and hidden values of experts that nothing is trained in are not made again.

The masters take no part in the forward pass: they are inputs so that autograd asks for their gradient, which is one
product over the rows of the first `n_owned` slots, added in place where that is allowed (gradients.py). They always get
one, of zeros where an expert saw no token, so that DDP never waits for it.

Legend: T tokens, K experts a token, N = T * K rows sorted by slot, D d_model, F expert ffn, E experts, O owned experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spes_p2p.experts import swiglu
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import Order
from spes_p2p.experts.gradients import sink
from spes_p2p.experts.stores import Store


@dataclass(frozen=True)
class Routed:
    """One pass through the experts of a layer: whose rows are whose, where the matrices are, and what multiplies."""

    order: Order
    store: Store
    backend: Backend


def experts_of(x_TD: Tensor, weight_TK: Tensor, gate_up: Tensor | None, down: Tensor | None, routed: Routed) -> Tensor:
    """y_TD = sum over k of weight[t, k] * down @ (silu(gate @ x) * (up @ x)) of the expert; no token is dropped.

    `gate_up`, `down`: the masters [O, out, in] of the owned experts, or None where nothing is owned.
    """
    return cast(Tensor, _Experts.apply(x_TD, weight_TK, gate_up, down, routed))


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, gate_up: Tensor | None, down: Tensor | None, routed: Routed
    ) -> Tensor:
        order, store, backend = routed.order, routed.store, routed.backend
        weight_N = weight_TK.flatten().index_select(0, order.order_N)
        x_ND = backend.gather(x_TD, order, order.end_1(len(order.ends_E)))
        gate_up_N2F = backend.rows(x_ND, store.matrices("gate_up", gate_up).mT, order.ends_E)
        del x_ND
        hidden_NF = swiglu.forward(gate_up_N2F, weight_N)
        ctx.save_for_backward(x_TD, weight_N, gate_up_N2F, *order)
        ctx.store, ctx.backend, ctx.masters = store, backend, (gate_up, down)
        y_ND = backend.rows(hidden_NF, store.matrices("down", down).mT, order.ends_E)
        return backend.combine(y_ND, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_N, gate_up_N2F, *order_parts = ctx.saved_tensors
        order, backend = Order(*order_parts), cast(Backend, ctx.backend)
        store, (gate_up, down) = cast(Store, ctx.store), ctx.masters
        trained_1 = order.end_1(0 if gate_up is None else len(gate_up))
        dy_ND = backend.gather(dy_TD.to(x_TD.dtype), order, order.end_1(len(order.ends_E)))
        d_hidden_NF = backend.rows(dy_ND, store.matrices("down", down), order.ends_E)
        hidden_NF, d_gate_up_N2F, d_weight_N = swiglu.backward(d_hidden_NF, gate_up_N2F, weight_N, trained_1)
        d_down = _weight_gradient(down, dy_ND, hidden_NF, order, backend)
        del dy_ND, d_hidden_NF, hidden_NF
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_ND = backend.rows(d_gate_up_N2F, store.matrices("gate_up", gate_up), order.ends_E)
            dx_TD = backend.combine(dx_ND, order)
            del dx_ND
        d_gate_up = None
        if gate_up is not None:
            x_ND = backend.gather(x_TD, order, trained_1)
            d_gate_up = _weight_gradient(gate_up, d_gate_up_N2F, x_ND, order, backend)
        return dx_TD, d_weight_N[order.inverse_TK], d_gate_up, d_down, None


def _weight_gradient(
    master: Tensor | None, dy_NM: Tensor, x_NK: Tensor, order: Order, backend: Backend
) -> Tensor | None:
    """Of a master [O, M, K], from the rows of its experts; None where there is none, or it has been added already."""
    if master is None:
        return None
    ends_O, gradient = order.ends_E[: master.shape[0]], sink(master)
    if gradient is None:
        return backend.outer(dy_NM, x_NK, ends_O)
    backend.add_outer(gradient, dy_NM, x_NK, ends_O)
    return None
