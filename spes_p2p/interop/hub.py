"""The Hugging Face hub: the folder of an exported model goes there, and models come from there.

The hub's own library does the transfers, and keeps what it downloads in its cache. Who may write where, and which files
are there already, is the hub's to say; what is refused becomes one sentence with the fix. A model of another run is
never overwritten: the model card names the run that its repository belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.errors import ConfigError, NetworkError, first_line
from spes_p2p.interop.card import CARD_FILE, run_of_card, with_licence_of

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import HfApi, ModelInfo

Say = Callable[[str], None]
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DOWNLOADED = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]
"""Other copies of the same weights."""
_MADE_BY_THE_HUB = {".gitattributes"}
"""What a repository without a model may hold."""
_TOKENS = "https://huggingface.co/settings/tokens"


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is OWNER/NAME, as the hub names models."""
    if not _is_name(name):
        raise ConfigError(
            f"{name!r} names no model on the Hugging Face hub", fix="write ORGANISATION/NAME or USER/NAME"
        )


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and ".." not in name and "--" not in name


def model_folder(source: Path, say: Say) -> Path:
    """`source` if it is a folder; of OWNER/NAME[@REVISION], the folder in the hub's cache that it is downloaded to.

    A branch or tag (by default the branch `main`) stands for the commit that it is now, which is said; what is whole in
    the cache is not downloaded again. Raises ConfigError where the hub has no such model or revision or keeps it from
    this machine, NetworkError where the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    name, _, revision = str(source).partition("@")
    if source.exists() or not _is_name(name):
        return source  # the error that there is no such folder is up to who reads it
    api = HfApi()
    with _plain_errors(name, "try again: what has come is kept", revision):
        commit = revision if _COMMIT.fullmatch(revision) else api.model_info(name, revision=revision or None).sha
        say(f"the model {name} at commit {commit} of the Hugging Face hub")
        return Path(
            api.snapshot_download(name, revision=commit, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED)
        )


def check_token() -> None:
    """Asks the hub whose token this machine has, before any long work.

    Raises ConfigError where it has none, or one that the hub does not know; NetworkError.
    """
    from huggingface_hub import HfApi

    with _plain_errors("this machine's account", "try again when the hub can be reached"):
        HfApi().whoami()


def push_folder(folder: Path, name: str, public: bool, say: Say) -> str:
    """Uploads an exported model, and returns its address at the commit that it became.

    `name`: OWNER/NAME, made if it is not there, and private unless `public`. Files that are there already are not sent
    again, so that the same call resumes an upload that broke off. Raises ConfigError where the token may not write
    there or another model is there, NetworkError where the hub cannot be reached or refuses for other reasons.
    """
    from huggingface_hub import HfApi

    check_name(name)
    if not all((folder / file).is_file() for file in ("config.json", CARD_FILE)):  # as upcycle's, which no run made
        raise ConfigError(f"{folder} holds no exported model", fix="give the folder that export wrote with --output")
    api, again = HfApi(), f"continue with: spes-p2p export --output {folder} --push {name}"
    with _plain_errors(name, f"{again} --public" if public else again):
        info = _found(api, name)
        if info is None:
            api.create_repo(name, private=not public)
            say(f"created {name}, {_visibility(not public)}")
        elif info.private == public:
            say(f"{name} is {_visibility(bool(info.private))} and remains so; its settings on the hub change that")
        theirs = _card(api, info)
        if theirs is not None:
            run = run_of_card(theirs)
            if run is None or run != run_of_card((folder / CARD_FILE).read_text(encoding="utf-8")):
                what = "a model of another run" if run else "something else"
                raise ConfigError(
                    f"the name {name} is taken: it holds {what}",
                    fix="choose another name with --push, or delete it on the hub",
                )
            _keep_licence(theirs, folder)
        else:  # the card goes first: by it an upload that breaks off is known as that of this run
            api.upload_file(path_or_fileobj=folder / CARD_FILE, path_in_repo=CARD_FILE, repo_id=name)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
        return f"{api.endpoint}/{name}/tree/{commit.oid}"


def _found(api: HfApi, name: str) -> ModelInfo | None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(name)
    except RepositoryNotFoundError:
        return None


def _visibility(private: bool) -> str:
    return "private" if private else "public"


def _card(api: HfApi, info: ModelInfo | None) -> str | None:
    """The card of what the hub has; None for nothing. What has files but no card is a card that says nothing."""
    files = {file.rfilename for file in (info.siblings if info else None) or ()} - _MADE_BY_THE_HUB
    if info is None or not files:
        return None
    if CARD_FILE not in files:
        return ""
    return Path(api.hf_hub_download(info.id, CARD_FILE, revision=info.sha)).read_text(encoding="utf-8")


def _keep_licence(theirs: str, folder: Path) -> None:
    """What was said of the licence on the hub stays, in the folder's card too."""
    path = folder / CARD_FILE
    path.write_text(with_licence_of(path.read_text(encoding="utf-8"), theirs), encoding="utf-8")


@contextmanager
def _plain_errors(name: str, again: str, revision: str = "") -> Iterator[None]:
    """Makes what the hub's library raises one sentence with the fix.

    `name`, `revision`: what is asked for. `again`: what to do where it is not the user's fault.
    """
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "this machine has no token of the Hugging Face hub",
            fix=f"log in with `hf auth login`, or set HF_TOKEN (a token that may write: {_TOKENS})",
        ) from error
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        is_wrapped = isinstance(error, LocalEntryNotFoundError) or type(error) is RuntimeError
        cause = error.__cause__ if is_wrapped and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise _unseen(cause, name, revision) or _refusal(cause, name, again) from error
        if isinstance(cause, OfflineModeIsEnabled):
            raise ConfigError(
                f"{name} is asked for, but HF_HUB_OFFLINE keeps this machine from the hub", fix="unset HF_HUB_OFFLINE"
            ) from error
        raise NetworkError(f"the transfer to or from the hub broke off: {first_line(cause)}", fix=again) from error
    except ValueError as error:  # the header of the model card
        raise ConfigError(f"the hub refuses {CARD_FILE}: {' '.join(str(error).split())}", fix="correct it") from error


def _unseen(error: HfHubHTTPError, name: str, revision: str) -> ConfigError | None:
    """Where what was asked for is not there, or not for this machine."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"{name} is only for those who accept its terms",
            fix=f"accept them at https://huggingface.co/{name}, and log in here with `hf auth login`",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ConfigError(
            f"{name} is neither a folder here nor a model on the Hugging Face hub that this machine may see",
            fix="check the name; for a private model log in with `hf auth login`",
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(
            f"{name} on the Hugging Face hub has no revision {revision!r}", fix="check what follows the @"
        )
    return None


def _refusal(error: HfHubHTTPError, name: str, again: str) -> ConfigError | NetworkError:
    status = error.response.status_code
    said = error.server_message or first_line(error)
    if status == 401:
        return ConfigError(
            f"the hub does not accept this machine's token for {name}",
            fix=f"log in again with `hf auth login --force`, or set HF_TOKEN ({_TOKENS})",
        )
    if status == 403:
        return ConfigError(
            f"this machine's token may not write to {name}: {said}",
            fix=f"use a name of your own account or organisation, or a token that may write ({_TOKENS})",
        )
    if status == 409:
        return ConfigError(f"the name {name} is taken: {said}", fix="choose another name with --push")
    return NetworkError(f"the hub answered {status} for {name}: {said}", fix=again)
