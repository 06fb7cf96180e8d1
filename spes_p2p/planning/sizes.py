"""How many parameters a model has, and how much arithmetic a token costs: sums over the shapes in the config.

Symbols, here and in the other files of this package: V embedding rows, D d_model, L layers, H heads, G key-value heads,
C head_dim, Q = H C, U = G C, E experts, O of them owned, K experts a token, F expert ffn, S sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.schema import ModelConfig


@dataclass(frozen=True)
class Sizes:
    """Counts of values, all layers together."""

    embedding: int
    """V D; the output head has as many."""
    attention: int
    """L (2 D Q + 2 D U), and biases of Q + 2 U where there are some."""
    router: int
    """L E D."""
    norms: int
    """L (2 D + those on queries and keys) + D."""
    expert: int
    """One expert of one layer: 3 D F."""
    column: int
    """One expert column: L times that."""
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: ModelConfig) -> Sizes:
        layers, width = model.num_layers, model.d_model
        query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        biases = query + 2 * key if model.qkv_bias else 0
        qk_norms = {"none": 0, "full": query + key, "head": 2 * model.head_dim}[model.qk_norm]
        return cls(
            embedding=model.embedding_rows * width,
            attention=layers * (2 * width * (query + key) + biases),
            router=layers * model.num_experts * width,
            norms=layers * (2 * width + qk_norms) + width,
            expert=3 * width * model.expert_ffn,
            column=layers * 3 * width * model.expert_ffn,
            num_experts=model.num_experts,
            top_k=model.top_k,
        )

    @property
    def vocabulary(self) -> int:
        """Embedding and head."""
        return 2 * self.embedding

    @property
    def shared(self) -> int:
        """Everything that is no expert."""
        return self.vocabulary + self.attention + self.router + self.norms

    @property
    def experts(self) -> int:
        """All columns."""
        return self.num_experts * self.column

    @property
    def total(self) -> int:
        return self.shared + self.experts

    @property
    def active(self) -> int:
        """What one token meets: everything shared and K experts a layer."""
        return self.shared + self.top_k * self.column

    def trained(self, owned: int) -> int:
        """What a peer with `owned` columns trains."""
        return self.shared + owned * self.column


def flops_per_token(model: ModelConfig, sequence_length: int, owned: int) -> float:
    """Floating point operations that one token of a training step needs; recomputed activations do not count.

    A multiply and an add each; a weight of a matrix product costs 2 in the forward pass, 2 for the gradient of its
    input, 2 for its own gradient; the latter only for the share O / E of expert rows that go through owned experts
    (even routing). Causal attention adds 6 L S Q (half of the full square). Looking up an embedding and elementwise
    work are left out.
    """
    sizes = Sizes.of(model)
    dense = sizes.embedding + sizes.attention + sizes.router
    experts = model.top_k * sizes.column
    attention = 6 * model.num_layers * sequence_length * model.num_heads * model.head_dim
    return 6.0 * dense + (4 + 2 * owned / model.num_experts) * experts + attention
