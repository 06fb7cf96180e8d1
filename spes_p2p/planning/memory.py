"""Bytes of device memory that training needs, by part, at the moment when it needs most.

What lies there all the time: weights, masters, moments. What comes and goes: activations, logits, gradients. Symbols as
in `sizes`; P_s shared values, P_c values of a column, c bytes of the compute dtype. One rank is meant; several ranks of
a peer each hold the same on a GPU of their own, or with `optimizer.sharding` a part: zero2 of gradients and moments,
zero3 of shared values and of masters, too, which then are whole as long as a layer computes with them.
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
OUTPUT, INPUT = "the head's backward", "the embedding's backward"
"""Moments of a step in which memory can be at its highest."""
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "muon": 4.0}
"""Of a trained value: two moments, in fp32, or in 8 bits with one fp32 scale for each 256 values; for Muon one, of the
matrices of experts and attention."""
STACK_VALUES = 2**24
"""Values of matrices that Muon orthogonalises at once."""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
FOREIGN_BYTES = {"int8": (1, 128), "fp8": (1, 128), "nf4": (0.5, 64)}
"""Of a foreign value, and how many values of a row share one fp32 scale (all where that does not divide the row)."""
ROUNDED_VALUES, ROUNDED_BYTES = 2**24, 9
"""Gradient values that are added up in bf16 at once: each in fp32, beside a random number and whether it is NaN."""
HEAD_SLICE = 8192
"""Rows of the head whose gradient is rounded at once."""
PIECE_VALUES = 2**26
"""Gradient values that the optimizer turns into fp32 at once."""
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
    host: int
    """Pinned memory of the host, for offloaded experts."""

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
        """Whether gradients of experts, head and embedding are added where they are kept: in fp32, by one rank."""
        return self.ranks == 1 and self.options.gradient_dtype == "fp32"

    @property
    def master_bytes(self) -> int:
        """Of an owned expert's value beside the bank: fp32, or the half that the bank does not have."""
        return 2 if self.is_bf16 and self.compute_bytes == 2 and not _is_thrifty(self.options) else 4

    @property
    def shares(self) -> int:
        """Ranks that gradients and moments are dealt to."""
        return self.ranks if self.options.sharding != "none" else 1

    @property
    def value_shares(self) -> int:
        """Ranks that shared values are dealt to, and masters of which the bank has half."""
        return self.ranks if self.options.sharding == "zero3" else 1

    @property
    def shared_bytes(self) -> int:
        """Of what is shared, in fp32: matrices are dealt, vectors are not."""
        sizes = Sizes.of(self.model)
        return 4 * ((sizes.shared - sizes.norms) // self.value_shares + sizes.norms)

    @property
    def masters_bytes(self) -> int:
        """Of all owned experts, beside the bank."""
        whole = self.master_bytes * self.owned * Sizes.of(self.model).column
        return whole // self.value_shares if self.master_bytes == 2 else whole

    @property
    def keeps_apart(self) -> bool:
        """Whether gradients are not kept by their parameters (train/kept_gradients.py)."""
        return self.shares > 1 or self.options.gradient_dtype == "bf16"

    @property
    def accumulates(self) -> bool:
        """Whether gradients are there all the time: from micro-batch to micro-batch, or in the buckets of DDP.

        DDP has gradients in fp32 only; others are averaged in place.
        """
        in_buckets = self.ranks > self.shares and self.options.gradient_dtype == "fp32"
        return self.sequences * self.ranks < self.batch_sequences or in_buckets


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
    host = pinned_bytes(work) if work.options.foreign_offload else 0
    return Memory(parts, name, round(FRAGMENT_SHARE * passing), context, host)


def state_bytes(work: Workload) -> int:
    """Weights, masters, moments and gradients alone: what depends on neither batch nor sequence."""
    sizes = Sizes.of(work.model)
    values = sizes.trained(work.owned)
    trained = work.shared_bytes + work.masters_bytes
    trained += GRADIENT_BYTES[work.options.gradient_dtype] * values // work.shares
    return trained + _optimizer_bytes(work) + bank_bytes(work)


def column_value_bytes(options: Options, ranks: int = 1) -> float:
    """Of each value of a column that is trained on a GPU in bf16: master, gradient, moments."""
    shares = ranks if options.sharding != "none" else 1
    master = 4.0 if _is_thrifty(options) else 2 / (shares if options.sharding == "zero3" else 1)
    return master + (GRADIENT_BYTES[options.gradient_dtype] + OPTIMIZER_BYTES[options.optimizer]) / shares


def bank_bytes(work: Workload) -> int:
    """All experts for the forward pass, on the device.

    compute: c E P_c. Otherwise a workspace of one layer c E P_c / L, and the foreign ones, (E - O) P_c, as they are
    held; offloaded, only two layers of these.
    """
    sizes = Sizes.of(work.model)
    if not _is_thrifty(work.options):
        return work.compute_bytes * sizes.experts
    layers = 2 / work.model.num_layers if work.options.foreign_offload else 1
    return work.compute_bytes * sizes.num_experts * sizes.expert + round(layers * foreign_bytes(work))


def foreign_bytes(work: Workload) -> int:
    """Foreign experts of all layers: gate and up [2F, D], down [D, F], in codes with scales or in the compute dtype."""
    model, kind = work.model, work.options.foreign_dtype
    foreign = (model.num_experts - work.owned) * model.num_layers
    if kind == "compute":
        return work.compute_bytes * foreign * 3 * model.d_model * model.expert_ffn
    values = 2 * model.expert_ffn * model.d_model, model.d_model * model.expert_ffn
    per_value = (_quantised_bytes(kind, width) for width in (model.d_model, model.expert_ffn))
    return round(foreign * sum(count * size for count, size in zip(values, per_value, strict=True)))


def _quantised_bytes(kind: str, width: int) -> float:
    """Of a value in a row of `width`."""
    size, block = FOREIGN_BYTES[kind]
    return size + 4 / (block if width % block == 0 else width)


def _is_thrifty(options: Options) -> bool:
    return options.foreign_dtype != "compute" or options.foreign_offload


def pinned_bytes(work: Workload) -> int:
    """Host memory of offloaded experts: torch gives out pinned memory in powers of two, for each part of a layer."""
    layers, each = work.model.num_layers, foreign_bytes(work) / work.model.num_layers
    parts = (each * 2 / 3, each / 3)
    return layers * sum(1 << (round(part) - 1).bit_length() for part in parts) if each else 0


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
    return round((OPTIMIZER_BYTES["adamw"] * by_adamw + OPTIMIZER_BYTES[kind] * others) / work.shares)


def _moments(work: Workload) -> dict[str, dict[str, int]]:
    sizes, model = Sizes.of(work.model), work.model
    checkpointing = work.options.activation_checkpointing
    active = Activations(model, work.sequences * work.sequence_length, work.compute_bytes, checkpointing)
    gradient = GRADIENT_BYTES[work.options.gradient_dtype]
    trained = sizes.trained(work.owned)
    all_gradients = gradient * (trained // work.shares)
    early = all_gradients if work.accumulates else 0
    # autocast keeps copies of the attention's matrices, from forward to backward pass unless checkpointed; the head
    # makes one for a moment, and its fp32 gradient in the forward pass, which is where it stays if added in place. What
    # is fetched from other ranks comes in the place of such copies, and the router's beside them in fp32
    rounds_head = work.keeps_apart and work.shares == 1  # a slice at a time, into the sum in bf16
    head_gradient = (
        _rounded(work, min(HEAD_SLICE * model.d_model, sizes.embedding)) if rounds_head else 4 * sizes.embedding
    )
    at_head = (early or head_gradient) if work.adds_in_place else early + head_gradient
    head_copy, attention = (_copied_bytes(work) * count for count in (sizes.embedding, sizes.attention))
    attention += 4 * sizes.router * (work.value_shares > 1)
    late_attention = attention // (1 if checkpointing == "none" else model.num_layers)
    # of a layer's masters, where autograd adds: all in the compute dtype, two thirds (gate and up) in fp32, too
    as_fp32 = gradient == 4 and work.compute_bytes != 4
    fresh = (work.compute_bytes * 3 + 8 * as_fp32) * work.owned * sizes.expert // 3 * (not work.adds_in_place)
    arriving = 0  # of the embedding or the head, on its way from autograd to where it is kept
    if work.keeps_apart:
        in_fp32 = 4 if work.shares > 1 else 0  # by rank
        gate_up = 2 * work.owned * sizes.expert // 3
        fresh = (
            work.compute_bytes * work.owned * sizes.expert + (in_fp32 + 2 * as_fp32) * gate_up + _rounded(work, gate_up)
        )
        arriving = max(gradient, in_fp32) * sizes.embedding + _rounded(work, sizes.embedding)
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
        LAST: parts(
            late_attention,
            (early or gradient * sizes.embedding) + (head_gradient if work.shares > 1 else 0),
            active.kept() + beside,
        ),
        FIRST: parts(0, all_gradients, active.kept_of_layer() + beside),
        OUTPUT: parts(attention, at_head + arriving * (not rounds_head), active.kept()),
        INPUT: parts(0, all_gradients + arriving, 0),
        STEP: parts(0, all_gradients + _update_bytes(work, gradient, trained // work.shares), 0),
    }


def _rounded(work: Workload, values: int) -> int:
    """What adding so many to a sum in bf16 takes."""
    is_rounded = work.options.gradient_dtype == "bf16" and work.accumulates
    return ROUNDED_BYTES * min(ROUNDED_VALUES, values) if is_rounded else 0


def _update_bytes(work: Workload, gradient: int, trained: int) -> int:
    """What a step makes on the way: gradients in fp32; for Muon all that it orthogonalises, and a stack five times.

    Beside it, a layer's masters where they are halved. Or, when it is made, one matrix of these in the order in which
    ranks fetch its rows.
    """
    sizes = Sizes.of(work.model)
    whole = 4 * work.owned * sizes.expert if work.master_bytes == 2 else 0
    if work.options.optimizer != "muon":
        fetched = 8 * work.owned * sizes.expert // 3 if work.shares > 1 else 0
        return max(fetched, whole + (0 if gradient == 4 else 4 * min(PIECE_VALUES, trained)))
    matrices = max(sizes.attention, sizes.expert)  # those of experts one expert after the other
    return whole + 4 * (matrices + 5 * min(STACK_VALUES, matrices))


def _copied_bytes(work: Workload) -> int:
    """Of a value of a shared matrix that is multiplied in the compute dtype."""
    return 0 if work.compute_bytes == 4 and work.value_shares == 1 else work.compute_bytes
