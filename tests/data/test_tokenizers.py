"""Tokenizers: Hugging Face ones give the ids of their own library, and the end of a text is found or asked for."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from spes_p2p.config.sections import is_public
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.tokenizers import load_tokenizer
from spes_p2p.errors import DataError
from spes_p2p.interop.tokenizer import Publishable


def word_tokenizer(path: Path, *extra: str, words: int = 10) -> Path:
    """A tokenizer.json of words w0, w1, ... and the special tokens `extra`; it asks for truncation to 3 tokens."""
    vocabulary = {f"w{index}": index for index in range(words)} | {"[UNK]": words}
    rust = RustTokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    rust.add_special_tokens(list(extra))
    rust.enable_truncation(3)
    rust.save(str(path))
    return path


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tokenizer_file_gives_its_own_ids(tmp_path: Path, processes: int) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", "<|endoftext|>")
    (tmp_path / "a.jsonl").write_text('{"text": "w3 w1 w2 w5 none"}\n{"text": "\\ud800"}\n{"text": "w4"}\n')
    options = TokenizeOptions(tokenizer=str(path), processes=processes, sequence_length=1)
    manifest = tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", options).manifest
    (file,) = Dataset.open(tmp_path / "out").files
    assert np.load(file.path).tolist() == [3, 1, 2, 5, 10, 11, 4, 11]
    assert (manifest.vocab_size, manifest.eos_id, manifest.bad_lines) == (12, 11, 1)
    assert manifest.tokenizer_fingerprint == load_tokenizer(str(path)).fingerprint


def test_the_end_of_text_is_taken_from_the_option_the_folder_or_a_known_name(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", "<end>", "</s>")
    assert load_tokenizer(str(path)).eos_id == 12
    assert load_tokenizer(str(path), "<end>").eos_id == 11
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert load_tokenizer(str(tmp_path)).eos_id == 11
    assert load_tokenizer(str(tmp_path), "w0").eos_id == 0
    with pytest.raises(DataError, match="has no token '<no>'"):
        load_tokenizer(str(path), "<no>")


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="does not say which token ends a text") as caught:
        load_tokenizer(str(path))
    assert "--eos-token" in caught.value.fix


@pytest.mark.parametrize(("words", "dtype"), [(65534, "uint16"), (65535, "uint32")])
def test_ids_take_two_bytes_where_all_fit(tmp_path: Path, words: int, dtype: str) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", "</s>", words=words)
    (tmp_path / "a.txt").write_text("w65000")
    options = TokenizeOptions(tokenizer=str(path), processes=1, sequence_length=1)
    assert tokenize([str(tmp_path / "a.txt")], tmp_path / "out", options).manifest.dtype == dtype


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    word_tokenizer(tmp_path / "tokenizer.json", "</s>")
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match=r"tokenizer_config.json is damaged"):
            load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("load", [Publishable, functools.partial(load_tokenizer, through_transformers=True)])
def test_code_that_comes_with_a_tokenizer_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object]
) -> None:
    """Nor is anybody asked whether it may: a run's organiser names the tokenizer that `export` loads."""
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    folder = tmp_path / "saved"
    folder.mkdir()
    word_tokenizer(folder / "tokenizer.json", "<end>")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<end>"}))
    (folder / "config.json").write_text('{"model_type": "mine"}')
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: ...\n")
    with pytest.raises(DataError, match="custom code"):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one, with what to do; the hub's library would try each file again and again."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"hub does not answer \(.*refused") as caught:
        load_tokenizer("nobody/has-this-tokenizer")
    assert caught.value.fix == "check the network, or give a tokenizer.json"


def test_a_tokenizer_saved_by_transformers_has_the_fingerprint_of_its_file(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = word_tokenizer(tmp_path / "plain.json", "<end>")
    PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<end>").save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert loaded.eos_id == 11
    again = pickle.loads(pickle.dumps(loaded))  # noqa: S301
    assert [ids.tolist() for ids in again.encode(["w1 w2", ""])] == [[1, 2], []]


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("byte", True),
        ("gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("/home/anna/tok", False),
        ("./tok", False),
        ("../tok", False),
        ("a/b/c", False),
        ("tokenizer.json", False),
        ("", False),
        ("C:\\tok", False),
    ],
)
def test_a_name_means_the_same_everywhere_or_is_a_path(name: str, public: bool) -> None:
    assert is_public(name) == public


