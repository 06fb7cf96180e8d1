"""The sections of the config tree, every field explained where it stands and checked against its own section.

An agreed field is part of the run's fingerprint. A local one may differ from peer to peer: what the organiser says of
it is advice, which is bounded and names nothing on a peer's machine. A private local one is not even published with the
run, and refused where somebody publishes it, since it speaks of one machine alone. Checks across sections are in
`schema`. Symbols in the descriptions: E experts, H inner steps a round.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from spes_p2p.errors import ConfigError
from spes_p2p.ids import RUN_ID

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Schedule = tuple[tuple[Natural, Positive], ...]
DatasetName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f`]{1,255}$")]
"""Of the folder that it lay in, for people."""
HexHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MOST = 10**12
"""Of anything that has no limit of its own: a run's steps, say. This and the next three are there for slips of the pen:
more than anybody will ever train with."""
LEAST = 1e-30
"""Of a number that is neither whole nor 0: fp32 has little below."""
MOST_SEQUENCES = 2**20
"""Of a step, and of a block."""
MOST_TOKENS = 2**24
"""Of a sequence."""
MOST_PEERS = 1024
"""Of a run: as many as a manifest may name."""
MOST_EXPERTS = 4096
"""As many columns as a peer's record may name."""
MOST_LAYERS = 1024
HASH_OR_NOTHING = r"^([0-9a-f]{64})?$"
PUBLIC_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?"
"""Of a tokenizer: what is no path, but for one of two words from the working folder."""


class Section(BaseModel):
    """A part of the config tree: frozen, no unknown keys, no silent conversions, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="after")
    def _is_within_reason(self) -> Self:
        """What is computed in fp32 must not overflow there, nor become 0."""
        section = type(self).__name__.removesuffix("Config").lower()
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or any(hasattr(one, "lt") for one in field.metadata):
                continue
            key = f"{section}.{name}"
            if abs(value) > MOST:
                raise ConfigError(f"{key} is {value:g}, not an allowed value", fix=f"set {key} to at most {MOST:g}")
            if 0 < abs(value) < LEAST:
                raise ConfigError(f"{key} is {value:g}, not an allowed value", fix=f"set {key} to at least {LEAST:g}")
        return self


def agreed(description: str, default: Any = ..., **limits: Any) -> Any:
    """Declares a field that must be the same on all peers (`limits`: ge, gt, le, lt, pattern, ...)."""
    return Field(default, description=description, **limits)


def local(description: str, default: Any = ..., private: bool = False, **limits: Any) -> Any:
    """Declares a field that each peer may choose; a `private` one is left out of the config that is published."""
    extra: dict[str, Any] = {"local": True, "private": private}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def is_public(name: str) -> bool:
    """Whether a tokenizer's name means the same on every machine: `byte`, or one on the hub, and no path."""
    return re.fullmatch(PUBLIC_NAME, name) is not None and not name.endswith(".json")


def is_local(field: FieldInfo) -> bool:
    return _mark(field, "local")


def is_private(field: FieldInfo) -> bool:
    return _mark(field, "private")


def _mark(field: FieldInfo, name: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(name))


class RunConfig(Section):
    """Which run this is."""

    run_id: str = agreed(
        "Name of the run, in the DHT and in folders: at most 64 letters, digits, '.', '_' and '-'.",
        "tiny",
        pattern=f"^{RUN_ID}$",
    )
    seed: int = agreed("Seed of the initial values and of the order of the data.", 0, ge=0, lt=2**63)
    initial_state: str = agreed(
        "Root (hexadecimal) of the state that the run starts from, where it is not made from the seed; "
        "bootstrap --init-from sets it.",
        "",
        pattern=HASH_OR_NOTHING,
    )


