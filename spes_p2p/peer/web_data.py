"""A node's dealings with the web servers that hold the run's data: a peer's fetching, and an organiser's first look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.actions import Notice
from spes_p2p.data.manifest import MANIFEST, Manifest
from spes_p2p.data.pieces import Catalogue, PieceGrid
from spes_p2p.data.web_client import WebClient
from spes_p2p.data.web_shards import WebMirrors, WebShards, read_catalogue, read_manifest
from spes_p2p.data.web_url import WebAccess, WebFolder, checked_url, needs_consent
from spes_p2p.errors import DataError, NetworkError, RemoteProtocolError
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.files import write_whole
from spes_p2p.swarm.pacing import Pacer
from spes_p2p.sync.web_sources import SourceKeeper
from spes_p2p.wire import pack, unpack

WEB_CATALOGUE = "web-catalogue"
"""In the data folder of a bootstrap node without data, beside the manifest: what it found on the web last."""


def mirrors_of(
    keeper: SourceKeeper,
    grid: PieceGrid,
    access: WebAccess,
    own: Sequence[str],
    traffic: DataTraffic,
    pacer: Pacer,
    tell: Callable[[Notice], None],
) -> WebMirrors:
    """The web servers of a peer: those that were typed here (`own`) first, then those that the organiser names.

    Raises ConfigError for what is no URL.
    """
    typed = [WebFolder(checked_url(url, is_own=True), is_own=True) for url in own]

    async def pace(size: int) -> None:
        traffic.elsewhere += size
        await pacer.take(size, urgent=False)

    mirrors = WebMirrors(WebClient(access, pace), grid, lambda text: tell(Notice("data", text)))
    said = set[str]()

    def use() -> None:
        named = () if access is WebAccess.NO else keeper.urls
        mirrors.use([*typed, *(WebFolder(url) for url in named)])
        refused = [url for url in named if access is WebAccess.PUBLIC and needs_consent(url)]
        for url in (url for url in refused if url not in said):
            said.add(url)
            text = f"the organiser's data URL {url} is not on the public web: allow it with --web-data any"
            tell(Notice("data", text))

    keeper.changed = use
    use()
    return mirrors


@dataclass(frozen=True)
class WebDataset:
    """What an organiser knows of a dataset that lies on the web alone."""

    manifest: Manifest
    catalogue: Catalogue

    @property
    def grid(self) -> PieceGrid:
        return PieceGrid(self.catalogue)


async def open_on_web(urls: Sequence[str], say: Callable[[str], None], kept_in: Path | None = None) -> WebDataset:
    """The dataset at the first of these URLs that has it whole; each that has not is said.

    The organiser owns these servers and believes them; from the run's beginning on its fingerprint says what is right.
    `kept_in`: a folder in which the answer is kept, for a start at which no server answers. Raises DataError.
    """
    client = WebClient(WebAccess.ANY)
    found: WebDataset | None = None
    try:
        for url in urls:
            try:
                found = await _look(client, WebFolder(url, is_own=True), found)
            except (NetworkError, RemoteProtocolError, DataError) as error:
                say(f"no data at {url}: {error}")
    finally:
        await client.close()
    if found is None and kept_in is not None:
        found = _kept(kept_in)
    if found is None:
        raise DataError(
            f"none of the data's URLs has the data ({', '.join(urls)})",
            fix="upload the whole folder that spes-p2p tokenize wrote, with manifest.json and pieces.hashes",
        )
    if kept_in is not None:
        _keep(kept_in, found)
    return found


async def _look(client: WebClient, folder: WebFolder, before: WebDataset | None) -> WebDataset:
    """One server; a piece of it is fetched and checked. Raises DataError where it has another dataset than `before`."""
    found = WebDataset(await read_manifest(client, folder), await read_catalogue(client, folder))
    if before is not None and before.catalogue != found.catalogue:
        raise DataError("it differs from the dataset at the URL before it", fix="upload the same folder to both")
    if found.grid.total:
        await WebShards(client, folder, found.grid).pieces([found.grid.total - 1])
    return before or found


async def absent_on_web(folders: Sequence[WebFolder], access: WebAccess, grid: PieceGrid) -> dict[str, str]:
    """By URL, why a piece of the run's data cannot be had from it; nothing of those from which it can."""
    client, why = WebClient(access), dict[str, str]()
    try:
        for folder in folders:
            try:
                await WebShards(client, folder, grid).pieces([max(0, grid.total - 1)])
            except (NetworkError, RemoteProtocolError) as error:
                why[folder.url] = str(error)
    finally:
        await client.close()
    return why


def _keep(folder: Path, found: WebDataset) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found.manifest.write(folder)
    write_whole(folder / WEB_CATALOGUE, pack(found.catalogue))


def _kept(folder: Path) -> WebDataset | None:
    try:
        manifest = Manifest.read(folder / MANIFEST)
        return WebDataset(manifest, unpack(Catalogue, (folder / WEB_CATALOGUE).read_bytes()))
    except (OSError, DataError, RemoteProtocolError):  # nothing was found there before
        return None
