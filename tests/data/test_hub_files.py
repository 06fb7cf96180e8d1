"""A dataset of the hub is tokenized as it is read: the same shards as of copies here, and nothing kept on the disk."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.data import readers
from spes_p2p.data.readers import SUFFIXES, find_hub_files
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.errors import DataError, NetworkError
from tests.data.test_tokenize import content, parquet
from tests.interop.hub_server import HubServer, Refusal, hub_for

NAME = "datasets/me/text"
OPTIONS = TokenizeOptions(processes=1)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The dataset as files on this machine."""
    folder = tmp_path / "here"
    (folder / "data/en").mkdir(parents=True)
    (folder / "data/one.jsonl").write_bytes(lines(*(f"document {number} " * 50 for number in range(200))))
    (folder / "data/en/two.jsonl.gz").write_bytes(gzip.compress(lines("packed", "in two")))
    parquet(folder / "data/three.parquet", [f"row {number}" for number in range(3000)])
    (folder / "README.md").write_bytes(b"# Text")
    return folder


@pytest.fixture
def hub(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for(monkeypatch, tmp_path / "cache") as server:
        files = {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
        server.create(NAME, files)
        yield server


def names(pattern: str) -> list[str]:
    return [file.url.partition("/data/")[2] for file in find_hub_files(pattern, SUFFIXES)]


def test_the_shards_are_those_of_a_copy_here(hub: HubServer, here: Path, tmp_path: Path) -> None:
    tokenize([str(here)], tmp_path / "copied", OPTIONS)
    done = tokenize([f"hf://{NAME}"], tmp_path / "streamed", OPTIONS)
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")
    assert {file.file for file in done.manifest.inputs} == {"one.jsonl", "two.jsonl.gz", "three.parquet"}
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_files_folders_and_globs_name_what_they_name_here(hub: HubServer) -> None:
    hf = f"hf://{NAME}"
    assert sorted(names(hf)) == ["en/two.jsonl.gz", "one.jsonl", "three.parquet"]
    assert names(f"{hf}/data/en") == names(f"{hf}/data/**/*.gz") == ["en/two.jsonl.gz"]
    assert names(f"{hf}/data/one.jsonl") == ["one.jsonl"]
    assert sorted(names(f"{hf}/data/*")) == ["one.jsonl", "three.parquet"]
    assert names(f"{hf}/nothing") == []


def test_a_revision_may_have_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own conversions to Parquet lie at refs/convert/parquet."""
    asked: list[tuple[str, str | None]] = []

    class Hub:
        def dataset_info(self, name: str, revision: str | None) -> None:
            asked.append((name, revision))
            raise FileNotFoundError

    monkeypatch.setattr(readers, "_hub", Hub)
    for revision in ("@refs%2Fconvert%2Fparquet", "@v1.0", ""):
        assert find_hub_files(f"hf://{NAME}{revision}/data", SUFFIXES) == []
    assert asked == [("me/text", "refs/convert/parquet"), ("me/text", "v1.0"), ("me/text", None)]


def test_it_is_pinned_to_the_commit_of_the_moment(hub: HubServer) -> None:
    pinned = hub.repositories[NAME].commits[-1][0]
    found = find_hub_files(f"hf://{NAME}/data/one.jsonl", SUFFIXES)[0]
    hub.repositories[NAME].commit({"data/one.jsonl": lines("another text")})
    assert f"@{pinned}/" in found.url
    with found.open() as file:
        assert b"document 0" in io.BytesIO(file.read()).readline()
    old = find_hub_files(f"hf://{NAME}@{pinned}/data/one.jsonl", SUFFIXES)
    new = find_hub_files(f"hf://{NAME}/data/one.jsonl", SUFFIXES)
    assert old == [found]
    assert new[0].content != found.content


def test_where_the_hub_fails_the_same_command_goes_on(hub: HubServer, tmp_path: Path) -> None:
    hub.refuses = lambda asked: Refusal(403, "not now") if "resolve" in asked.path and "two" in asked.path else None
    with pytest.raises(NetworkError, match=r"two\.jsonl\.gz cannot be read") as caught:
        tokenize([f"hf://{NAME}"], tmp_path / "out", OPTIONS)
    assert "same command" in caught.value.fix
    hub.refuses = lambda asked: None
    assert tokenize([f"hf://{NAME}"], tmp_path / "out", OPTIONS).files_skipped == 0
    assert tokenize([f"hf://{NAME}"], tmp_path / "out", OPTIONS).files_skipped == 3


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("hf://me/text", "names no dataset on the hub"),
        ("hf://datasets/me/nothing", "cannot be opened"),
        ("hf://datasets/me/text@gone", "cannot be opened"),
        (f"hf://{NAME}/README.md", "has none of the suffixes"),
        (f"hf://{NAME}/nothing", "no file matches"),
    ],
)
def test_what_is_not_there_is_said(hub: HubServer, tmp_path: Path, pattern: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        tokenize([pattern], tmp_path / "out", OPTIONS)