class ModelConfig(Section):
    """The decoder-only Mixture-of-Experts transformer."""

    vocab_size: Positive = agreed("Number of token ids of the tokenizer.")
    embedding_rows: Positive = agreed("Rows of the embedding and of the output head (default: vocab_size).")
    d_model: Positive = agreed("Width of the residual stream.")
    num_layers: Positive = agreed("Number of transformer layers; each has attention and E experts.", le=MOST_LAYERS)
    num_heads: Positive = agreed("Query heads.")
    num_kv_heads: Positive = agreed("Key and value heads; fewer than num_heads is grouped-query (default: num_heads).")
    head_dim: Positive = agreed("Width of one head (default: d_model / num_heads).")
    num_experts: Positive = agreed(
        "E, the number of experts in every layer, which is also the number of expert columns of the run.",
        le=MOST_EXPERTS,
    )
    top_k: Positive = agreed("Experts that each token is sent to.")
    expert_ffn: Positive = agreed("Inner width of one SwiGLU expert.")
    norm_topk: bool = agreed("Scale the top-k router weights so that they add up to one.", False)
    qk_norm: Literal["none", "full", "head"] = agreed(
        "RMSNorm on queries and keys: none, full width, or per head.", "full"
    )
    qkv_bias: bool = agreed("Biases on queries, keys and values, as Qwen2 has them.", False)
    rope_theta: float = agreed("Base of the rotary position frequencies.", 10_000.0, gt=0)
    rms_eps: float = agreed("Epsilon of every RMSNorm.", 1e-6, gt=0)
    document_end: Natural | None = agreed(
        "eos_id of the dataset's manifest.json: attention stays inside each document, and positions restart.", None
    )
    init_std: float = agreed("Standard deviation of the initial weights (normal, cut at three of these).", 0.02, gt=0)
    expert_backend: Literal["auto", "grouped_mm", "triton", "quack", "megablocks", "eager"] = local(
        "How this machine computes experts; auto takes the fastest that works here.", "auto"
    )
    foreign_dtype: Literal["compute", "int8", "nf4"] = local(
        "How experts that this peer does not train are held: in the compute dtype, in one byte per value (int8), or in "
        "half a byte (nf4).",
        "compute",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = local(
        "What is recomputed in the backward pass to save memory: nothing, the cheap parts (norms, rotations, "
        "routing), or whole layers.",
        "none",
    )
    torch_compile: Literal["auto", True, False] = local(
        "Let torch.compile fuse the parts of the model outside the experts; the first step then takes a minute. auto: "
        "on CUDA, where it works.",
        "auto",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        derived = {"embedding_rows": data.get("vocab_size"), "num_kv_heads": data.get("num_heads")}
        width, heads = data.get("d_model"), data.get("num_heads")
        if "head_dim" not in data and type(width) is int and type(heads) is int and heads > 0:
            if width % heads:
                raise ConfigError(
                    f"model.d_model is {width}, not divisible by model.num_heads ({heads})",
                    fix="change one of them, or set model.head_dim",
                )
            derived["head_dim"] = width // heads
        return {name: value for name, value in derived.items() if value is not None} | data

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads is {self.num_heads}, not divisible by model.num_kv_heads ({self.num_kv_heads})",
                fix="choose num_kv_heads as a divisor of num_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim is {self.head_dim}, but rotary positions need an even number", fix="make it even"
            )
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"model.top_k is {self.top_k}, more than model.num_experts ({self.num_experts})",
                fix=f"set model.top_k to at most {self.num_experts}",
            )
        if self.embedding_rows < self.vocab_size:
            raise ConfigError(
                f"model.embedding_rows is {self.embedding_rows}, fewer than model.vocab_size ({self.vocab_size})",
                fix="leave embedding_rows out, or round vocab_size up",
            )
        return self

    @property
    def router_learns(self) -> bool:
        """Whether the loss reaches the router; what is scaled to one is one whatever the router says."""
        return not self.norm_topk or self.top_k > 1 or self.num_experts == 1


