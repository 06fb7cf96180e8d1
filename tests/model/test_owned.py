"""What is trained: owned experts as in full training, foreign ones not at all, and DDP waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spes_p2p.experts.bank import ExpertBank
from spes_p2p.experts.stores import PARTS
from spes_p2p.model.params import masters_of, named_shared
from spes_p2p.model.transformer import Transformer
from tests.model.tiny import tiny_model, tiny_tokens

EVERYTHING = tuple(range(8))


def trained(owned: tuple[int, ...], backend: str) -> Transformer:
    model = tiny_model(owned, expert_backend=backend)
    model(tiny_tokens()).total.backward()
    return model


@pytest.mark.parametrize("backend", ["eager", "grouped_mm"])
@pytest.mark.parametrize("owned", [(), (0, 1), (2, 5, 7)], ids=str)
def test_gradients_equal_those_of_full_training(backend: str, owned: tuple[int, ...]) -> None:
    whole, part = trained(EVERYTHING, "eager"), trained(owned, backend)
    for name, parameter in named_shared(whole).items():
        assert_close(part.get_parameter(name).grad, parameter.grad)
    for full_bank, bank in zip(whole.banks, part.banks):
        for part_name in PARTS:
            full, master = full_bank.master(part_name), bank.master(part_name)
            assert full is not None
            assert full.grad is not None
            if owned:
                assert master is not None
                assert_close(master.grad, full.grad[list(owned)])
            else:
                assert master is None


def assert_close(left: torch.Tensor | None, right: torch.Tensor | None) -> None:
    assert left is not None
    assert right is not None
    assert (left - right).abs().max() <= 1e-5 * right.abs().max()


def test_bytes_of_gradients_and_optimizer_state() -> None:
    """Two of eight owned: gradients and moments for shared parameters and two columns, none for the other six."""
    model = trained((2, 5), "grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    column_values = 2 * 3 * 16 * 24
    attention_values = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 16 + 8
    shared_values = 2 * 19 * 16 + 16 + 2 * (attention_values + 2 * 16 + 8 * 16)
    trained_bytes = 4 * (shared_values + 2 * column_values)
    gradients = [tensor.grad for tensor in (*model.parameters(), *model.buffers()) if tensor.grad is not None]
    assert sum(gradient.nbytes for gradient in gradients) == trained_bytes
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert sum(moment.nbytes for moment in moments) == 2 * trained_bytes
    assert sum(bank.matrices(part).nbytes for bank in model.banks for part in PARTS) == 4 * 8 * column_values


def test_a_step_changes_owned_experts_alone() -> None:
    model = trained((2, 5), "grouped_mm")
    before = [[bank.read(expert, "up").clone() for expert in EVERYTHING] for bank in model.banks]
    with model.masters_in_fp32():
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for bank, values in zip(model.banks, before):
        changed = [e for e in EVERYTHING if not torch.equal(up_of(bank, e), values[e])]
        assert changed == [2, 5]


def up_of(bank: ExpertBank, expert: int) -> torch.Tensor:
    """As the forward pass sees it."""
    part, rows = bank.rows_of("up")
    return bank.matrices(part)[bank.slot(expert), rows]


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_ddp_ignores_the_banks_and_finds_every_gradient(checkpointing: str) -> None:
    model = tiny_model(EVERYTHING, activation_checkpointing=checkpointing)
    ddp = DistributedDataParallel(model)
    assert {name for name, _ in model.named_buffers()} == set(ddp.parameters_to_ignore)
    for _ in range(2):  # the second pass fails if the first one still waits for a gradient
        ddp(tiny_tokens(1, 2)).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for master in masters_of(model):  # two tokens reach four experts at most
        assert master.grad is not None
        assert int(master.grad.flatten(1).any(1).sum()) <= 4
