"""What a run says of its data's tokenizer: a name that means the same everywhere, and the hash; no path."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.config.load import config_from_text, published_yaml
from spes_p2p.data.manifest import Dataset
from spes_p2p.errors import ConfigError
from spes_p2p.peer.run_data import with_tokenizer
from tests.sync.swarm_cases import small_config

HASH = "ab" * 32


def dataset(name: str | None, fingerprint: str | None = HASH) -> Dataset:
    return Dataset("uint16", (), 257, 256, name, fingerprint)


@pytest.mark.parametrize("name", ["byte", "Qwen/Qwen3-0.6B"])
def test_a_name_is_published_with_the_hash(name: str) -> None:
    said = list[str]()
    config = with_tokenizer(small_config(), dataset(name), said.append)
    published = config_from_text(published_yaml(config)).data
    assert (published.tokenizer, published.tokenizer_hash) == (name, HASH)
    assert published.eos_id == 256
    assert said == []


def test_of_a_file_only_the_hash_is(tmp_path: Path) -> None:
    said = list[str]()
    config = with_tokenizer(small_config(), dataset(str(tmp_path / "tokenizer.json")), said.append)
    assert (config.data.tokenizer, config.data.tokenizer_hash) == ("", HASH)
    assert str(tmp_path) not in published_yaml(config)
    assert "data.tokenizer=NAME" in said[0]


def test_what_the_organiser_names_stays() -> None:
    said = list[str]()
    config = with_tokenizer(small_config("data.tokenizer=gpt2"), dataset("/tok.json"), said.append)
    assert (config.data.tokenizer, config.data.tokenizer_hash, said) == ("gpt2", HASH, [])


@pytest.mark.parametrize("named", ["data.tokenizer=gpt2", f"data.tokenizer_hash={'cd' * 32}"])
def test_another_tokenizer_than_the_datas_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="tokenized with 'byte'") as caught:
        with_tokenizer(small_config(named), dataset("byte"), list[str]().append)
    assert "data.tokenizer_hash" in caught.value.fix


def test_of_raw_lists_nothing_is_known() -> None:
    said = list[str]()
    config = with_tokenizer(small_config(), dataset(None, None), said.append)
    assert (config.data.tokenizer, config.data.tokenizer_hash, said) == ("", "", [])
    named = with_tokenizer(small_config("data.tokenizer=byte"), dataset(None, None), said.append)
    assert named.data.tokenizer == "byte"
    raw = Dataset("uint16", ())
    assert with_tokenizer(small_config(), raw, said.append).data.eos_id is None
    assert with_tokenizer(small_config("data.eos_id=3"), raw, said.append).data.eos_id == 3
