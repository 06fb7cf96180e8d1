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

from spes_p2p.checkpoint.private import TENSORS_FILE, _decode, _encode, read_private, write_private


def round_trip(folder: Path, tree: Any) -> Any:
    write_private(folder, tree)
    return read_private(folder)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_torch_tensors_keep_type_shape_and_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 4) * 10).to(dtype)
    tree = {"whole": tensor, "turned": tensor.T, "one": tensor[0, 0], "none": tensor[:0]}
    found = round_trip(tmp_path, tree)
    for name, value in tree.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("code", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
def test_numpy_arrays_keep_type_shape_and_bits(tmp_path: Path, code: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(code)
    tree = {"whole": array, "turned": array.T, "scalar": array[1, 1], "none": array[:0]}
    found = round_trip(tmp_path, tree)
    for name, value in tree.items():
        assert type(found[name]) is type(value)
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_the_states_of_optimizers_and_generators_come_back(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    rng, generator = random.Random(3), np.random.default_rng(3)
    tree = {
        "optimizer": optimizer.state_dict(),
        "python": rng.getstate(),
        "numpy": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
        "certificate": b"\x00\xff",
        "position": {7: [1, 2.5, None, True]},
    }
    found = round_trip(tmp_path, tree)
    again = torch.optim.AdamW([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    again.load_state_dict(found["optimizer"])
    assert torch.equal(again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["python"] == tree["python"]
    assert found["numpy"] == tree["numpy"]
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
    found = _decode(_encode(tree, "", []), {})
    assert repr(found) == repr(tree)


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    nan, infinity = round_trip(tmp_path, [math.nan, -math.inf])
    assert math.isnan(nan)
    assert infinity == -math.inf


def test_any_safetensors_reader_can_open_the_tensors(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_private(tmp_path, {"masters": {"head": array}})
    assert list(safetensors.numpy.load_file(tmp_path / TENSORS_FILE)) == ["0/masters/head"]
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / TENSORS_FILE)["0/masters/head"], array)


def test_a_type_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"0/a/1.*object"):
        write_private(tmp_path, {"a": [1, object()]})
