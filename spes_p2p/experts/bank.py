"""All experts of one layer: what every peer needs for the forward pass, and what it trains.

The store (stores.py) holds every expert in the compute dtype, or foreign ones alone and cheaper, outside the state_dict
and outside DDP. The masters hold the owned experts in fp32: two parameters, `gate_up` and `down`, or none where nothing
is owned; where the store has half of their bits, they have memory only inside `masters_in_fp32` (masters.py). Owned
experts have the first slots, so that their rows are first after the sort, and the weight gradient of the owned experts
alone is one product over the first `n_owned` group ends, with no host sync (mlp.py).

The world above knows three matrices an expert, as files name them; gate and up are the two halves of one here, so that
one product serves both.

Legend: T tokens, K experts a token, D d_model, F expert ffn, E experts, O owned experts.
Leaves out: routing (model/router.py), kernels (backends.py), and who owns what (ownership).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn

from spes_p2p.errors import ConfigError
from spes_p2p.experts.backends import Backend
from spes_p2p.experts.dispatch import key_dtype
from spes_p2p.experts.masters import halve, halves_of, take_out
from spes_p2p.experts.mlp import Routed, experts_of
from spes_p2p.experts.stores import PARTS, Dense, Foreign, Part, QuantizedStore, Store

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")


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
        if foreign is not None and foreign.dtype != "compute":
            self.store = QuantizedStore(shapes, device, dtype, foreign.dtype, foreign.workspace)
        else:
            self.store = Dense(shapes, device, dtype)
        for part in PARTS:
            self.register_parameter(part, None)
        self.register_buffer(
            "_slot_E", torch.arange(num_experts, device=device, dtype=key_dtype(num_experts)), persistent=False
        )
        self.set_owned(owned)

    def master(self, part: Part) -> nn.Parameter | None:
        """The fp32 master of one part, [O, out, in] in the order of `owned`, or None where nothing is owned.

        Its values are to be read and changed inside `masters_in_fp32`.
        """
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
            if master is not None and isinstance(self.store, Dense) and self.dtype == torch.bfloat16:
                halve(master, self.store.matrices(part)[: len(owned)])

    def _new_master(self, part: Part, owned: tuple[int, ...]) -> nn.Parameter | None:
        """With the values of the master or store of now."""
        if not owned:
            return None
        new = torch.empty(len(owned), *self.shapes[part], device=self._slot_E.device)
        for at, expert in enumerate(owned):
            new[at].copy_(self._read(part, expert))
        return nn.Parameter(new)

    def _read(self, part: Part, expert: int) -> Tensor:
        """[out, in] of an expert, to be read: as its master has it, else as the store does."""
        master, slot = self.master(part), self.slot(expert)
        if master is None or expert not in self.owned:
            return self.store.read(part, slot)
        halves = halves_of(master)
        return master.detach()[slot] if halves is None else halves.of(slot).read()

    def _reorder(self, owned: tuple[int, ...]) -> None:
        experts = [*owned, *(expert for expert in range(self.num_experts) if expert not in owned)]
        old_slots = [self._slots[expert] for expert in experts]
        self.store.reorder(old_slots, len(owned), {part: self.master(part) for part in PARTS})
        self._slots = tuple(experts.index(expert) for expert in range(self.num_experts))
        self._slot_E.copy_(torch.tensor(self._slots))
        self.owned = owned

    @contextmanager
    def masters_in_fp32(self) -> Iterator[None]:
        """Inside, masters may be read and changed; the forward pass sees it afterwards. Not between it and backward."""
        for part in PARTS:
            if (master := self.master(part)) is not None:
                take_out(master)
        try:
            yield
        finally:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Shows the masters to the forward pass, which `masters_in_fp32` does at its end."""
        for part in PARTS:
            if (master := self.master(part)) is not None:
                self.store.refresh(part, master)

    @torch.no_grad()
    def load(self, expert: int, which: Matrix, values: Tensor) -> None:
        """Writes one matrix [out, in] of one expert into the store and, when owned, the master."""
        part, rows = self.rows_of(which)
        values = values.to(self._slot_E.device)
        self.store.write(part, self.slot(expert), rows, values)
        master = self.master(part)
        if master is None or expert not in self.owned:
            return
        if halves := halves_of(master):
            halves.of(self.slot(expert)).write(values, rows)
        else:
            master[self.slot(expert), rows].copy_(values)

    def read(self, expert: int, which: Matrix) -> Tensor:
        """One matrix [out, in] of one expert, to be read: as its fp32 master has it when owned, else as the store."""
        part, rows = self.rows_of(which)
        return self._read(part, expert)[rows]

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """y_TD = sum over k of weight[t, k] * expert[t, k](x[t]), in the compute dtype; no token is dropped."""
        # autocast would undo the store's dtype, which is the compute dtype already
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            order = self.backend.sort(self._slot_E[expert_TK], self.num_experts)
            routed = Routed(order, self.store, self.backend)
            return experts_of(x_TD.to(self.dtype), weight_TK, self.master("gate_up"), self.master("down"), routed)
