"""Text in a dataset of the Hugging Face hub, read as it is needed: nothing of it is kept on the disk.

A dataset is pinned to the commit that is the newest when it is named, so that all of its files are of one time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from fsspec.utils import glob_translate

from spes_p2p.errors import DataError, first_line

_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.*))?", re.ASCII)


@dataclass(frozen=True, order=True)
class HubFile:
    """A file of a dataset at one commit: as much of a Path as reading a corpus needs.

    `size`: bytes; `content`: the hub's hash of them.
    """

    url: str
    size: int
    content: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.url).suffixes

    def open(self, mode: str = "rb") -> BinaryIO:
        """What is read of it is fetched then, by ranges."""
        return cast(BinaryIO, _file_system().open(self.url, mode))


def is_on_hub(pattern: str) -> bool:
    """Whether an input of `tokenize` is one of the hub."""
    return pattern.startswith("hf://")


def find_hub_files(pattern: str, suffixes: tuple[str, ...]) -> list[HubFile]:
    """The files of `hf://datasets/OWNER/NAME[@REVISION][/PATH]`; PATH: a file, a folder, or a glob with * and **.

    Of a folder, those with one of `suffixes`. Raises DataError where it names nothing that this machine may read.
    """
    found = _DATASET.fullmatch(pattern)
    if found is None:
        raise DataError(f"{pattern} names no dataset on the hub", fix="write hf://datasets/OWNER/NAME or .../NAME/PATH")
    name, revision, path = found[1], found[2], (found[3] or "").strip("/")
    try:
        commit = _hub().dataset_info(name, revision=revision).sha
        root = f"datasets/{name}@{commit}"
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
        start = path if fixed == path else fixed.rpartition("/")[0]
        listed = _file_system().find(f"{root}/{start}".rstrip("/"), detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:  # the hub, and the network before it, fail in many ways
        raise DataError(
            f"{pattern} cannot be opened: {first_line(error)}",
            fix="check the name and the network; for a private or gated dataset log in with `hf auth login`",
        ) from error
    wanted = re.compile(glob_translate(path)) if fixed != path else None
    files = [HubFile(f"hf://{at}", int(about["size"]), _content(about)) for at, about in listed.items()]
    if wanted is not None:
        return [file for file in files if wanted.fullmatch(file.url.partition(f"{root}/")[2])]
    return [file for file in files if file.name.endswith(suffixes) or file.url.endswith(f"{root}/{path}")]


def _content(about: dict[str, Any]) -> str:
    large = about.get("lfs")
    return str(large["sha256"] if large else about["blob_id"])


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _file_system() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem(skip_instance_cache=True)
