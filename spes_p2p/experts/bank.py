"""All experts of one layer: what every peer needs for the forward pass, and what it trains.

The store (stores.py) holds every expert in the compute dtype, or foreign ones alone and cheaper, outside the state_dict
and outside DDP. The masters hold the owned experts in fp32: two parameters, `gate_up` and `down`, or none where nothing
is owned. `refresh` tells the store of new masters after an optimizer step. Owned experts have the first slots, so that
their rows are first after the sort, and the weight gradient of the owned experts alone is one product over the first
`n_owned` group ends, with no host sync (mlp.py).

The world above knows three matrices an expert, as files name them; gate and up are the two halves of one here, so that
one product serves both.

Legend: T tokens, K experts a token, D d_model, F expert ffn, E experts, O owned experts.
Leaves out: routing (model/router.py), kernels (backends.py), and who owns what (ownership).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from spes_p2p.errors import ConfigError
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import key_dtype
from spes_p2p.experts.guests import MATRICES, Guests, Matrix
from spes_p2p.experts.mlp import Trained, experts_of
from spes_p2p.experts.stores import PARTS, Dense, Foreign, Part, QuantizedStore, Store

__all__ = ["MATRICES", "ExpertBank", "Matrix"]


class ExpertBank(nn.Module):
    """SwiGLU experts: y = down @ (silu(gate @ x) * (up @ x)); gate, up [F, D] and down [D, F] for each expert.

    Values are NaN until loaded, so that an expert that nobody loaded cannot go unseen.
    """

    _slot_E: Tensor

    def __init__(  # noqa: PLR0913 (the shape of a layer, and who computes it)
        self,
        num_experts: int,
        d_model: int,
        ffn: int,
        owned: Sequence[int],
        backend: Backend,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        foreign: Foreign | None = None,
    ) -> None:
        """Allocates the store in `dtype` and the masters of `owned` in fp32. Raises ConfigError as `set_owned`."""
        super().__init__()
        self.num_experts, self.backend, self.dtype = num_experts, backend, dtype
        self.owned: tuple[int, ...] = ()
        self._ffn = ffn
        self._slots: tuple[int, ...] = tuple(range(num_experts))
        self.shapes: dict[Part, tuple[int, int]] = {"gate_up": (2 * ffn, d_model), "down": (d_model, ffn)}
        """[out, in] of each part of one expert."""
        shapes = {part: (num_experts, *shape) for part, shape in self.shapes.items()}
        self.store: Store
        if foreign is not None and foreign.assembles_matrices:
            self.store = QuantizedStore(shapes, device, dtype, foreign)
        else:
            self.store = Dense(shapes, device, dtype)
        for part in PARTS:
            self.register_parameter(part, None)
        matrices = {which: self.shape_of(which) for which in MATRICES}
        rank = 0 if foreign is None else foreign.guest_rank
        self.guests = Guests(matrices, num_experts, rank, device, dtype) if rank else None
        self.register_buffer(
            "_slot_E", torch.arange(num_experts, device=device, dtype=key_dtype(num_experts)), persistent=False
        )
        self.set_owned(owned)

    def master(self, part: Part) -> nn.Parameter | None:
        """The fp32 master of one part, [O, out, in] in the order of `owned`, or None where nothing is owned."""
        return cast("nn.Parameter | None", getattr(self, part))

    def matrices(self, part: Part) -> Tensor:
        """[E, out, in] by slot, in the compute dtype; see Store.matrices."""
        return self.store.matrices(part, self.master(part))

    def slot(self, expert: int) -> int:
        """Where an expert lies in the store."""
        return self._slots[expert]

    def owned_mask(self) -> Tensor:
        """bool [E], True for owned experts, on the bank's device."""
        return self._slot_E < len(self.owned)

    def rows_of(self, which: Matrix) -> tuple[Part, slice]:
        """The part that holds a matrix, and its rows there."""
        if which == "down":
            return "down", slice(None)
        return "gate_up", slice(0, self._ffn) if which == "gate" else slice(self._ffn, 2 * self._ffn)

    def shape_of(self, which: Matrix) -> torch.Size:
        """[out, in] of a matrix."""
        part, rows = self.rows_of(which)
        out, width = self.shapes[part]
        return torch.Size((len(range(out)[rows]), width))

    @torch.no_grad()
    def set_owned(self, owned: Sequence[int]) -> None:
        """Changes which experts are trained. Experts that stay owned keep their master values.

        New masters take the store's values: load the expert again where they are rounded. The masters become new
        Parameters without gradients, so the optimizer and DDP must be built again; with the same `owned`, nothing
        happens. Raises ConfigError unless `owned` is strictly rising and within 0..E-1.
        """
        owned = tuple(owned)
        if list(owned) != sorted(set(owned)) or not all(0 <= expert < self.num_experts for expert in owned):
            raise ConfigError(
                f"owned experts are {owned}, which are not ascending numbers below num_experts ({self.num_experts})",
                fix=f"choose distinct ones from 0 to {self.num_experts - 1}, in ascending order",
            )
        if owned == self.owned:
            return
        masters = {part: self._new_master(part, owned) for part in PARTS}
        self._reorder(owned)
        for part, master in masters.items():
            setattr(self, part, master)

    def _new_master(self, part: Part, owned: tuple[int, ...]) -> nn.Parameter | None:
        """With the values of the master or store of now."""
        if not owned:
            return None
        new, old = torch.empty(len(owned), *self.shapes[part], device=self._slot_E.device), self.master(part)
        for at, expert in enumerate(owned):
            slot = self.slot(expert)
            new[at].copy_(self.store.read(part, slot) if old is None or expert not in self.owned else old[slot])
        return nn.Parameter(new)

    def _reorder(self, owned: tuple[int, ...]) -> None:
        experts = [*owned, *(expert for expert in range(self.num_experts) if expert not in owned)]
        old_slots = [self._slots[expert] for expert in experts]
        self.store.reorder(old_slots, len(owned), {part: self.master(part) for part in PARTS})
        if self.guests is not None:
            self.guests.reorder(old_slots, len(owned))
        self._slots = tuple(experts.index(expert) for expert in range(self.num_experts))
        self._slot_E.copy_(torch.tensor(self._slots))
        self.owned = owned

    @torch.no_grad()
    def refresh(self) -> None:
        """Shows the masters to the forward pass. Call it after every optimizer step, never before its backward."""
        for part in PARTS:
            master = self.master(part)
            if master is not None:
                self.store.refresh(part, master)

    @torch.no_grad()
    def load(self, expert: int, which: Matrix, values: Tensor) -> None:
        """Writes one matrix [out, in] of one expert into the store and, when owned, the master."""
        part, rows = self.rows_of(which)
        values = values.to(self._slot_E.device)
        self.store.write(part, self.slot(expert), rows, values)
        master = self.master(part)
        if master is not None and expert in self.owned:
            master[self.slot(expert), rows].copy_(values)

    def read(self, expert: int, which: Matrix) -> Tensor:
        """One matrix [out, in] of one expert: a view of the fp32 master when owned, else what the store holds."""
        part, rows = self.rows_of(which)
        master = self.master(part)
        if master is None or expert not in self.owned:
            return self.store.read(part, self.slot(expert))[rows]
        return master.detach()[self.slot(expert), rows]

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """y_TD = sum over k of weight[t, k] * expert[t, k](x[t]), in the compute dtype; no token is dropped."""
        # autocast would undo the store's dtype, which is the compute dtype already
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            order = self.backend.sort(self._slot_E[expert_TK], self.num_experts)
            trained = Trained(self.master("gate_up"), self.master("down"), self.guests)
            return experts_of(x_TD.to(self.dtype), weight_TK, order, self.store, trained, self.backend)
