"""What a peer trains in experts that it does not own: a low-rank change B Qᵀ of each foreign matrix, as their guest.

For each matrix W [out, in] of a foreign expert there is a basis Q [in, r] with orthonormal columns, the same at all
peers, and trained coordinates B [out, r], in fp32. The forward pass takes W + B Qᵀ for W: y += (x Q) Bᵀ; the gradient
is dB = dyᵀ (x Q). Both are thin products over the same groups of rows as those of the experts themselves (mlp.py): no
gradient has the shape of a foreign matrix, and nobody waits for the device. Owned experts, and those without a basis
yet, have Q = 0: their coordinates get gradients of zeros, and stay zero.

Legend: E experts by their slot in the store, N rows sorted by slot, r rank. Leaves out where a basis comes from, and
what becomes of the coordinates (sync/guests.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from spes_p2p.experts.backends import Backend

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")


class Thin(NamedTuple):
    """Low-rank changes of one matrix of every expert, in the compute dtype."""

    basis_EKr: Tensor
    coordinates_EMr: Tensor

    def product(self, x_NK: Tensor, ends_E: Tensor, backend: Backend) -> Tensor:
        """y_NM: what x @ (B Qᵀ)ᵀ adds."""
        return backend.rows(self.inner(x_NK, ends_E, backend), self.coordinates_EMr.mT, ends_E)

    def inner(self, x_NK: Tensor, ends_E: Tensor, backend: Backend) -> Tensor:
        """x Q, [N, r]."""
        return backend.rows(x_NK, self.basis_EKr, ends_E)

    def input_gradient(self, dy_NM: Tensor, ends_E: Tensor, backend: Backend) -> Tensor:
        """What it adds to dx [N, K]: (dy B) Qᵀ."""
        return backend.rows(backend.rows(dy_NM, self.coordinates_EMr, ends_E), self.basis_EKr.mT, ends_E)

    def gradient(self, dy_NM: Tensor, x_NK: Tensor, ends_E: Tensor, backend: Backend) -> Tensor:
        """dB [E, M, r] = dyᵀ (x Q)."""
        return backend.outer(dy_NM, self.inner(x_NK, ends_E, backend), ends_E)


class Guests(nn.Module):
    """The coordinates of all experts of a layer, [E, out, r] a matrix in the order of the store, and their bases."""

    def __init__(
        self,
        shapes: Mapping[Matrix, torch.Size],
        experts: int,
        rank: int,
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        """`shapes`: [out, in] of each matrix. All without a basis."""
        super().__init__()
        self.rank = rank
        self.active = True
        """Whether the forward pass adds the changes; off while the committed model is evaluated."""
        for which, (out, width) in shapes.items():
            self.register_parameter(which, nn.Parameter(torch.zeros(experts, out, rank, device=device)))
            basis_EKr = torch.zeros(experts, width, rank, device=device, dtype=dtype)
            self.register_buffer(f"{which}_basis", basis_EKr, persistent=False)

    def coordinates(self, which: Matrix) -> nn.Parameter:
        """[E, out, r] in fp32."""
        return cast(nn.Parameter, getattr(self, which))

    def basis(self, which: Matrix) -> Tensor:
        """[E, in, r] in the compute dtype."""
        return cast(Tensor, getattr(self, f"{which}_basis"))

    @torch.no_grad()
    def begin(self, slot: int, which: Matrix, basis_Kr: Tensor | None) -> None:
        """Another basis, or none, for one matrix of one expert. What is carried on is what B does within both.

        B becomes B Qᵀ Q', so zero it before where nothing is to be carried on.
        """
        basis, own = self.basis(which)[slot], self.coordinates(which)[slot]
        before = basis.to(torch.float32, copy=True)
        basis.zero_() if basis_Kr is None else basis.copy_(basis_Kr)
        own.copy_(own @ (before.T @ basis.float()))

    @torch.no_grad()
    def reorder(self, old_slots: Sequence[int], num_owned: int) -> None:
        """Slot s becomes what slot `old_slots[s]` was; the first `num_owned` are owned, and no guest's any more."""
        for which in MATRICES:
            for tensor in (self.coordinates(which), self.basis(which)):
                tensor.copy_(tensor[list(old_slots)])
                tensor[:num_owned].zero_()

    def thin(self, dtype: torch.dtype) -> tuple[Thin, Thin, Thin]:
        """Of gate, up and down for one pass through the experts: made again for the backward pass, not kept."""
        gate, up, down = (Thin(self.basis(which), self.coordinates(which).detach().to(dtype)) for which in MATRICES)
        return gate, up, down
