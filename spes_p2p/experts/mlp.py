"""The experts of one layer as one differentiable function: everything from tokens to tokens.

Kept for the backward pass: the tokens, the gate and up products of all rows, the routing. Everything else is cheap to
make again: rows are gathered a second time, hidden values fall out of the pass that gives their gradient, and the
outputs of experts are needed by nobody, since the router's weight is applied before the last product (swiglu.py). Rows
and hidden values of experts that nothing is trained in are not made again.

The masters take no part in the forward pass: they are inputs so that autograd asks for their gradient, which is one
product over the rows of the first `n_owned` slots, added in place where that is allowed (gradients.py). They always get
one, of zeros where an expert saw no token, so that DDP never waits for it. The same holds for the coordinates of guests
(guests.py), which change foreign experts.

Legend: T tokens, K experts a token, N = T * K rows sorted by slot, D d_model, F expert ffn, E experts, O owned experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spes_p2p.experts import swiglu
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import Order
from spes_p2p.experts.gradients import sink
from spes_p2p.experts.guests import MATRICES, Guests
from spes_p2p.experts.stores import Store


def experts_of(
    x_TD: Tensor, weight_TK: Tensor, order: Order, store: Store, trained: Trained, backend: Backend
) -> Tensor:
    """y_TD = sum over k of weight[t, k] * down @ (silu(gate @ x) * (up @ x)) of the expert; no token is dropped."""
    guests = trained.guests if trained.guests is not None and trained.guests.active else None
    coordinates = (None,) * 3 if trained.guests is None else tuple(map(trained.guests.coordinates, MATRICES))
    arguments = (*order, store, trained.gate_up, trained.down, *coordinates, guests, backend)
    return cast(Tensor, _Experts.apply(x_TD, weight_TK, *arguments))


class Trained(NamedTuple):
    """What of the experts gets gradients: masters [O, out, in] of the owned ones, and what changes the others."""

    gate_up: Tensor | None
    down: Tensor | None
    guests: Guests | None


class _Experts(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (autograd sees tensors that are arguments alone)
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
        guest_gate: Tensor | None,
        guest_up: Tensor | None,
        guest_down: Tensor | None,
        guests: Guests | None,
        backend: Backend,
    ) -> Tensor:
        order = Order(order_N, inverse_TK, ends_E, slot_N)
        weight_N = weight_TK.flatten().index_select(0, order_N)
        thin = None if guests is None else guests.thin(x_TD.dtype)
        x_ND = backend.gather(x_TD, order, order.end_1(len(ends_E)))
        gate_up_N2F = backend.rows(x_ND, store.matrices("gate_up", master_gate_up).mT, ends_E)
        if thin is not None:
            for change, y_NF in zip(thin, gate_up_N2F.chunk(2, dim=1)):
                y_NF += change.product(x_ND, ends_E, backend)
        del x_ND
        hidden_NF = swiglu.forward(gate_up_N2F, weight_N)
        ctx.save_for_backward(x_TD, weight_N, gate_up_N2F, *order)
        ctx.store, ctx.backend = store, backend
        ctx.masters, ctx.guests = (master_gate_up, master_down), guests
        y_ND = backend.rows(hidden_NF, store.matrices("down", master_down).mT, ends_E)
        if thin is not None:
            y_ND += thin[-1].product(hidden_NF, ends_E, backend)
        return backend.combine(y_ND, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_N, gate_up_N2F, *order_parts = ctx.saved_tensors
        order, backend = Order(*order_parts), cast(Backend, ctx.backend)
        store, (gate_up, down) = cast(Store, ctx.store), ctx.masters
        thin = None if ctx.guests is None else cast(Guests, ctx.guests).thin(x_TD.dtype)
        all_1 = order.end_1(len(order.ends_E))
        trained_1 = all_1 if thin is not None else order.end_1(0 if gate_up is None else len(gate_up))
        dy_ND = backend.gather(dy_TD.to(x_TD.dtype), order, all_1)
        d_hidden_NF = backend.rows(dy_ND, store.matrices("down", down), order.ends_E)
        if thin is not None:
            d_hidden_NF += thin[-1].input_gradient(dy_ND, order.ends_E, backend)
        hidden_NF, d_gate_up_N2F, d_weight_N = swiglu.backward(d_hidden_NF, gate_up_N2F, weight_N, trained_1)
        d_guests: list[Tensor | None] = [None] * 3
        if thin is not None:
            d_guests[2] = thin[-1].gradient(dy_ND, hidden_NF, order.ends_E, backend)
        d_down = _weight_gradient(down, dy_ND, hidden_NF, order, backend)
        del dy_ND, d_hidden_NF, hidden_NF
        dx_TD = None
        halves = d_gate_up_N2F.chunk(2, dim=1)
        if ctx.needs_input_grad[0]:
            dx_ND = backend.rows(d_gate_up_N2F, store.matrices("gate_up", gate_up), order.ends_E)
            if thin is not None:
                for change, dy_NF in zip(thin, halves):
                    dx_ND += change.input_gradient(dy_NF, order.ends_E, backend)
            dx_TD = backend.combine(dx_ND, order)
            del dx_ND
        d_gate_up = None
        x_ND = None if gate_up is None and thin is None else backend.gather(x_TD, order, trained_1)
        if x_ND is not None:
            d_gate_up = _weight_gradient(gate_up, d_gate_up_N2F, x_ND, order, backend)
        if thin is not None and x_ND is not None:
            for at, (change, dy_NF) in enumerate(zip(thin, halves)):
                d_guests[at] = change.gradient(dy_NF, x_ND, order.ends_E, backend)
        d_weight_TK = d_weight_N[order.inverse_TK]
        return dx_TD, d_weight_TK, *(None,) * len(order), None, d_gate_up, d_down, *d_guests, None, None


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
