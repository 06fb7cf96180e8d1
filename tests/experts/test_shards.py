"""Parameters whose rows are dealt: what one rank has of them, and what it computes with. Others are stood in for.

That ranks bring their rows together is tested with real processes (tests/train/test_zero.py).
"""

from __future__ import annotations

import torch
from torch import nn

from spes_p2p.experts.shards import Share, deal, own_rows, read, whole, write


def dealt(values: torch.Tensor) -> nn.Parameter:
    """To the second of two ranks, which gets zeros for the rows of the first."""
    parameter = nn.Parameter(values.clone())
    deal(parameter, Share(1, 2, exchanges=False))
    return parameter


def test_a_rank_has_its_rows_alone_and_computes_with_all_of_them() -> None:
    values = torch.randn(5, 4)
    parameter = dealt(values)
    assert parameter.untyped_storage().nbytes() == 0
    assert (parameter.shape, parameter.dtype) == ((5, 4), torch.float32)
    own = own_rows(parameter)
    assert own is not None
    assert torch.equal(own, values[2:])
    there = whole(parameter, torch.bfloat16)
    assert there.dtype == torch.bfloat16
    assert torch.equal(there[2:], values[2:].bfloat16())
    assert not there[:2].any()
    there.sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(5, 4))


def test_values_are_written_where_a_rank_has_them() -> None:
    values, parameter = torch.randn(5, 4), dealt(torch.zeros(5, 4))
    write(parameter, values)
    assert torch.equal(read(parameter)[2:], values[2:])


def test_a_parameter_that_is_not_dealt_stays_what_it_is() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    write(parameter, torch.ones(2, 2))
    assert parameter.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert own_rows(parameter) is None
    assert whole(parameter, torch.bfloat16) is parameter
    assert read(parameter).data_ptr() == parameter.data_ptr()
    assert Share().gathered(parameter, 2) is parameter
