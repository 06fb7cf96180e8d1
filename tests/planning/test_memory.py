"""Memory by part: against real tensors where a CPU can hold them, and properties that must hold for any shape."""

from __future__ import annotations

import gc
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from spes_p2p.experts.masters import halves_of
from spes_p2p.model.output_loss import chunk_rows
from spes_p2p.model.params import masters_of, named_shared
from spes_p2p.model.transformer import Transformer
from spes_p2p.planning.activations import Activations
from spes_p2p.planning.memory import (
    BANK,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    SHARED,
    STACK_VALUES,
    Workload,
    bank_bytes,
    documents_bytes,
    predict,
    state_bytes,
)
from spes_p2p.planning.options import Options
from spes_p2p.planning.sizes import Sizes
from spes_p2p.train import muon
from tests.model.tiny import init_normal_
from tests.planning.runs import PUBLISHED, run_named

torch.set_num_threads(1)
SHAPE = (
    "model.vocab_size=300",
    "model.d_model=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.num_experts=8",
    "model.top_k=2",
    "model.expert_ffn=96",
    "model.num_layers=4",
    "model.expert_backend=eager",
    "data.sequence_length=150",
)
TOKENS = 2 * 150


def test_stacks_are_as_large_as_those_that_training_works_on() -> None:
    """What plans loads no torch, so it cannot take this number from there."""
    assert muon.STACK_VALUES == STACK_VALUES


def small(*overrides: str) -> Workload:
    return Workload.of(run_named("tiny", *SHAPE, *overrides), owned=3)


def saved_bytes(model: Transformer) -> int:
    """Bytes kept for the backward pass under bf16 autocast, up to the head, without weights and their copies."""
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() % TOKENS == 0:  # no weight of this shape is a multiple
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens, before = torch.randint(0, 300, (2, 150)), {id(tensor): tensor for tensor in _tensors()}  # ids of the living
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        result = model._hidden(tokens)
    for tensor in _tensors():  # what selective checkpointing keeps
        if id(tensor) not in before:
            note(tensor)
    assert result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _tensors() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("qk_norm", ["none", "full", "head"])
def test_activations_are_what_autograd_keeps(qk_norm: str, mode: str) -> None:
    work = small(f"model.qk_norm={qk_norm}", f"model.activation_checkpointing={mode}")
    model = Transformer(work.model, (0, 1, 2), device="cpu", expert_dtype=torch.bfloat16)
    init_normal_(model, seed=0)
    predicted = Activations(work.model, TOKENS, compute_bytes=2, checkpointing=mode).kept()
    assert predicted == pytest.approx(saved_bytes(model) - _second_inputs_of_norms(work), rel=0.05)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_documents_take_what_is_planned_for_them(mode: str) -> None:
    work = small("model.document_end=256", f"model.activation_checkpointing={mode}", "optimizer.batch_sequences=2")
    model = Transformer(work.model, (0, 1, 2), device="cpu", expert_dtype=torch.bfloat16)
    init_normal_(model, seed=0)
    predicted = Activations(work.model, TOKENS, compute_bytes=2, checkpointing=mode).kept() + documents_bytes(work)
    assert predicted == pytest.approx(saved_bytes(model) - _second_inputs_of_norms(work), rel=0.05)


