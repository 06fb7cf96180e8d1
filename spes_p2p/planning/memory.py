"""Bytes of device memory that training needs, by part, at the moment when it needs most.

What lies there all the time: weights, masters, moments. What comes and goes: activations, logits, gradients. Symbols as
in `sizes`; P_s shared values, P_c values of a column, c bytes of the compute dtype. One rank is meant; several ranks of
a peer each hold the same on a GPU of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.config.schema import Config, ModelConfig
from spes_p2p.planning.activations import Activations
from spes_p2p.planning.options import Options
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.units import GIB, MIB

SHARED, BANK, MASTERS, GRADIENTS, OPTIMIZER = "shared parameters", "bank", "masters", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS = "activations", "logits", "buffers"

HEAD, LAST, FIRST, STEP = "the loss", "the last layer's backward", "the first layer's backward", "the update"
"""Moments of a step in which memory can be at its highest."""
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4}
"""Of a trained value: two moments in fp32; for Muon one, of the matrices of experts and attention."""
STACK_VALUES = 2**24
"""Values of matrices that Muon orthogonalises at once."""
GRADIENT_BYTES = 4
FOREIGN_BYTES = {"int8": (1, 128), "nf4": (0.5, 64)}
"""Of a foreign value, and how many values of a row share one fp32 scale (all where that does not divide the row)."""
WORKSPACE_BYTES = 64 * MIB
"""What matrix products take for themselves."""
FRAGMENT_SHARE = 0.04
"""Of what comes and goes, lost between blocks of the allocator."""
CONTEXT_BYTES = GIB // 2
RANKS_BYTES = GIB // 2
"""What CUDA takes for itself, and what communication between ranks takes on top; no allocator counts them."""


@dataclass(frozen=True)
class Memory:
    """`parts` add up to the highest number of bytes allocated at once."""

    parts: Mapping[str, int]
    moment: str
    """When that is."""
    slack: int
    """Lost by the allocator."""
    context: int
    """Taken before the first tensor."""

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated should say."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.allocated + self.slack + self.context


@dataclass(frozen=True)
class Workload:
    """The training setup whose memory is predicted. `owned`: number of columns trained."""

    model: ModelConfig
    options: Options
    owned: int
    sequence_length: int
    batch_sequences: int
    """Of one inner step of the peer."""
    ranks: int = 1
    compute_bytes: int = 2
    """4 on a CPU."""
    is_bf16: bool = True
    """Not on a CPU, which computes in fp32, nor on GPUs that compute in fp16."""

    @classmethod
    def of(cls, config: Config, owned: int, options: Options | None = None, ranks: int = 1) -> Workload:
        """A config's; `options` in place of its own."""
        data, optimizer = config.data, config.optimizer
        options = options or Options.of(config)
        return cls(config.model, options, owned, data.sequence_length, optimizer.batch_sequences, ranks)

    @property
    def sequences(self) -> int:
        """That go through the device at once."""
        return min(self.options.micro_batch_sequences, max(1, self.batch_sequences // self.ranks))

    @property
    def micro_batches(self) -> int:
        """Whose gradients a rank adds up in a step."""
        return -(-max(1, self.batch_sequences // self.ranks) // self.sequences)

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients of experts, head and embedding are added where they are kept: by one rank."""
        return self.ranks == 1

    @property
    def master_bytes(self) -> int:
        """Of an owned expert's value beside the bank: fp32, or the half that the bank does not have."""
        return 2 if self.is_bf16 and self.compute_bytes == 2 and not _is_thrifty(self.options) else 4

    @property
    def shared_bytes(self) -> int:
        """Of what is shared, in fp32."""
        return 4 * Sizes.of(self.model).shared

    @property
    def masters_bytes(self) -> int:
        """Of all owned experts, beside the bank."""
        return self.master_bytes * self.owned * Sizes.of(self.model).column

    @property
    def accumulates(self) -> bool:
        """Whether gradients are there all the time: from micro-batch to micro-batch, or in the buckets of DDP."""
        return self.ranks > 1 or self.sequences < self.batch_sequences


def predict(work: Workload) -> Memory:
    """The highest need of one inner step, among the moments in which it can be:

    the loss: all activations, logits, the gradient of the head; the backward pass, last layer first: there all
    activations and the temporaries of one layer, at its end one layer's and all gradients; the update: gradients alone.
    """
    held = _held(work)
    moments = {name: {**held, **parts} for name, parts in _moments(work).items()}
    name, parts = max(moments.items(), key=lambda entry: sum(entry[1].values()))
    passing = sum(parts[part] for part in (GRADIENTS, ACTIVATIONS, LOGITS, BUFFERS))
    on_gpu = work.compute_bytes == 2
    context = (CONTEXT_BYTES + RANKS_BYTES * (work.ranks > 1)) if on_gpu else 0
    return Memory(parts, name, round(FRAGMENT_SHARE * passing), context)


def state_bytes(work: Workload) -> int:
    """Weights, masters, moments and gradients alone: what depends on neither batch nor sequence."""
    sizes = Sizes.of(work.model)
    values = sizes.trained(work.owned)
    trained = work.shared_bytes + work.masters_bytes
    trained += GRADIENT_BYTES * values
    return trained + _optimizer_bytes(work) + bank_bytes(work)


def column_value_bytes(options: Options) -> int:
    """Of each value of a column that is trained on a GPU in bf16: master, gradient, moments."""
    return (4 if _is_thrifty(options) else 2) + GRADIENT_BYTES + OPTIMIZER_BYTES[options.optimizer]


def bank_bytes(work: Workload) -> int:
    """All experts for the forward pass, on the device.

    compute: c E P_c. Otherwise a workspace of one layer c E P_c / L, and the foreign ones, (E - O) P_c, as they are
    held.
    """
    sizes = Sizes.of(work.model)
    if not _is_thrifty(work.options):
        return work.compute_bytes * sizes.experts
    return work.compute_bytes * sizes.num_experts * sizes.expert + foreign_bytes(work)


def foreign_bytes(work: Workload) -> int:
    """Packed foreign experts of all layers: gate and up [2F, D], down [D, F], in codes with scales."""
    model, kind = work.model, work.options.foreign_dtype
    foreign = (model.num_experts - work.owned) * model.num_layers
    values = 2 * model.expert_ffn * model.d_model, model.d_model * model.expert_ffn
    per_value = (_quantised_bytes(kind, width) for width in (model.d_model, model.expert_ffn))
    return round(foreign * sum(count * size for count, size in zip(values, per_value, strict=True)))


def _quantised_bytes(kind: str, width: int) -> float:
    """Of a value in a row of `width`."""
    size, block = FOREIGN_BYTES[kind]
    return size + 4 / (block if width % block == 0 else width)


def _is_thrifty(options: Options) -> bool:
    return options.foreign_dtype != "compute"


def _held(work: Workload) -> dict[str, int]:
    """What is there all the time, from the second step on."""
    return {
        SHARED: work.shared_bytes,
        BANK: bank_bytes(work),
        MASTERS: work.masters_bytes,
        OPTIMIZER: _optimizer_bytes(work),
        BUFFERS: (WORKSPACE_BYTES if work.compute_bytes == 2 else 0) + documents_bytes(work),
    }


def documents_bytes(work: Workload) -> int:
    """With `document_end`: a mask [B, S, S] in the compute dtype, a cosine and a sine [B, S, C] in fp32."""
    if work.model.document_end is None:
        return 0
    tokens = work.sequences * work.sequence_length
    return tokens * (work.compute_bytes * work.sequence_length + 8 * work.model.head_dim)


def _optimizer_bytes(work: Workload) -> int:
    sizes, kind = Sizes.of(work.model), work.options.optimizer
    by_adamw = sizes.shared - sizes.attention if kind == "muon" else 0  # biases of attention count as its matrices
    others = sizes.trained(work.owned) - by_adamw
    return OPTIMIZER_BYTES["adamw"] * by_adamw + OPTIMIZER_BYTES[kind] * others


def _moments(work: Workload) -> dict[str, dict[str, int]]:
    sizes, model = Sizes.of(work.model), work.model
    checkpointing = work.options.activation_checkpointing
    active = Activations(model, work.sequences * work.sequence_length, work.compute_bytes, checkpointing)
    all_gradients = GRADIENT_BYTES * sizes.trained(work.owned)
    early = all_gradients if work.accumulates else 0
    # autocast keeps copies of the attention's matrices, from forward to backward pass unless checkpointed; the head
    # makes one for a moment, and its fp32 gradient in the forward pass, which is where it stays if added in place
    head_gradient = GRADIENT_BYTES * sizes.embedding
    at_head = (early or head_gradient) if work.adds_in_place else early + head_gradient
    is_cast = work.compute_bytes != 4
    head_copy, attention = (is_cast * work.compute_bytes * count for count in (sizes.embedding, sizes.attention))
    late_attention = attention // (1 if checkpointing == "none" else model.num_layers)
    # of a layer's masters, where autograd adds: all in the compute dtype, two thirds (gate and up) in fp32, too
    fresh = (work.compute_bytes * 3 + 8 * is_cast) * work.owned * sizes.expert // 3 * (not work.adds_in_place)
    beside = active.backward_of_layer(work.owned, fresh)

    def parts(copies: int, gradients: int, activations: int, logits: int = 0) -> dict[str, int]:
        return {
            SHARED: work.shared_bytes + copies,
            GRADIENTS: gradients,
            ACTIVATIONS: activations,
            LOGITS: logits,
        }

    return {
        HEAD: parts(head_copy + attention, at_head, active.kept(), active.logits()),
        LAST: parts(late_attention, early or head_gradient, active.kept() + beside),
        FIRST: parts(0, all_gradients, active.kept_of_layer() + beside),
        STEP: parts(0, all_gradients + _update_bytes(work), 0),
    }


def _update_bytes(work: Workload) -> int:
    """What a step makes on the way: for Muon all that it orthogonalises, and a stack five times.

    Beside it, a layer's masters where they are halved.
    """
    sizes = Sizes.of(work.model)
    whole = 4 * work.owned * sizes.expert if work.master_bytes == 2 else 0
    if work.options.optimizer != "muon":
        return whole
    matrices = max(sizes.attention, sizes.expert)  # those of experts one expert after the other
    return whole + 4 * (matrices + 5 * min(STACK_VALUES, matrices))
