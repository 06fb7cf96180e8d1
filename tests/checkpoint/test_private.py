"""The private training state comes back with the same types and bits."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.checkpoint.private import _FORMAT_NAMES, TENSORS_FILE, _decode, _encode, read_private, write_private


def round_trip(folder: Path, tree: Any) -> Any:
    write_private(folder, tree)
    return read_private(folder)


@pytest.mark.parametrize("dtype", _FORMAT_NAMES)
def test_torch_tensors_keep_type_shape_and_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 4) * 10).to(dtype)
    tree = {"whole": tensor, "turned": tensor.T, "one": tensor[0, 0], "none": tensor[:0]}
    found = round_trip(tmp_path, tree)
    for name, value in tree.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value)


def test_the_states_of_optimizers_and_generators_come_back(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    rng = random.Random(3)
    tree = {
        "optimizer": optimizer.state_dict(),
        "python": rng.getstate(),
        "torch": torch.get_rng_state(),
        "certificate": b"\x00\xff",
        "position": {7: [1, 2.5, None, True]},
    }
    found = round_trip(tmp_path, tree)
    again = torch.optim.AdamW([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    again.load_state_dict(found["optimizer"])
    assert torch.equal(again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["python"] == tree["python"]
    assert torch.equal(found["torch"], torch.get_rng_state())
    assert found["certificate"] == tree["certificate"]
    assert found["position"] == tree["position"]


_keys = st.one_of(st.text(), st.integers(), st.binary())
_leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
_trees = st.recursive(
    _leaves,
    max_leaves=8,
    extend=lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(_keys, inner), st.tuples(inner, inner), st.fixed_dictionaries({"dict": inner})
    ),
)


@settings(max_examples=50)
@given(_trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    found = _decode(_encode(tree, "", {}), {})
    assert repr(found) == repr(tree)


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    nan, infinity = round_trip(tmp_path, [math.nan, -math.inf])
    assert math.isnan(nan)
    assert infinity == -math.inf


def test_any_safetensors_reader_can_open_the_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    write_private(tmp_path, {"masters": {"head": tensor}})
    found = safetensors.numpy.load_file(tmp_path / TENSORS_FILE)
    assert list(found) == ["0/masters/head"]
    np.testing.assert_array_equal(found["0/masters/head"], tensor.numpy())


def test_a_type_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"0/a/1.*object"):
        write_private(tmp_path, {"a": [1, object()]})


def test_what_was_read_does_not_lie_in_the_file(tmp_path: Path) -> None:
    """A checkpoint that is dropped gives its place on the disk back, and tensors lie where processors like them."""
    write_private(tmp_path, {"odd": torch.ones(3, dtype=torch.uint8), "values": torch.ones(100)})
    found = read_private(tmp_path)["values"]
    (tmp_path / TENSORS_FILE).write_bytes(b"\0" * (tmp_path / TENSORS_FILE).stat().st_size)
    assert found.sum() == 100
    assert found.data_ptr() % found.itemsize == 0
