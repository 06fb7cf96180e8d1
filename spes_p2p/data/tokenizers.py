"""The tokenizers a corpus can be cut with: plain bytes, or any Hugging Face tokenizer.

Both can be pickled, so that worker processes get exactly the tokenizer that was fingerprinted. Heavy imports happen
only when such a tokenizer is asked for. It leaves out decoding and everything a model needs to know.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import DataError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

WELL_KNOWN_EOS = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
)
"""Looked for in this order when nothing says which token ends a text."""

HUB_SECONDS = 10.0

Ids = NDArray[np.unsignedinteger]
"""Token ids of one text, in whatever unsigned type the tokenizer makes them."""


class NoEndOfText(DataError):
    """Nothing says which token ends a text, which whoever has the data may know."""


class Tokenizer(Protocol):
    """Text to token ids. Instances are picklable."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex over all that decides the ids."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included."""

    @property
    def eos_id(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text. Special tokens are neither added nor found in it: what looks like one is text, too.

        Raises ValueError where a text is no valid Unicode.
        """


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a text: needs no file and has no unknown text."""

    name = "byte"
    fingerprint = hashlib.sha256(b"spes-p2p byte tokenizer 1").hexdigest()
    vocab_size = 257
    eos_id = 256

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class HuggingFaceTokenizer:
    """A tokenizer of the Hugging Face tokenizers library, without truncation, padding and dropout that its file has."""

    def __init__(self, name: str, rust: RustTokenizer, eos_token: str | int | None) -> None:
        rust.no_truncation()
        rust.no_padding()
        vocabulary = rust.get_vocab(with_added_tokens=True)
        self.name = name
        content = json.loads(rust.to_str())
        self.fingerprint = _fingerprint(content)
        if content["model"].get("dropout"):  # each run would cut otherwise, and one that goes on would lose its place
            model: Any = rust.model
            model.dropout = None
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id = _eos_id(name, vocabulary, eos_token)
        self.rust = rust
        self._spelt = _spelt(rust, content["model"])

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        self.rust.encode_special_tokens = True  # as text; pickling forgets it
        try:
            encodings = self.rust.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:  # how the library refuses a lone surrogate
            raise ValueError("the text is not valid Unicode") from error
        return [np.array(self._as_text(encoding.ids), dtype=np.uint32) for encoding in encodings]

    def _as_text(self, ids: list[int]) -> list[int]:
        """A model that has a special token in its own vocabulary, as Unigram has, finds it in text by itself."""
        if self._spelt.keys().isdisjoint(ids):
            return ids
        return [part for token in ids for part in self._spelt.get(token, (token,))]


def load_tokenizer(name: str, eos_token: str | int | None = None, through_transformers: bool = False) -> Tokenizer:
    """`name` is "byte", a tokenizer.json, a folder as saved by transformers, or a name on the Hugging Face hub.

    `eos_token`: the token that ends a text, or its id; None: the one that the tokenizer names, or a well-known one.
    `through_transformers`: a folder, too, is loaded as a name on the hub is; the same ids may then have another hash.
    Raises DataError when it cannot be loaded or when no token that ends a text is known.
    """
    if name == "byte":
        return ByteTokenizer()
    if through_transformers:
        return _from_transformers(name, eos_token)
    path = Path(name)
    here = str(path.absolute())  # no name that others could take for one on the hub
    if path.is_file():
        return HuggingFaceTokenizer(here, _from_file(path), eos_token)
    if (path / "tokenizer.json").is_file():
        rust = _from_file(path / "tokenizer.json")
        configured = _configured_eos(path / "tokenizer_config.json")
        return HuggingFaceTokenizer(here, rust, configured if eos_token is None else eos_token)
    if path.is_dir():
        return _from_transformers(here, eos_token)
    if path.suffix == ".json" or path.is_absolute():  # no name on the hub, which would be asked for minutes
        raise not_loaded(name, "the file does not exist")
    return _from_transformers(name, eos_token)


def not_loaded(name: str, reason: str) -> DataError:
    """The error for a tokenizer that cannot be had, or not without code of its own, which is never run."""
    fix = "give byte, a tokenizer.json, a folder with one, or a name on the Hugging Face hub"
    return DataError(f"tokenizer {name!r} cannot be loaded: {reason}", fix=fix)


def _from_file(path: Path) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any malformed file
        raise DataError(
            f"{path} is not a tokenizer file of the tokenizers library: {error}", fix="give a tokenizer.json"
        ) from error


def _configured_eos(path: Path) -> str | None:
    """The eos_token of a tokenizer_config.json: a string, or a dict with the string as its content."""
    if not path.is_file():
        return None
    try:
        token: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {first_line(error)}", fix="copy or download it again") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _from_transformers(name: str, eos_token: str | int | None) -> Tokenizer:
    from transformers import AutoTokenizer

    away = "" if Path(name).is_dir() else why_no_hub()
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=bool(away))
    except Exception as error:  # the library fails in all ways on files of others
        if away:
            raise DataError(
                f"tokenizer {name!r} cannot be loaded: the Hugging Face hub does not answer ({away})",
                fix="check the network, or give a tokenizer.json",
            ) from error
        raise not_loaded(name, first_line(error)) from error
    rust = getattr(loaded, "backend_tokenizer", None)
    if rust is None:
        raise DataError(f"tokenizer {name!r} has no fast version", fix="give a tokenizer that has a tokenizer.json")
    return HuggingFaceTokenizer(name, rust, loaded.eos_token if eos_token is None else eos_token)


def why_no_hub() -> str:
    """Why the Hugging Face hub cannot be asked; "" where it can. Its own library would try for a minute, and loudly."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=HUB_SECONDS):
            return ""
    except urllib.error.HTTPError:  # it answers
        return ""
    except OSError as error:
        return first_line(error)


def _eos_id(name: str, vocabulary: dict[str, int], eos_token: str | int | None) -> int:
    if isinstance(eos_token, int):
        if eos_token in vocabulary.values():
            return eos_token
        raise DataError(f"tokenizer {name!r} has no token with id {eos_token}", fix="give the tokenizer of the data")
    candidates = (eos_token,) if eos_token else WELL_KNOWN_EOS
    for token in candidates:
        if token in vocabulary:
            return vocabulary[token]
    if eos_token:
        raise DataError(f"tokenizer {name!r} has no token {eos_token!r} to end a text", fix="give one with --eos-token")
    known = ", ".join(WELL_KNOWN_EOS)
    raise NoEndOfText(
        f"tokenizer {name!r} does not say which token ends a text, and has none of {known}",
        fix="name the token with --eos-token",
    )


def _fingerprint(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _spelt(rust: RustTokenizer, model: dict[str, Any]) -> dict[int, list[int]]:
    """Special tokens in the model's own vocabulary, spelt in tokens of one character each. Unknown text stays so."""
    own = rust.get_vocab(with_added_tokens=False)
    unknown = own.get(model.get("unk_token") or "", model.get("unk_id"))
    special = {at: token.content for at, token in rust.get_added_tokens_decoder().items() if token.special}
    inside = {at: text for at, text in special.items() if text in own and at != unknown}
    letters = {at: [own.get(letter, unknown) for letter in text] for at, text in inside.items()}
    return {at: [letter for letter in found if letter is not None] for at, found in letters.items()}