def _second_inputs_of_norms(work: Workload) -> int:
    """On the CPU an RMSNorm keeps its normalised input, too; CUDA's kernel makes it again."""
    model = work.model
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    in_layer = 2 * model.d_model + (0 if model.qk_norm == "none" else query + key)
    layers = model.num_layers if model.activation_checkpointing == "none" else 0
    return 4 * TOKENS * (layers * in_layer + model.d_model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_loss_takes_as_many_rows_at_once_as_planned(name: str) -> None:
    model = run_named(name).model
    aligned = model.embedding_rows + -model.embedding_rows % 64
    planned = Activations(model, TOKENS, compute_bytes=2, checkpointing="none").chunk_rows()
    assert planned == chunk_rows(aligned, torch.bfloat16)


@pytest.mark.parametrize("kind", ["compute", "int8", "nf4"])
def test_weights_are_what_a_model_holds(kind: str) -> None:
    work = small(f"model.foreign_dtype={kind}", "model.d_model=128", "model.expert_ffn=128")
    model = Transformer(work.model, (1, 2, 5), device="cpu", expert_dtype=torch.bfloat16)
    parts = predict(replace(work, compute_bytes=4)).parts
    assert parts[SHARED] == sum(parameter.nbytes for parameter in named_shared(model).values())
    beside = sum(halves.lower.nbytes for master in masters_of(model) if (halves := halves_of(master)))
    whole = sum(master.untyped_storage().nbytes() for master in masters_of(model))
    assert predict(work).parts[MASTERS] == whole + beside
    assert min(whole, beside) == 0
    held = _tensors_of_stores(model)
    workspace = 0 if kind == "compute" else 2 * 8 * Sizes.of(work.model).expert
    assert bank_bytes(work) == sum(held) + workspace


def _tensors_of_stores(model: Transformer) -> list[int]:
    sizes = []
    for bank in model.banks:
        foreign = getattr(bank.store, "_foreign", {})
        sizes += [buffer.nbytes for buffer in bank.store.buffers()]  # type: ignore[attr-defined]
        sizes += [tensor.nbytes for tensors in foreign.values() for tensor in tensors]
    return sizes


def test_the_7b_run_with_8_of_32_owned_needs_what_the_design_promises() -> None:
    """Against 16 bytes a parameter: below 46% with AdamW, below 37% with Muon, below 32% with packed experts, too."""
    config = run_named("spes-7b")
    full = 16 * Sizes.of(config.model).total
    assert state_bytes(Workload.of(config, 8)) / full < 0.46
    assert state_bytes(Workload.of(config, 8, Options(optimizer="muon"))) / full < 0.37
    assert state_bytes(Workload.of(config, 8, Options(optimizer="muon", foreign_dtype="nf4"))) / full < 0.32


@pytest.mark.parametrize("name", PUBLISHED)
def test_fp32_adamw_takes_16_bytes_a_trained_value(name: str) -> None:
    config = run_named(name)
    sizes, owned = Sizes.of(config.model), config.swarm.experts_per_peer
    parts = predict(Workload.of(config, owned)).parts
    assert parts[OPTIMIZER] == 8 * sizes.trained(owned)
    assert parts[BANK] == 2 * sizes.experts
    assert parts[MASTERS] == 2 * owned * sizes.column
    assert parts[GRADIENTS] >= 4 * sizes.trained(owned)
    assert parts[SHARED] >= 4 * sizes.shared


def test_the_highest_need_of_a_7b_peer_keeps_what_is_promised() -> None:
    """Peaks with activations, in micro-batches of 4,096 tokens; the share is of our own training of all 32 columns.

    There each value has an fp32 master beside its bf16 copy, as mixed-precision training has them.
    """
    config = run_named("spes-7b")
    plain = Options.of(config)
    full = predict(replace(Workload.of(config, 32), is_bf16=False)).total
    assert predict(Workload.of(config, 8)).total / full < 0.46
    lean = replace(plain, optimizer="muon", activation_checkpointing="full")
    assert predict(Workload.of(config, 8, lean)).total < 48e9
    lean = replace(lean, foreign_dtype="nf4")
    assert predict(Workload.of(config, 8, lean)).total / full < 0.29
    assert predict(Workload.of(config, 1, lean)).total < 24e9


SETTINGS = st.builds(
    Options,
    micro_batch_sequences=st.sampled_from([1, 2, 4, 8]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
    foreign_dtype=st.sampled_from(["compute", "int8", "nf4"]),
)


@given(st.sampled_from(PUBLISHED), SETTINGS, st.integers(0, 7), st.integers(1, 8))
def test_more_columns_ranks_or_sequences_never_need_less(name: str, options: Options, owned: int, ranks: int) -> None:
    config = run_named(name)
    work = Workload.of(config, owned, options, ranks)
    twice = replace(options, micro_batch_sequences=2 * options.micro_batch_sequences)
    assert predict(replace(work, owned=owned + 1)).total >= predict(work).total
    assert predict(replace(work, options=twice)).total >= predict(work).total
    assert predict(replace(work, ranks=2 * ranks)).total >= predict(replace(work, ranks=1)).total


@given(st.sampled_from(PUBLISHED), SETTINGS, st.integers(0, 8))
def test_every_option_saves_memory_or_costs_none(name: str, options: Options, owned: int) -> None:
    work = Workload.of(run_named(name), owned, options)
    plain = predict(work).total
    for cheaper in (
        replace(options, optimizer="muon"),
        replace(options, activation_checkpointing="full"),
    ):
        assert predict(replace(work, options=cheaper)).total <= plain


@given(st.sampled_from(PUBLISHED), SETTINGS, st.integers(0, 8))
def test_parts_add_up_and_none_is_negative(name: str, options: Options, owned: int) -> None:
    memory = predict(Workload.of(run_named(name), owned, options))
    assert all(size >= 0 for size in memory.parts.values())
    assert memory.total == sum(memory.parts.values()) + memory.slack + memory.context