class DataConfig(Section):
    """The tokens."""

    source: Literal["leased", "local"] = local(
        "leased: blocks of the run's dataset; local: this peer's own data.", "leased", private=True
    )
    path: str = local(
        "Folder of token shards with manifest.json, or a text file that lists such folders or raw memmaps; a peer "
        "without one fetches its leased data from others.",
        "",
        private=True,
    )
    raw_dtype: Literal["auto", "uint16", "uint32"] = local(
        "Type of raw memmaps without a manifest (auto: uint16 where the ids of model.vocab_size fit).",
        "auto",
        private=True,
    )
    urls: tuple[str, ...] = local(
        "URLs of the same shards (https://... or hf://datasets/...). The bootstrap node signs and sends them to all "
        "peers; they are not part of the run's fingerprint and may change. A peer tries URLs of its own first.",
        (),
        private=True,
    )
    tokenizer: str = local(
        "Tokenizer of the run's dataset, for whoever exports the model: byte, or a name on the Hugging Face hub; "
        "bootstrap takes it from the dataset's manifest, unless that names a file.",
        "",
        pattern=f"^({PUBLIC_NAME})?$",
    )
    tokenizer_hash: str = local(
        "SHA-256 of everything that decides that tokenizer's ids; bootstrap takes it from the dataset's manifest.",
        "",
        pattern=HASH_OR_NOTHING,
    )
    eos_id: Natural | None = local(
        "Id of the token that ends a document of the run's dataset, for whoever exports the model; bootstrap takes it "
        "from the dataset's manifest.",
        None,
        lt=2**32,
    )
    copies: Natural = local(
        "Least number of peers to hold the data of the next rounds, as far as their disks allow; a peer may choose, "
        "and with 0 it keeps nothing for others.",
        3,
        le=MOST_PEERS,
    )
    sequence_length: int = agreed(
        "Tokens of one training sequence; each but the first is predicted.", ge=2, le=MOST_TOKENS
    )
    block_sequences: Positive = agreed("Sequences of one block, the unit that peers lease.", 64, le=MOST_SEQUENCES)
    mix: tuple[tuple[Natural, ...], ...] = agreed(
        "Weights of the datasets that data.path lists: stages [until sequence, weight, weight, ...].", ()
    )
    datasets: tuple[tuple[DatasetName, Positive, HexHash], ...] = agreed(
        "Their names, tokens and hashes: set by bootstrap.", ()
    )
    mask_repetitions: bool = agreed(
        "Leave sequences that repeat a pattern of 1 to 13 tokens 32 times out of the loss.", False
    )
    held_out_fraction: float = agreed("Share of the dataset that nobody trains on, for evaluation.", 0.01, ge=0, le=0.5)

    @model_validator(mode="before")
    @classmethod
    def _one_url(cls, data: Any) -> Any:
        """`data.urls=https://...` on a command line."""
        return data | {"urls": (data["urls"],)} if isinstance(data, dict) and type(data.get("urls")) is str else data


class OptimizerConfig(Section):
    """One inner step."""

    name: Literal["adamw", "muon"] = local(
        "The inner optimizer: AdamW (8 bytes of moments per trained value); or Muon for the matrices of experts and "
        "attention (4 bytes), and AdamW for the rest, at the same learning rate: for all peers alike, though nothing "
        "breaks where they differ.",
        "adamw",
    )
    lr: float = agreed("Highest learning rate.", gt=0)
    betas: tuple[float, float] = agreed("AdamW's decay rates of both moments.", (0.9, 0.95))
    eps: float = agreed("AdamW's epsilon.", 1e-8, gt=0)
    weight_decay: float = agreed("Decoupled weight decay, on every parameter.", 0.1, ge=0)
    grad_clip: float = agreed("Gradients with a norm above this are scaled down to it.", 1.0, gt=0)
    batch_sequences: Positive = agreed("Sequences in one inner step of one peer.", le=MOST_SEQUENCES)
    micro_batch_sequences: Positive = local(
        "Sequences that go through the device at once. On a GPU, join takes the fastest number that fits, unless it is "
        "told one (default: batch_sequences).",
        le=MOST_SEQUENCES,
    )
    load_balancing_weight: float = agreed("Weight of the load-balancing loss of the router.", 0.01, ge=0)
    router_z_weight: float = agreed("Weight of the mean square logsumexp of the router logits.", 0.001, ge=0)
    output_z_weight: float = agreed("Weight of the mean square logsumexp of the output logits.", 1e-5, ge=0)
    decayed_aux_loss: bool = agreed(
        "Raise the load-balancing loss of owned experts from 0.7 to 1.0 of its weight over the first 20% of the run.",
        False,
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict) and "batch_sequences" in data:
            return {"micro_batch_sequences": data["batch_sequences"]} | data
        return data

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.batch_sequences % self.micro_batch_sequences:
            raise ConfigError(
                f"optimizer.batch_sequences is {self.batch_sequences}, not divisible by "
                f"optimizer.micro_batch_sequences ({self.micro_batch_sequences})",
                fix=f"set micro_batch_sequences to a divisor of {self.batch_sequences}",
            )
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ConfigError(f"optimizer.betas has {beta}", fix="both must be at least 0 and below 1")
        return self


