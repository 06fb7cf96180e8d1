"""A run that starts from a model: its root is in the fingerprint and in genesis, and peers get it from the swarm."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from spes_p2p.config.fingerprint import fingerprint
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import CheckpointError, ConfigError
from spes_p2p.interop.importing import StartModel
from spes_p2p.interop.upcycle import Upcycling
from spes_p2p.peer.folder import CHAIN, RUN
from spes_p2p.peer.start_state import make_start, start_folder, start_from
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from tests.interop.hub_server import hub_for
from tests.interop.states import layout_of
from tests.interop.test_importing import config_for
from tests.interop.test_upcycle import made, qwen3
from tests.sync.chains import MadeRun


def quiet(text: str) -> None:
    pass


def test_the_root_is_part_of_the_fingerprint_and_of_what_is_stored(tmp_path: Path) -> None:
    start = made(tmp_path, qwen3(), Upcycling())
    plain = config_for(start)
    config = start_from(start.folder, plain, tmp_path / "node", quiet)
    store = StateStore(tmp_path / "store", layout_of(config))
    assert make_start(store, store.layout, config, start.folder).root.hex() == config.run.initial_state
    assert fingerprint(config) != fingerprint(plain)
    (tmp_path / "other").mkdir()
    other = start_from(made(tmp_path / "other", qwen3(), Upcycling()).folder, plain, tmp_path / "node", quiet)
    assert fingerprint(other) != fingerprint(config)


def test_a_folder_that_changed_or_is_not_given_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = made(tmp_path / "a", qwen3(), Upcycling()), made(tmp_path / "b", qwen3(), Upcycling())
    config = start_from(a.folder, config_for(a), tmp_path / "node", quiet)
    store = StateStore(tmp_path / "store", layout_of(config))
    with pytest.raises(CheckpointError, match="the run starts from"):
        make_start(store, store.layout, config, b.folder)
    with pytest.raises(ConfigError, match="the state that the run starts from is not here") as caught:
        make_start(store, store.layout, config, None)
    assert "--init-from" in caught.value.fix
    assert store.latest() is None


def test_a_model_of_the_hub_starts_a_run_and_is_not_asked_for_once_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, said, node = made(tmp_path, qwen3(), Upcycling()), list[str](), tmp_path / "node"
    plain, source = config_for(start), Path("me/start")
    with hub_for(monkeypatch, tmp_path / "cache") as hub:
        commit = hub.create(str(source), {path.name: path.read_bytes() for path in start.folder.iterdir()})
        folder = start_folder(source, node, said.append)
        assert folder is not None
        config = start_from(folder, plain, node, said.append)
        assert said[0] == f"the model me/start at commit {commit} of the Hugging Face hub"
        assert config == start_from(start.folder, plain, node, quiet)
        chain, hub.asked = Chain(node / RUN / CHAIN), []
        chain.append(MadeRun().chain(1)[0])
        assert start_folder(source, node, quiet) == source
        assert hub.asked == []


def test_another_model_than_the_configs_is_refused(tmp_path: Path) -> None:
    start = made(tmp_path, qwen3(), Upcycling())
    config = config_for(StartModel.open(start.folder))
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"top_k": 1})})
    with pytest.raises(ConfigError, match=r"model.top_k is 1"):
        start_from(start.folder, wrong, tmp_path / "node", quiet)


def test_data_of_another_tokenizer_is_refused_before_the_model_is_hashed(tmp_path: Path) -> None:
    start = made(tmp_path, qwen3(vocab_size=300), Upcycling())
    words = {"<|endoftext|>": 0, "a": 1}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(start.folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("abc" * 500)
    tokenize([str(tmp_path / "text.txt")], tmp_path / "shards", TokenizeOptions(tokenizer="byte", processes=1))
    plain, said = config_for(start), list[str]()
    config = plain.model_copy(update={"data": plain.data.model_copy(update={"path": str(tmp_path / "shards")})})
    with pytest.raises(ConfigError, match="tokenized with 'byte'"):
        start_from(start.folder, config, tmp_path / "node", said.append)
    assert said == []
