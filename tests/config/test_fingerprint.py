"""The fingerprint covers what peers agree on and nothing else, and a peer may change only what it does not cover."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.config.fingerprint import (
    apply_peer_overrides,
    check_peer_overrides,
    differences,
    fingerprint,
    local_keys,
    split_overrides,
)
from spes_p2p.config.load import bundled_config, config_from_text, config_from_tree, load_config, published_yaml
from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.config.sections import is_local
from spes_p2p.errors import PermanentError

TINY = load_config(bundled_config("tiny"))
TREE = TINY.model_dump()
OTHER_VALUES: dict[str, Any] = {  # where another value of the same type would not fit the rest
    "run.initial_state": "ab" * 32,
    "model.document_end": 256,
    "model.embedding_rows": 300,
    "model.vocab_size": 256,
    "model.num_heads": 8,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
    "optimizer.batch_sequences": 16,
    "optimizer.micro_batch_sequences": 4,
    "optimizer.betas": (0.8, 0.9),
    "data.mix": ((0, 1),),
    "data.datasets": (("web", 1, "ab" * 32),),
    "data.urls": ("https://example.org/shards",),
    "data.eos_id": 256,
    "data.tokenizer_hash": "ab" * 32,
    "sync.steps_per_round": 7,
    "scheduler.warmup_ratio": 0.1,
    "swarm.experts_per_peer": 2,
}
ONLY_ONE_VALUE = {key for key, field in fields_of_tree() if len(get_args(field.annotation)) == 1}


def other(key: str) -> Config:
    """TINY with another value of one field."""
    section, name = key.split(".")
    changed = OTHER_VALUES.get(key)
    if changed is None:
        changed = _another(TREE[section][name], get_args(dict(fields_of_tree())[key].annotation))
    return config_from_tree({**TREE, section: {**TREE[section], name: changed}})


def _another(value: Any, literals: tuple[Any, ...]) -> Any:
    if literals:
        return next(literal for literal in literals if literal != value)
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2
        case _:
            return value + "x"


@pytest.mark.parametrize(("key", "local"), [(k, is_local(f)) for k, f in fields_of_tree() if k not in ONLY_ONE_VALUE])
def test_exactly_the_agreed_fields_change_the_fingerprint(key: str, local: bool) -> None:
    changed = other(key)
    assert changed != TINY
    assert (fingerprint(changed) == fingerprint(TINY)) is local
    assert [difference.key for difference in differences(TINY, changed)] == ([] if local else [key])


def test_differences_give_both_values() -> None:
    (difference,) = differences(TINY, other("sync.steps_per_round"))
    assert difference == ("sync.steps_per_round", [[40, 10], [0, 20]], 7)


def test_fingerprint_does_not_depend_on_how_the_config_was_written() -> None:
    text = (
        "sync: {merge_interval: 20, merge_decay_steps: 400, tile_values: 65536, steps_per_round: [[40, 10], [0, 20]]}\n"
    )
    rest = published_yaml(TINY).split("sync:")[0].replace("rope_theta: 10000.0", "rope_theta: 10000")
    swarm = "swarm: {experts_per_peer: 3, min_peers: 3}\n"
    assert fingerprint(config_from_text(rest + text + swarm)) == fingerprint(TINY)


def test_peer_may_choose_local_fields_only() -> None:
    chosen = apply_peer_overrides(TINY, ["optimizer.micro_batch_sequences=2", "output.log_every_steps=7"])
    assert chosen.optimizer.micro_batch_sequences == 2
    assert fingerprint(chosen) == fingerprint(TINY)
    with pytest.raises(PermanentError, match=r"model\.top_k=1 cannot be set for one peer.* use 2") as error:
        apply_peer_overrides(TINY, ["output.log_every_steps=7", "model.top_k=1"])
    assert "optimizer.micro_batch_sequences" in error.value.fix
    with pytest.raises(PermanentError, match="not divisible"):
        apply_peer_overrides(TINY, ["optimizer.micro_batch_sequences=3"])


def test_what_no_run_would_take_is_refused_before_a_run_is_known() -> None:
    check_peer_overrides(["data.urls=https://a/b", "optimizer.micro_batch_sequences=3", "model.top_k=two"])
    for override in ("output.tensorboard=maybe", "optimizer.micro_batch_sequences=0", "output.tensorbord=true"):
        with pytest.raises(PermanentError, match=override.partition("=")[0]):
            check_peer_overrides([override])


@given(st.lists(st.sampled_from([key for key, _ in fields_of_tree()])))
def test_split_overrides_loses_nothing(keys: list[str]) -> None:
    agreed, local = split_overrides([f"{key}=1" for key in keys])
    assert sorted(agreed + local) == sorted(f"{key}=1" for key in keys)
    assert all(override.partition("=")[0] in local_keys() for override in local)
