"""Opens the data of a run for its organiser, on disk or on the web, and checks its amount and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spes_p2p.config.schema import Config
from spes_p2p.config.sections import is_public
from spes_p2p.data.loader import check_enough, check_vocabulary, open_dataset, with_datasets
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.trees import FolderPieces
from spes_p2p.data.web_url import WebAccess, WebFolder, checked_urls, needs_consent
from spes_p2p.errors import ConfigError
from spes_p2p.exchange.pieces import EmptyShelf, PieceSource
from spes_p2p.peer.start_state import check_tokenizer
from spes_p2p.peer.web_data import absent_on_web, open_on_web

Say = Callable[[str], None]


async def open_run_data(
    config: Config, folder: Path, init_from: Path | None, say: Say
) -> tuple[Config, PieceSource | None]:
    """The config to publish, whose `data.urls` are those that peers are told, and the data; None: peers bring it.

    `folder` may keep what was found; `init_from`: the model that the run starts from. Raises ConfigError, DataError.
    """
    if config.data.source == "local":
        return config, None
    urls = checked_urls(config.data.urls)
    if not config.data.path and not urls:
        raise ConfigError(
            "there is no training data: the run hands out a dataset to its peers, but none was given",
            fix="give the folder of the token shards with --data, name their URLs with data.urls, or let "
            "peers bring their own: data.source=local",
        )
    shelf: PieceSource
    if config.data.path:
        dataset = open_dataset(config)
        if words := _from_elsewhere(dataset, Path(config.data.path)):
            say(words)
        shelf = FolderPieces.open(dataset, folder, say)
        own = [WebFolder(url, is_own=True) for url in urls]  # those of a manifest may be a stranger's words
        urls = urls or checked_urls(dataset.urls)
        own = own or [WebFolder(url) for url in urls if not needs_consent(url)]
        access = WebAccess.ANY if config.data.urls else WebAccess.PUBLIC
        for url, why in (await absent_on_web(own, access, shelf.grid)).items():  # the run can go on for a while
            say(f"no data at {url}: {why}")
    else:
        found = await open_on_web(urls, say, folder)
        dataset, shelf = found.manifest.dataset(), EmptyShelf(found.grid)
        check_vocabulary(dataset, config)
        if init_from is not None:
            check_tokenizer(init_from, dataset, say)
    check_enough(shelf.grid.tokens, config)
    config = with_datasets(config, dataset, shelf.grid.catalogue)
    for url in filter(needs_consent, urls):
        say(f"{url} is on a private network or plain http: peers fetch data from it only with join --web-data any")
    config = config.model_copy(update={"data": config.data.model_copy(update={"urls": urls})})
    return with_tokenizer(config, dataset, say), shelf


def _from_elsewhere(dataset: Dataset, given: Path) -> str:
    """That a list names files outside its folder, for whose content no manifest stands: it may be somebody else's."""
    home = given.resolve().parent
    unproven = [file.path for file in dataset.files if file.sha256 is None]
    found = [path for path in unproven if not path.resolve().is_relative_to(home)]
    if not found:
        return ""
    return (
        f"note: {given} lists files outside its folder, and peers are given what is in them: "
        + ", ".join(map(str, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    )  # fmt: skip


def with_tokenizer(config: Config, dataset: Dataset, say: Say) -> Config:
    """The config that is published: it names the tokenizer of the data, for whoever exports, its hash, and what ends
    a document.

    What the organiser has named stays; a file of this machine is no name, and is not told to others. Raises
    ConfigError where the organiser has named another tokenizer than the data was cut with.
    """
    found = {"tokenizer": dataset.tokenizer or "", "tokenizer_hash": dataset.tokenizer_fingerprint or ""}
    if not config.data.tokenizer and found["tokenizer"] and not is_public(found["tokenizer"]):
        say("the data's tokenizer is a local file: whoever exports the model needs it, or its name on the hub "
            "(data.tokenizer=NAME)")  # fmt: skip
        found["tokenizer"] = ""
    named = {key: getattr(config.data, key) or value for key, value in found.items()}
    if found["tokenizer_hash"] not in ("", named["tokenizer_hash"]) or _one_is_byte(found, named):
        raise ConfigError(
            f"the data was tokenized with {dataset.tokenizer!r}, but the config names {named['tokenizer']!r}, "
            "which is a different tokenizer",
            fix="tokenize with the one that the config names, or leave data.tokenizer and data.tokenizer_hash out",
        )
    end = config.data.eos_id if dataset.eos_id is None else dataset.eos_id
    return config.model_copy(update={"data": config.data.model_copy(update=named | {"eos_id": end})})


def _one_is_byte(found: dict[str, str], named: dict[str, str]) -> bool:
    """Names on the hub may stand for one tokenizer, but not for the built-in one."""
    names = {found["tokenizer"], named["tokenizer"]}
    return "" not in names and len(names) == 2 and "byte" in names
