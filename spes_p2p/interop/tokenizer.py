"""The tokenizer of a run as files that transformers loads, the built-in one of bytes too.

Which tokenizers a corpus can be cut with is `data/tokenizers`; here they go out again beside an exported model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, not_loaded
from spes_p2p.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerBase


FILE = "tokenizer.json"
BYTE_EOS = "<|endoftext|>"
_SETTINGS = "chat_template", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "model_input_names"
"""Of a tokenizer_config.json, apart from tokens; `save` sets the length."""


class Publishable:
    """A tokenizer that is ready to be saved. `name` as for `spes-p2p tokenize`."""

    def __init__(self, name: str, eos_id: int | None = None) -> None:
        """`eos_id`: what ends the documents of the data, if that is known. Raises DataError where it is not loaded."""
        ours = load_tokenizer(name, eos_id)
        self.name = name
        self.fingerprint = ours.fingerprint
        self.eos_id = ours.eos_id
        self.vocab_size = ours.vocab_size
        self._fast: Any = _loaded(name, ours)
        rust: RustTokenizer = self._fast.backend_tokenizer
        if rust.num_special_tokens_to_add(is_pair=False):  # to every text, which the data was cut without
            self._fast.add_bos_token = self._fast.add_eos_token = False
            rust.post_processor = None

    def check_fits(self, vocab_size: int) -> None:
        """Raises ConfigError where it makes ids that the model does not have."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"tokenizer {self.name!r} has {self.vocab_size} ids, but model.vocab_size is {vocab_size}",
                fix="give the tokenizer of the run's dataset with --tokenizer",
            )

    def save(self, folder: Path, max_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json; `max_length` tokens is what the model was trained on."""
        self._fast.model_max_length = max_length
        self._fast.save_pretrained(folder)


def _loaded(name: str, ours: object) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(ours, ByteTokenizer):
        return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=BYTE_EOS)
    assert isinstance(ours, HuggingFaceTokenizer)
    eos_token = ours.rust.id_to_token(ours.eos_id)
    if Path(name).is_file() or _is_bare(Path(name)):
        return PreTrainedTokenizerFast(tokenizer_object=ours.rust, eos_token=eos_token)
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, eos_token=eos_token)
    except Exception as error:  # the library fails in all ways on files of others
        raise not_loaded(name, first_line(error)) from error
    if (Path(name) / FILE).is_file():
        rust = getattr(loaded, "backend_tokenizer", None)
        if rust is None or HuggingFaceTokenizer(name, rust, ours.eos_id).fingerprint != ours.fingerprint:
            # AutoTokenizer builds many a class from its words alone, but the file as it lies there has cut the data
            loaded = PreTrainedTokenizerFast.from_pretrained(name, eos_token=eos_token)
        if max(loaded.get_vocab().values()) >= ours.vocab_size:
            # its config names tokens that the file lacks, so that the model has no row for them
            known = {name: token for name, token in loaded.special_tokens_map.items() if _has(ours.rust, token)}
            more = [str(token) for token in loaded.extra_special_tokens if _has(ours.rust, str(token))]
            words = known | {"eos_token": eos_token, "extra_special_tokens": more}
            words |= {setting: getattr(loaded, setting) for setting in _SETTINGS}
            loaded = PreTrainedTokenizerFast(tokenizer_object=ours.rust, **words)
    return loaded  # with its chat template, too


def _has(rust: RustTokenizer, token: object) -> bool:
    return isinstance(token, str) and rust.token_to_id(token) is not None


def _is_bare(folder: Path) -> bool:
    """Whether the folder has only a tokenizer.json, which AutoTokenizer cannot load."""
    return folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))


def byte_level() -> RustTokenizer:
    """`ByteTokenizer` in the tokenizers library: ids 0 to 255 are the bytes of UTF-8, 256 ends a text.

    A byte-level BPE without merges, with GPT-2's letters for the 256 bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BYTE_EOS, special=True, normalized=False)])
    return tokenizer


def check_tokenizer(folder: Path, dataset: Dataset, say: Callable[[str], None]) -> None:
    """Raises ConfigError where `dataset` has other ids than the model in `folder`; says where that cannot be known.

    Ids of another tokenizer are still ids of the model: training would go on with nonsense and nothing would say so.
    """
    if (doubt := _doubt(folder, dataset)) is not None:
        say(f"warning: cannot tell whether the data was tokenized with the tokenizer of {folder}: {doubt}")


def _doubt(folder: Path, dataset: Dataset) -> str | None:
    """Why it cannot be known; None where the tokenizer is the same."""
    if not dataset.tokenizer or not dataset.tokenizer_fingerprint:
        return "the data names no tokenizer"
    if not (folder / FILE).is_file():
        return f"that folder has no {FILE}; the data names {dataset.tokenizer!r}"
    try:
        theirs = load_tokenizer(str(folder))
    except DataError as error:
        return str(error)
    if dataset.tokenizer_fingerprint in _fingerprints(folder, theirs):
        return None
    if theirs.vocab_size == dataset.vocab_size:  # the hash depends on the program that wrote the file, too
        return f"{dataset.tokenizer!r} has the same number of ids but a different hash"
    raise ConfigError(
        f"the data was tokenized with {dataset.tokenizer!r} of {dataset.vocab_size} ids, but the {FILE} of the model "
        f"in {folder} has {theirs.vocab_size}",
        fix=f"tokenize with the model's own: --tokenizer {folder}, or its name on the hub",
    )


def _fingerprints(folder: Path, raw: object) -> set[str]:
    """Of the folder's tokenizer as it lies there, as transformers loads it, and of the bytes that it may stand for."""
    assert isinstance(raw, HuggingFaceTokenizer)
    found = {raw.fingerprint}
    if raw.rust.get_vocab() == byte_level().get_vocab():  # what export makes of the built-in one
        found.add(ByteTokenizer.fingerprint)
    with suppress(DataError):  # what transformers cannot load nobody has cut data with
        found.add(load_tokenizer(str(folder), through_transformers=True).fingerprint)
    return found
