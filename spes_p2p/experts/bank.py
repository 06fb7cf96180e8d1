"""All experts of one layer: what every peer needs for the forward pass, and what it trains.

The bank holds every expert in the compute dtype: three buffers, outside the state_dict and outside DDP. The masters
hold the owned experts in fp32: three parameters, or none where nothing is owned. `refresh` copies the masters into the
bank after an optimizer step. Owned experts lie first in the bank, so that their rows are first after the sort, and the
weight gradient of the owned experts alone is one product over the first `n_owned` group ends, with no host sync.

Legend: T tokens, K experts a token, N = T * K rows sorted by slot, D d_model, F expert ffn, E experts, O owned experts.
Leaves out: routing (model/router.py), kernels (backends.py), and who owns what (ownership).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spes_p2p.errors import ConfigError
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import gather_rows, return_rows, sort_by_slot

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")


class ExpertBank(nn.Module):
    """SwiGLU experts: y = down @ (silu(gate @ x) * (up @ x)); gate, up [F, D] and down [D, F] for each expert.

    Values are NaN until loaded, so that an expert that nobody loaded cannot go unseen.
    """

    _slot_E: Tensor

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        ffn: int,
        owned: Sequence[int],
        backend: Backend,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates the bank in `dtype` and the masters of `owned` in fp32. Raises ConfigError as `set_owned`."""
        super().__init__()
        self.num_experts, self.backend = num_experts, backend
        self.owned: tuple[int, ...] = ()
        self._slots: tuple[int, ...] = tuple(range(num_experts))
        shapes = {"gate": (ffn, d_model), "up": (ffn, d_model), "down": (d_model, ffn)}
        for which in MATRICES:
            bank = torch.full((num_experts, *shapes[which]), torch.nan, device=device, dtype=dtype)
            self.register_buffer(f"{which}_bank", bank, persistent=False)
            self.register_parameter(which, None)
        self.register_buffer("_slot_E", torch.arange(num_experts, device=device), persistent=False)
        self.set_owned(owned)

    def bank(self, which: Matrix) -> Tensor:
        """The bank of one matrix, [E, out, in], owned experts first (see `slot`)."""
        return cast(Tensor, getattr(self, f"{which}_bank"))

    def master(self, which: Matrix) -> nn.Parameter | None:
        """The fp32 master of one matrix, [O, out, in] in the order of `owned`, or None where nothing is owned."""
        return cast("nn.Parameter | None", getattr(self, which))

    def slot(self, expert: int) -> int:
        """Where an expert lies in the bank."""
        return self._slots[expert]

    def owned_mask(self) -> Tensor:
        """bool [E], True for owned experts, on the bank's device."""
        return self._slot_E < len(self.owned)

    @torch.no_grad()
    def set_owned(self, owned: Sequence[int]) -> None:
        """Changes which experts are trained. Experts that stay owned keep their master values.

        New masters take the bank's values: load the expert again where the bank is bf16. The masters become new
        Parameters without gradients, so the optimizer and DDP must be built again; with the same `owned`, nothing
        happens. Raises ConfigError unless `owned` is strictly rising and within 0..E-1.
        """
        owned = tuple(owned)
        if list(owned) != sorted(set(owned)) or not all(0 <= expert < self.num_experts for expert in owned):
            raise ConfigError(
                f"owned experts are {owned}, not rising numbers below num_experts ({self.num_experts})",
                fix=f"choose different ones from 0..{self.num_experts - 1}, in rising order",
            )
        if owned == self.owned:
            return
        kept = {which: {expert: self.read(expert, which) for expert in self.owned} for which in MATRICES}
        self._reorder(owned)
        for which in MATRICES:
            self._new_master(which, kept[which])

    def _reorder(self, owned: tuple[int, ...]) -> None:
        experts = [*owned, *(expert for expert in range(self.num_experts) if expert not in owned)]
        old_slots = torch.tensor([self._slots[expert] for expert in experts], device=self._slot_E.device)
        for which in MATRICES:
            setattr(self, f"{which}_bank", self.bank(which)[old_slots])
        self._slots = tuple(experts.index(expert) for expert in range(self.num_experts))
        self._slot_E.copy_(torch.tensor(self._slots))
        self.owned = owned

    def _new_master(self, which: Matrix, kept: dict[int, Tensor]) -> None:
        if not self.owned:
            setattr(self, which, None)
            return
        values = [kept.get(expert, self.bank(which)[self.slot(expert)]).float() for expert in self.owned]
        setattr(self, which, nn.Parameter(torch.stack(values)))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the masters into the bank. Call it after every optimizer step, never between forward and backward."""
        for which in MATRICES:
            master = self.master(which)
            if master is not None:
                self.bank(which)[: len(self.owned)].copy_(master)

    @torch.no_grad()
    def load(self, expert: int, which: Matrix, values: Tensor) -> None:
        """Writes one matrix [out, in] of one expert into the bank and, when owned, the master."""
        self.bank(which)[self.slot(expert)].copy_(values)
        master = self.master(which)
        if master is not None and expert in self.owned:
            master[self.slot(expert)].copy_(values)

    def read(self, expert: int, which: Matrix) -> Tensor:
        """One matrix [out, in] of one expert, as a view: the fp32 master when owned, else the bank's copy."""
        master = self.master(which)
        source = self.bank(which) if master is None or expert not in self.owned else master.detach()
        return source[self.slot(expert)]

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """y_TD = sum over k of weight[t, k] * expert[t, k](x[t]), in the bank's dtype; no token is dropped."""
        # autocast would undo the bank's dtype, which is the compute dtype already
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            order = sort_by_slot(self._slot_E[expert_TK], self.num_experts)
            x_ND = gather_rows(x_TD.to(self.bank("gate").dtype), order)
            hidden_NF = F.silu(self._product("gate", x_ND, order.ends_E)) * self._product("up", x_ND, order.ends_E)
            y_TKD = return_rows(self._product("down", hidden_NF, order.ends_E), order, expert_TK.shape[1])
            return torch.einsum("tkd,tk->td", y_TKD, weight_TK.to(y_TKD.dtype))

    def _product(self, which: Matrix, x_NK: Tensor, ends_E: Tensor) -> Tensor:
        return cast(Tensor, _GroupedLinear.apply(x_NK, self.bank(which), self.master(which), ends_E, self.backend))


class _GroupedLinear(torch.autograd.Function):
    """y[n] = w[group of n] @ x[n] through the whole bank; weight gradients for the masters alone.

    The masters take no part in the forward pass: they are an input so that autograd asks for their gradient. They
    always get one, of zeros where an expert saw no token, so that DDP never waits for it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, bank_EMK: Tensor, master_OMK: Tensor | None, ends_E: Tensor, backend: Backend
    ) -> Tensor:
        ctx.num_owned = 0 if master_OMK is None else master_OMK.shape[0]
        ctx.backend = backend
        ctx.save_for_backward(x_NK if ctx.num_owned else None, bank_EMK, ends_E)
        return backend.rows(x_NK, bank_EMK.transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x_NK, bank_EMK, ends_E = ctx.saved_tensors
        dx_NK = ctx.backend.rows(dy_NM, bank_EMK, ends_E) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return dx_NK, None, None, None, None
        dw_OMK = ctx.backend.outer(dy_NM, x_NK, ends_E[: ctx.num_owned])
        return dx_NK, None, dw_OMK.float(), None, None
