"""An organiser whose data lies on the web: what it finds there, what it is told, and a new run from it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.config.load import load_config, published_yaml
from spes_p2p.data import web_client
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.trees import TREES, FolderPieces
from spes_p2p.data.web_url import WebAccess
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.peer.bootstrap import BootstrapOptions, _read_run
from spes_p2p.peer.checks import Check
from spes_p2p.peer.doctor import web_check
from spes_p2p.peer.options import NetworkOptions
from spes_p2p.peer.run_file import NewRun, start_run
from spes_p2p.peer.web_data import open_on_web
from tests.data.web_server import Faults, WebServer
from tests.peer.real import make_tokens


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def server(shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(web_client, "BACKOFF_SECONDS", 0.01)
    with WebServer(shards) as server:
        yield server


def whole(shards: Path, folder: Path) -> FolderPieces:
    return FolderPieces.open(Dataset.open(shards), folder, lambda text: None)


def test_a_dataset_is_known_by_its_hashes_alone(server: WebServer, shards: Path, tmp_path: Path) -> None:
    said = list[str]()
    gone = "https://127.0.0.1:1/shards"
    found = asyncio.run(open_on_web([gone, server.url], said.append, tmp_path / "kept"))
    assert found.catalogue == whole(shards, tmp_path).catalogue
    assert (found.manifest.tokenizer, found.manifest.vocab_size) == ("byte", 257)
    assert said == [f"no data at {gone}: manifest.json: 127.0.0.1: ConnectError"]
    assert server.sent < 0.1 * sum(path.stat().st_size for path in shards.glob("*.npy"))
    assert asyncio.run(open_on_web([gone], said.append, tmp_path / "kept")) == found  # no server, at a later start


@pytest.mark.parametrize("missing", ["manifest.json", TREES, ".npy"])
def test_a_folder_that_is_not_whole_is_named(server: WebServer, missing: str) -> None:
    server.faults = Faults(status=lambda asked: 404 if asked.path.endswith(missing) else None)
    said = list[str]()
    with pytest.raises(DataError, match="none of the data's URLs") as caught:
        asyncio.run(open_on_web([server.url], said.append))
    assert TREES in caught.value.fix
    assert f"no data at {server.url}: " in said[0]
    assert "answered 404" in said[0]


def test_mirrors_of_two_datasets_are_told_apart(server: WebServer, tmp_path: Path) -> None:
    said = list[str]()
    with WebServer(make_tokens(tmp_path, words=5000, seed=3)) as other:
        found = asyncio.run(open_on_web([server.url, other.url], said.append))
        assert found == asyncio.run(open_on_web([server.url], said.append))
    assert said == [f"no data at {other.url}: it differs from the dataset at the URL before it"]


def test_a_new_run_needs_no_data_here(server: WebServer, shards: Path, tmp_path: Path) -> None:
    run = NewRun("mine", "tiny", "", peers=3, experts_per_peer=3, data_urls=(server.url,))
    made = start_run(run, tmp_path / "mine.yaml", tmp_path / "node")
    config = load_config(made.path)
    assert (config.data.path, config.data.urls, config.model.vocab_size) == ("", (server.url,), 257)
    assert server.url not in published_yaml(config)
    with pytest.raises(ConfigError, match="contains a user name or a password"):
        start_run(NewRun("a", "tiny", "", 3, 3, data_urls=("https://a:b@c.org",)), tmp_path / "a.yaml", tmp_path)
    assert not (tmp_path / "a.yaml").exists()


def test_the_run_is_the_same_wherever_its_data_lies(server: WebServer, shards: Path, tmp_path: Path) -> None:
    """With data, without it, and with other URLs: neither the dataset's hash nor what is published differs."""

    def read(*overrides: str, data: str | None = None) -> tuple[str, bytes, int, list[str]]:
        said = list[str]()
        options = BootstrapOptions(NetworkOptions(), tmp_path / "node", Path("tiny"), data, overrides)
        run = asyncio.run(_read_run(options, said.append))
        shelf = run.data
        assert shelf is not None
        return published_yaml(run.config), shelf.grid.catalogue.dataset_hash, shelf.held, said

    here = read(data=str(shards))
    web = read(f"data.urls={server.url}")
    with WebServer(shards) as other:
        moved = read(f"data.urls=[{other.url}, {server.url}]")
    assert here[:2] == web[:2] == moved[:2]
    assert here[2] > 0
    assert web[2] == moved[2] == 0
    assert "--web-data any" in web[3][0]


def test_the_doctor_says_which_web_servers_give_the_data(server: WebServer, shards: Path, tmp_path: Path) -> None:
    grid = whole(shards, tmp_path / "whole").grid
    with WebServer(make_tokens(tmp_path, words=5000, seed=3)) as false:
        gone = "https://127.0.0.1:1/shards"

        def check(*urls: str, access: WebAccess = WebAccess.ANY) -> Check:
            return asyncio.run(web_check(urls, access, grid))

        assert check(server.url) == Check("web", "ok", "1 of 1 web servers have the run's data")
        found = check(server.url, gone, false.url)
        assert (found.level, found.text.split("; ")[0]) == ("warning", "1 of 3 web servers have the run's data")
        assert f"{gone}: manifest.json: 127.0.0.1: ConnectError" in found.text
        assert f"{false.url}: manifest.json at " in found.text
        asked = len(server.asked)
        found = check(server.url, access=WebAccess.PUBLIC)
        assert f"{server.url}: not on the public web" in found.text
        assert len(server.asked) == asked