def test_a_file_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    word_tokenizer(Path("tok.json"), "</s>")
    assert load_tokenizer("tok.json").name == str(tmp_path / "tok.json")


@pytest.mark.parametrize("place", ["older", "{}/older"])
def test_a_folder_without_a_tokenizer_file_is_taken_wherever_it_lies(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older programs saved it. It is no name on the hub, which another one may have there."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "older"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    loaded = load_tokenizer(place.format(tmp_path))
    assert (loaded.name, loaded.eos_id, loaded.encode(["abb"])[0].tolist()) == (str(folder), 3, [2, 1])
    assert not is_public(loaded.name)
    Publishable(place.format(tmp_path)).save(tmp_path / "out", 8)
    assert load_tokenizer(str(tmp_path / "out")).encode(["abb"])[0].tolist() == [2, 1]


@pytest.mark.parametrize("end", ['["</s>"]', "5", '{"content": 5}', "null"])
def test_a_config_that_names_no_end_is_as_none(end: str, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {end}}}')
    assert load_tokenizer(str(tmp_path)).eos_id == 11


def test_files_on_which_transformers_fails_in_its_own_ways_are_refused(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", "</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": []}')
    with pytest.raises(DataError, match="cannot be loaded"):
        Publishable(str(tmp_path))
    RustTokenizer(WordLevel({}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="does not say which token ends a text"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_with_dropout_cuts_each_text_in_one_way(tmp_path: Path) -> None:
    """Who goes on after an interruption, or has the same text on another machine, gets the same shards."""
    path = _trained("bpe", tmp_path / "tokenizer.json")
    text = "a long way to go, what is of text is text"
    want = load_tokenizer(str(path)).encode([text])[0].tolist()
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.fingerprint == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    for _ in range(10):
        assert tokenizer.encode([text])[0].tolist() == want


def _trained(kind: str, path: Path) -> Path:
    """A tokenizer.json of one kind of model, with `<|endoftext|>` in the model's own vocabulary, as trainers put it."""
    end, texts = "<|endoftext|>", ["a long way to go", "what is of text is text < | >", "end of"] * 20
    if kind == "bpe":
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    elif kind == "wordpiece":
        rust = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
        rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", end], show_progress=False)
    elif kind == "unigram":
        rust = RustTokenizer(models.Unigram())
        rust.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", special_tokens=["<unk>", end], show_progress=False)
    else:
        rust = RustTokenizer(WordLevel(unk_token="<unk>"))
        rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", end], show_progress=False)
    rust.train_from_iterator(texts, trainer)
    rust.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "wordlevel"])
def test_what_looks_like_a_special_token_is_text(kind: str, tmp_path: Path) -> None:
    """A page about tokenizers does not end where it names one; texts without such words are cut as ever."""
    path = _trained(kind, tmp_path / "tokenizer.json")
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(str(path))))  # noqa: S301  # as worker processes get it
    rust, text = RustTokenizer.from_file(str(path)), "of <|endoftext|> is text, and so is a<|endoftext|>b"
    assert rust.encode(text).ids.count(tokenizer.eos_id) > 0
    named, plain, unknown = tokenizer.encode([text, "a long way, of text", "\u4e00"])
    assert tokenizer.eos_id not in named
    assert len(named) > 10 or kind == "wordlevel"
    assert plain.tolist() == rust.encode("a long way, of text").ids
    assert unknown.tolist() == rust.encode("\u4e00").ids


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "wordlevel"])
def test_a_special_token_that_was_added_to_the_model_is_text_too(kind: str, tmp_path: Path) -> None:
    """As tokens of a chat are, which the model's own vocabulary does not have."""
    path = _trained(kind, tmp_path / "tokenizer.json")
    rust = RustTokenizer.from_file(str(path))
    rust.add_special_tokens(["<|im_start|>"])
    rust.save(str(path))
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(str(path))))  # noqa: S301  # as worker processes get it
    added, text = rust.token_to_id("<|im_start|>"), "of <|im_start|> is text"
    assert added in rust.encode(text).ids
    assert added not in tokenizer.encode([text])[0]
