"""Where the run's data lies on the web: a list that the organiser signs, and that everybody who has it passes on.

It is no part of the run's fingerprint or of the dataset's hash, since addresses change while a run lives: the newest
list counts. It is signed, since whoever could add to it would send all peers to a machine of their choice. Peers fetch
it as they do the catalogue, from each other where the bootstrap node is gone. Leaves out the web itself (`data/web_*`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.certificate import CheckSignature, is_signed
from spes_p2p.consensus.messages import Sealer, Signed
from spes_p2p.data.web_url import checked_urls
from spes_p2p.errors import ConfigError, NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.exchange.patience import ask_small
from spes_p2p.exchange.requests import SourcesRequest
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash, PeerId
from spes_p2p.swarm.ports import Transport
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack, unpack

SOURCES_FILE = "sources"
"""In the folder of the data."""
MAX_SOURCES_BYTES = 16 * 2**10
LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class WebSources:
    """What the organiser signs. Of several lists the one with the highest `sequence` counts; no URLs: from peers only.

    Raises ConfigError for URLs that may not be told to others.
    """

    fingerprint: Hash
    sequence: int
    urls: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.sequence < 2**63:
            raise ValueError(f"a list of web servers with number {self.sequence}")
        try:
            checked_urls(self.urls)
        except ConfigError as error:
            raise ValueError(str(error)) from error


def sign_sources(info: RunInfo, sequence: int, urls: Sequence[str], sealer: Sealer) -> Signed[WebSources]:
    """For the organiser's key alone."""
    return sealer.seal(WebSources(info.fingerprint, sequence, tuple(urls)))


def check_sources(data: bytes, info: RunInfo, check: CheckSignature) -> Signed[WebSources]:
    """Raises RemoteProtocolError unless the organiser of this run has signed it."""
    signed = unpack(Signed[WebSources], data, MAX_SOURCES_BYTES)
    if signed.value.fingerprint != info.fingerprint or signed.author != info.organiser:
        raise RemoteProtocolError(
            f"a list of web servers for another run, or signed by {signed.author} instead of its organiser"
        )
    if not is_signed(signed, check):
        raise RemoteProtocolError("a list of web servers without a valid signature of the organiser")
    return signed


class SourceKeeper:
    """The newest list that this node knows: kept on disk, served to others, and asked for now and then."""

    def __init__(self, info: RunInfo, check: CheckSignature, folder: Path) -> None:
        self._info, self._check = info, check
        self._path = folder / SOURCES_FILE
        self._known: Signed[WebSources] | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when the list has become another one."""
        with contextlib.suppress(OSError, RemoteProtocolError):  # none, or a damaged one: others have it
            self._known = check_sources(self._path.read_bytes(), info, check)

    @property
    def urls(self) -> tuple[str, ...]:
        return self._known.value.urls if self._known is not None else ()

    @property
    def packed(self) -> bytes | None:
        """For others; None where no list is known."""
        return pack(self._known) if self._known is not None else None

    def publish(self, urls: Sequence[str], sequence: int, sealer: Sealer) -> None:
        """By the organiser: a new list where it differs from what was said before."""
        if self._known is None and not urls:
            return
        if self._known is None or tuple(urls) != self.urls:
            newest = self._known.value.sequence + 1 if self._known is not None else 0
            self._take(sign_sources(self._info, max(newest, sequence), urls, sealer))

    async def look(self, transport: Transport, holder: PeerId, stall_seconds: float) -> None:
        """Asks one node. Raises NetworkError, also where it knows no list, and RemoteProtocolError for a false one."""
        request = SourcesRequest(self._info.dataset)
        data = await ask_small(transport, holder, request, stall_seconds, MAX_SOURCES_BYTES)
        self._take(check_sources(data, self._info, self._check))

    async def look_on(
        self, transport: Transport, holders: Callable[[], Sequence[PeerId]], stall_seconds: Callable[[], float]
    ) -> None:
        """For ever: the organiser, and one of the others, now and then."""
        while True:
            others = [peer for peer in holders() if peer != self._info.organiser]
            for holder in [self._info.organiser, *random.sample(others, min(1, len(others)))]:
                with contextlib.suppress(NetworkError, RemoteProtocolError):  # it has none, or is gone
                    await self.look(transport, holder, stall_seconds())
            await asyncio.sleep(LOOK_SECONDS)

    def _take(self, found: Signed[WebSources]) -> None:
        if self._known is not None and found.value.sequence <= self._known.value.sequence:
            return
        self._known = found
        with contextlib.suppress(StorageFull, OSError):  # it is asked for again in the next life
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, pack(found))
        self.changed()
