"""Whether a run's data was cut with the tokenizer of the model that the run starts from.

Ids of another tokenizer are still ids of the model, so training would go on with nonsense and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.interop.tokenizer import byte_level

FILE = "tokenizer.json"


def check_tokenizer(folder: Path, dataset: Dataset, say: Callable[[str], None]) -> None:
    """Raises ConfigError where `dataset` has other ids than the model in `folder`; says where that cannot be known."""
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
