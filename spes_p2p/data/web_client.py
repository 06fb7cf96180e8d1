"""Parts of files from web servers: ranges, redirects, retries, and whom a stranger's URL may make us talk to.

Every host is looked up here, each of its addresses is judged, and the connection goes to an address that was judged,
also after a redirect. Keys (`~/.netrc`, the token of the Hugging Face hub) are sent to the host that they are for, by
https, when it has refused to answer without; errors and logs name a URL without its query, since redirects lead to
signed ones. Leaves out what the bytes are and whether they are right.
"""

from __future__ import annotations

import asyncio
import logging
import netrc
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2

from spes_p2p import __version__
from spes_p2p.data.web_url import WebAccess, WebFolder, is_public_address
from spes_p2p.errors import NetworkError

AT_ONCE = 6
"""Requests of one peer under way at a time."""
TRIES = 4
"""For one range, as long as no byte more has come."""
BACKOFF_SECONDS = 0.5
MOST_BACKOFF_SECONDS = 20.0
STALL_SECONDS = 10.0
"""Without a byte."""
LEAST_BYTES_PER_SECOND = 4_000
"""A server that is slower for long is given up for this range."""
MAX_REDIRECTS = 5
MAX_UNRANGED_BYTES = 16 * 2**20
"""A server that ignores range requests is tolerated for files up to this size."""
Pace = Callable[[int], Awaitable[None]]
"""Is told of bytes that came, and waits until more may be received."""
_CONSENT = "if you trust who runs it, allow it: join --web-data any"