class SchedulerConfig(Section):
    """The learning rate over the global step: a linear warm-up, and a way down."""

    name: Literal["cosine", "wsd"] = agreed(
        "cosine: it falls from the warm-up on; wsd (warm-up, stable, decay): it stays, and falls linearly over the "
        "last decay_steps.",
        "cosine",
    )
    warmup_steps: Natural = agreed("Steps over which the learning rate rises from warmup_ratio * lr.")
    warmup_ratio: float = agreed("Learning rate before the first step, as a part of the highest.", 0.0, ge=0, le=1)
    total_steps: Positive = agreed(
        "Step at which the learning rate has fallen to min_ratio * lr, where it stays.", le=MOST
    )
    decay_steps: Positive = agreed("Steps over which it falls with wsd (default: a fifth of total_steps).")
    min_ratio: float = agreed("Final learning rate as a share of the highest.", 0.1, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict) and type(data.get("total_steps")) is int:
            return {"decay_steps": max(1, data["total_steps"] // 5)} | data
        return data

    @model_validator(mode="after")
    def _check(self) -> SchedulerConfig:
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"scheduler.warmup_steps is {self.warmup_steps}, not below scheduler.total_steps ({self.total_steps})",
                fix="shorten the warm-up or lengthen the run",
            )
        stable_until = self.total_steps - self.decay_steps
        if self.name == "wsd" and stable_until < self.warmup_steps:
            raise ConfigError(
                f"scheduler.decay_steps is {self.decay_steps}: it would begin at step {stable_until}, before the end "
                f"of scheduler.warmup_steps ({self.warmup_steps})",
                fix=f"set it to at most {self.total_steps - self.warmup_steps}",
            )
        return self


class SwarmConfig(Section):
    """Who takes part."""

    min_peers: Positive = agreed("Peers that must have joined before the first round starts.", 1, le=MOST_PEERS)
    experts_per_peer: Positive = agreed(
        "Expert columns that every peer must have memory for; one with more memory takes more if owners are missing."
    )
    target_replicas: Positive = agreed("Number of owners that each column should have.", 1)
    heartbeat_seconds: float = agreed("Pause between two status messages of a peer.", 1.0, ge=0.05, le=60)
    faults: Literal["crash", "byzantine"] = agreed(
        "What voting peers may do wrong: crash (they stop and come back; more than half decide), or byzantine (fewer "
        "than a third may lie; more than two thirds decide).",
        "crash",
    )
    trusted: Literal["all", "vouched"] = agreed(
        "Which members are trusted, and so vote, lead, reduce and may own columns alone: all, or those for whom the "
        "organiser vouches (spes-p2p run vouch). With vouched everybody else is a stranger, who only gives values; "
        "they count as far as they agree with those of trusted peers.",
        "all",
    )
    renew_after_seconds: Annotated[float, Field(ge=1.0, le=86_400.0)] = agreed(
        "Where too few electors are heard to commit a round, and a peer waits, the organiser's node names others after "
        "this many seconds (a renewal).",
        60.0,
    )


class EvalConfig(Section):
    """The held-out loss of the committed model. One peer a round measures it: the first in the order of leaders."""

    every_rounds: Natural = local(
        "Rounds between two evaluations, when it is this peer's turn; 0 means never.", 1, le=10**6
    )
    sequences: Positive = local("Held-out sequences of one evaluation.", 64, le=2**14)


class OutputConfig(Section):
    """What one peer writes down."""

    keep_checkpoints: Positive = local("How many of the newest checkpoints are kept.", 2, private=True)
    checkpoint_every_rounds: Positive = local("Rounds between two checkpoints.", 1, private=True)
    log_every_steps: Positive = local("Inner steps between two step events.", 1, private=True)
    tensorboard: bool = local("Also write TensorBoard files.", False, private=True)
    wandb: bool = local("Also report to Weights & Biases (WANDB_MODE=offline works).", False, private=True)
