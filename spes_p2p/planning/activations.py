"""Bytes that one micro-batch leaves on the device between forward and backward pass, by the shapes of our model.

T = B S tokens, N = T K rows of experts, c bytes a value in the compute dtype (2: bf16 on CUDA, 4: fp32 on a CPU). The
residual stream, norms and router are fp32; products are in the compute dtype. Symbols as in `sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.schema import ModelConfig
from spes_p2p.planning.units import MIB

LOGITS_CHUNK_BYTES = 512 * MIB
"""Most logits that the loss holds at once, in the compute dtype (model/output_loss.py)."""
_TILE_ROWS = 256
_ALIGNED_LOGITS = 64


@dataclass(frozen=True)
class Activations:
    """One micro-batch of one rank. All in bytes."""

    model: ModelConfig
    tokens: int
    """T."""
    compute_bytes: int
    """c."""
    checkpointing: str

    def kept(self) -> int:
        """What all layers keep until the backward pass, and the input of the head.

        none: everything of a layer. full: only its input [T, D] in fp32; the rest is made again, one layer at a time.
        selective: as none, without what is cheap to make again (see `selective`).
        """
        return self.model.num_layers * self.kept_of_layer() + self.head_input()

    def kept_of_layer(self) -> int:
        """The same of one layer."""
        return {"none": self.layer, "selective": self.selective, "full": self.residual}[self.checkpointing]()

    def backward_of_layer(self, owned: int, fresh_gradients: int) -> int:
        """What the backward pass of one layer needs beyond what was kept.

        none: temporaries of the experts. full: these, and all that the layer did not keep. selective: the larger of
        both, since norms and attention are made again only when the experts are done.
        """
        again, temporaries = self.layer() - self.kept_of_layer(), self.backward_temporaries(owned, fresh_gradients)
        return max(again, temporaries) if self.checkpointing == "selective" else again + temporaries

    def residual(self) -> int:
        """The residual stream once: 4 T D."""
        return 4 * self.tokens * self.model.d_model

    def layer(self) -> int:
        """Two norms, attention, router, experts."""
        return 2 * self._norm() + self._attention() + self._router() + self._experts()

    def selective(self) -> int:
        """Results of matrix products and of attention, and the experts' input, are kept; norms and rotations are not.

        x [T, D] in fp32; q, k, v, attention's output, its projection and the experts' input in c; logsumexp [T, H] and
        router logits [T, E] in fp32; what the experts keep.
        """
        query, key, tokens = self._widths()
        products = self.compute_bytes * tokens * (2 * query + 2 * key + 2 * self.model.d_model)
        fp32 = 4 * tokens * (self.model.num_heads + self.model.num_experts)
        return self.residual() + products + fp32 + self._experts()

    def head_input(self) -> int:
        """Last residual in fp32, its norm in c twice (once without the last position), 12 a token for the targets."""
        return self._norm() + self.tokens * (self.compute_bytes * self.model.d_model + 12)

    def backward_temporaries(self, owned: int, fresh_gradients: int) -> int:
        """The largest of three moments in the backward pass of a layer's experts, and the gradient of the residual.

        Gradients of y [N, D], of hidden [N, F], hidden once more [N, F], and of gate and up [N, 2F], with that of down
        [O, D, F]; or gate and up's, the gathered tokens [N, D] and the gradient [O, 2F, D] beside it; or, when these
        are gone, the weight gradients on their way to where they are added up: `fresh_gradients` bytes.
        """
        rows, width, ffn, size = self.rows, self.model.d_model, self.model.expert_ffn, self.compute_bytes
        first = rows * (width + 4 * ffn) + owned * width * ffn
        second = rows * (width + 2 * ffn) + 3 * owned * width * ffn
        return max(size * max(first, second), fresh_gradients) + self.residual() + size * self.tokens * width

    def logits(self) -> int:
        """The loss of one chunk of positions: its logits in c, and the gradient of all its inputs [T, D] in c."""
        held = min(self.tokens, self.chunk_rows()) * _aligned(self.model.embedding_rows)
        return self.compute_bytes * (held + self.tokens * self.model.d_model)

    def chunk_rows(self) -> int:
        """Positions whose logits are held at once."""
        rows = LOGITS_CHUNK_BYTES // (self.compute_bytes * _aligned(self.model.embedding_rows))
        return max(1, rows - rows % _TILE_ROWS if rows > _TILE_ROWS else rows)

    @property
    def rows(self) -> int:
        """N."""
        return self.tokens * self.model.top_k

    def _norm(self) -> int:
        """The input in fp32, the result in c."""
        return self.tokens * self.model.d_model * (4 + self.compute_bytes)

    def _attention(self) -> int:
        """Rotated q, k, and v, the output in c; logsumexp [T, H] in fp32; with QK norm its inputs in fp32, too.

        With `document_end` k and v are there once for each query head.
        """
        query, key, tokens = self._widths()
        repeated = key if self.model.document_end is None else query
        kept = self.compute_bytes * tokens * (2 * query + 2 * repeated) + 4 * tokens * self.model.num_heads
        return kept + (0 if self.model.qk_norm == "none" else 4 * tokens * (query + key))

    def _router(self) -> int:
        """Input in fp32 where the compute dtype is another, logits and probabilities [T, E], choices and weights."""
        copied = 4 * self.tokens * self.model.d_model if self.compute_bytes != 4 else 0
        return copied + self.tokens * (8 * self.model.num_experts + 20 * self.model.top_k)

    def _experts(self) -> int:
        """Gate and up products [N, 2F] in c, weights (4 a row), orders and slots (8 each); tokens are the norm's."""
        return self.rows * (2 * self.compute_bytes * self.model.expert_ffn + 28)

    def _widths(self) -> tuple[int, int, int]:
        """Q, U, T."""
        return self.model.num_heads * self.model.head_dim, self.model.num_kv_heads * self.model.head_dim, self.tokens


def _aligned(num_logits: int) -> int:
    """The head gets rows of zeros up to a multiple."""
    return num_logits + -num_logits % _ALIGNED_LOGITS