class WebClient:
    """Belongs to one event loop; ended by `close`. `pace` keeps this peer's limit."""

    def __init__(self, access: WebAccess, pace: Pace | None = None) -> None:
        self._access = access
        self._pace = pace
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._clients: dict[WebFolder, httpx2.AsyncClient] = {}
        """One a folder: whom it may lead to depends on who named it."""
        self._keyed: set[WebFolder] = set()
        """Those that answer with a key alone."""
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole URLs

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def read(self, folder: WebFolder, name: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on. Raises NetworkError, also where the file ends before."""

        async def read_on(found: bytearray, deadline: asyncio.Timeout) -> None:
            await self._read_on(folder, folder.of(name), (start, start + size), found, deadline)

        return await self._try(name, size, read_on)

    async def read_whole(self, folder: WebFolder, name: str, most: int) -> bytes:
        """All of a file, of at most so many bytes. Raises NetworkError."""

        async def read_all(found: bytearray, deadline: asyncio.Timeout) -> None:
            await self._read_all(folder, folder.of(name), most, found, deadline)

        return await self._try(name, most, read_all)

    async def _try(self, name: str, size: int, read: Callable[[bytearray, asyncio.Timeout], Awaitable[None]]) -> bytes:
        """What `read` has put into its first argument, over all tries."""
        found, most, tries = bytearray(), 0, 0
        limit = 2 * STALL_SECONDS + size / LEAST_BYTES_PER_SECOND
        try:
            async with self._slots, asyncio.timeout(limit) as deadline:
                while True:
                    try:
                        await read(found, deadline)
                        return bytes(found)
                    except _Passing as error:
                        tries = 0 if len(found) > most else tries + 1
                        most = max(most, len(found))
                        if tries >= TRIES:
                            raise NetworkError(f"{name}: {error}") from error
                        await asyncio.sleep(max(error.wait_seconds, _backoff(tries)))
        except TimeoutError as error:
            raise NetworkError(f"{name}: {len(found)} of at most {size} bytes in {limit:.0f} s") from error

    async def _read_all(
        self, folder: WebFolder, url: str, most: int, found: bytearray, deadline: asyncio.Timeout
    ) -> None:
        """One request for a whole file, from its beginning. Raises _Passing where another try may help."""
        found.clear()
        async with self._answer(folder, url, {}) as response:
            async for chunk in response.aiter_raw():
                await self._count(len(chunk), deadline)
                found += chunk
                if len(found) > most:
                    raise NetworkError(f"{_host(url)} sends more than {most} bytes")

    async def _read_on(
        self, folder: WebFolder, url: str, span: tuple[int, int], found: bytearray, deadline: asyncio.Timeout
    ) -> None:
        """One request for what is not there yet. Raises _Passing where another try may help."""
        begin, end = span[0] + len(found), span[1]
        size = end - span[0]
        async with self._answer(folder, url, {"Range": f"bytes={begin}-{end - 1}"}) as response:
            skip = _bytes_to_skip(response, begin, _host(url))
            is_exact = response.headers.get("content-length") == str(end - begin)
            async for chunk in response.aiter_raw():
                await self._count(len(chunk), deadline)
                found += chunk[skip : skip + size - len(found)]
                skip = max(0, skip - len(chunk))
                if len(found) == size and not is_exact:  # else it ends by itself, and its connection stays
                    break
        if len(found) < size:
            raise _Passing(f"{_host(url)} broke off after {len(found)} of {size} bytes")

    async def _count(self, size: int, deadline: asyncio.Timeout) -> None:
        """Waits for this peer's own limit, which is no fault of the server's."""
        if self._pace is not None:
            loop = asyncio.get_running_loop()
            began, until = loop.time(), deadline.when()
            await self._pace(size)
            if until is not None:
                deadline.reschedule(until + loop.time() - began)

    @asynccontextmanager
    async def _answer(self, folder: WebFolder, url: str, headers: dict[str, str]) -> AsyncIterator[httpx2.Response]:
        """The good answer at the end of all redirects, its body unread. What the connection met may pass."""
        try:
            response = await self._ask(folder, url, headers)
            try:
                if response.status_code not in (200, 206):
                    _refuse(response)
                yield response
            finally:
                await response.aclose()
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise _Passing(f"{_host(url)}: {type(error).__name__}") from error

    async def _ask(self, folder: WebFolder, url: str, headers: dict[str, str]) -> httpx2.Response:
        """Without the key that this machine has for it, until the answer is that one is needed."""
        key = _key(folder, url)
        if key and folder not in self._keyed:
            response = await self._follow(folder, url, headers)
            if response.status_code not in (401, 403):
                return response
            await response.aclose()
            self._keyed.add(folder)
        return await self._follow(folder, url, {**headers, "Authorization": key} if key else headers)

    async def _follow(self, folder: WebFolder, url: str, headers: dict[str, str]) -> httpx2.Response:
        """The first answer that is no redirect. httpx leaves a key out where another host comes next."""
        client = self._client(folder)
        request: httpx2.Request | None = client.build_request("GET", url, headers=headers)
        for _ in range(MAX_REDIRECTS + 1):
            assert request is not None
            self._check(folder, request.url)
            response = await client.send(request, stream=True)
            if not response.has_redirect_location:
                return response
            await response.aclose()
            before, request = request, response.next_request
            if request is None:
                raise NetworkError(f"{before.url.host} redirects to an invalid URL")
            if before.url.scheme == "https" != request.url.scheme:
                raise NetworkError(f"{before.url.host} redirects from https to {request.url.scheme[:10]}")
        raise NetworkError(f"{_host(url)} redirects more than {MAX_REDIRECTS} times")

    def _client(self, folder: WebFolder) -> httpx2.AsyncClient:
        if folder not in self._clients:
            self._clients[folder] = httpx2.AsyncClient(
                transport=_CheckedTransport(lambda host: self._may_be_inside(folder, host)),
                timeout=httpx2.Timeout(STALL_SECONDS, pool=None),
                headers={"Accept-Encoding": "identity", "User-Agent": f"spes-p2p/{__version__}"},
                trust_env=False,
            )
        return self._clients[folder]

    def _may_be_inside(self, folder: WebFolder, host: str) -> bool:
        """Whether a person has agreed to this host, wherever it is."""
        return self._access is WebAccess.ANY or (folder.is_own and host == httpx2.URL(folder.url).raw_host.decode())

    def _check(self, folder: WebFolder, url: httpx2.URL) -> None:
        """Raises NetworkError where we may not ask for it; see `_CheckedBackend` for where its host may be."""
        if url.scheme not in ("https", "http") or not url.host or url.userinfo:
            raise NetworkError(f"the web server redirects to {url.scheme[:10]}://{url.host}, which is not allowed")
        if url.scheme != "https" and not self._may_be_inside(folder, url.raw_host.decode()):
            raise NetworkError(f"{url.host} would be contacted over plain http", fix=_CONSENT)


class _CheckedTransport(httpx2.AsyncHTTPTransport):
    """Connects through a `_CheckedBackend`, for which httpx has no parameter."""

    def __init__(self, may_be_inside: Callable[[str], bool]) -> None:
        tls = httpx2.create_ssl_context()
        super().__init__(verify=tls)
        self._pool = httpcore2.AsyncConnectionPool(ssl_context=tls, network_backend=_CheckedBackend(may_be_inside))


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Connects to hosts of the internet, and to others where `may_be_inside(host)`: to addresses that were judged."""

    def __init__(self, may_be_inside: Callable[[str], bool]) -> None:
        self._may_be_inside = may_be_inside

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """To the first of its addresses that answers. Raises NetworkError where one of them is not the internet's."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"{host} could not be looked up") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        inside = next((address for address in addresses if not is_public_address(address)), None)
        if inside is not None and not self._may_be_inside(host):
            raise NetworkError(f"{host} is {inside}, an address of a private network", fix=_CONSENT)
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class _Passing(NetworkError):
    """A passing error, which another attempt may get past."""

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


def _refuse(response: httpx2.Response) -> None:
    """Raises what an answer without the bytes means."""
    text = f"{response.url.host} answered {response.status_code}"
    if response.status_code in (408, 425, 429) or response.status_code >= 500:
        wait = response.headers.get("retry-after", "")
        raise _Passing(text, min(float(wait), MOST_BACKOFF_SECONDS) if wait.isdecimal() else 0.0)
    raise NetworkError(text)


def _bytes_to_skip(response: httpx2.Response, begin: int, host: str) -> int:
    """Of the body before what was asked for. Raises NetworkError where a range cannot be had at a bearable price."""
    if response.status_code == 206:
        said = response.headers.get("content-range", "")
        if not said.startswith(f"bytes {begin}-"):
            raise NetworkError(f"{host} sent range {said[:40]!r} instead of the one asked for")
        return 0
    size = response.headers.get("content-length", "")
    if not size.isdecimal() or int(size) > MAX_UNRANGED_BYTES:
        raise NetworkError(f"{host} does not support range requests, which its large files need")
    return begin


def _backoff(tries: int) -> float:
    most = min(MOST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0**tries)
    return most * random.uniform(0.5, 1.0)  # many peers should not come at once


def _key(folder: WebFolder, url: str) -> str:
    """The header of this machine's key for a folder, "" where it has none."""
    if not url.startswith("https:"):
        return ""
    if folder.is_hub:
        from huggingface_hub import constants, get_token

        token = get_token() if urlsplit(url).netloc == urlsplit(constants.ENDPOINT).netloc else None
        return f"Bearer {token}" if token else ""
    if not folder.is_own:
        return ""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(_host(url))
    except (OSError, netrc.NetrcParseError):  # none here
        return ""
    return httpx2.BasicAuth(found[0], found[2] or "")._auth_header if found else ""


def _host(url: str) -> str:
    """The host of a URL, the only part that messages show: the rest may hold a key after a redirect."""
    return urlsplit(url).hostname or ""
