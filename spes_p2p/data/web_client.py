"""Parts of files from web servers: ranges, redirects, retries, and whom a stranger's URL may make us talk to.

Every host is looked up here, each of its addresses is judged, and the connection goes to the address that was judged,
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
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

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
MAX_KNOWN_REDIRECTS = 4096
REDIRECT_SECONDS = 300.0
"""So long a redirect is taken to be valid: hosts of many files answer each request with one."""
_Span = tuple[int, int] | None
"""First byte and the one behind the last; None: all."""
Pace = Callable[[int], Awaitable[None]]
"""Is told of bytes that came, and waits until more may be received."""


class WebClient:
    """Belongs to one event loop; ended by `close`. `pace` keeps this peer's limit."""

    def __init__(self, access: WebAccess, pace: Pace | None = None) -> None:
        self._access = access
        self._pace = pace
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tls: ssl.SSLContext | None = None
        self._clients: dict[str, httpx2.AsyncClient] = {}
        """One a host: a connection that was checked for one name is never used for another."""
        self._redirects: dict[str, tuple[str, float]] = {}
        self._keyed: set[str] = set()
        """Origins that answer with a key alone."""
        self._failures: Counter[str] = Counter()
        """Of connections to each host: the next one goes to another of its addresses."""
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole URLs

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def read(self, folder: WebFolder, name: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on. Raises NetworkError, also where the file ends before."""
        return await self._try(folder, name, size, (start, start + size))

    async def read_whole(self, folder: WebFolder, name: str, most: int) -> bytes:
        """All of a file, of at most so many bytes. Raises NetworkError."""
        return await self._try(folder, name, most, None)

    async def _try(self, folder: WebFolder, name: str, size: int, span: _Span) -> bytes:
        found, most, tries = bytearray(), 0, 0
        limit = 2 * STALL_SECONDS + size / LEAST_BYTES_PER_SECOND
        try:
            async with self._slots, asyncio.timeout(limit) as deadline:
                while True:
                    try:
                        if span is None:
                            await self._read_all(folder.of(name), folder, size, found, deadline)
                        else:
                            await self._read_on(folder.of(name), folder, span, found, deadline)
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
        self, url: str, folder: WebFolder, most: int, found: bytearray, deadline: asyncio.Timeout
    ) -> None:
        """One request for a whole file, from its beginning. Raises _Passing where another try may help."""
        found.clear()
        async with self._answer(folder, url) as response:
            async for chunk in response.aiter_raw():
                await self._count(len(chunk), deadline)
                found += chunk
                if len(found) > most:
                    raise NetworkError(f"{_host(url)} sends more than {most} bytes")

    async def _read_on(
        self, url: str, folder: WebFolder, span: tuple[int, int], found: bytearray, deadline: asyncio.Timeout
    ) -> None:
        """One request for what is not there yet. Raises _Passing where another try may help."""
        begin, end = span[0] + len(found), span[1]
        size = end - span[0]
        async with self._answer(folder, url, (begin, end)) as response:
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

    @asynccontextmanager
    async def _answer(self, folder: WebFolder, url: str, span: _Span = None) -> AsyncIterator[httpx2.Response]:
        """The good answer at the end of all redirects, its body unread. What the connection met may pass."""
        try:
            response = await self._good_answer(folder, url, span)
            try:
                yield response
            finally:
                await response.aclose()
        except (httpx2.TransportError, httpx2.StreamError, ssl.SSLError) as error:
            self._redirects.pop(url, None)
            self._failures[_host(url)] += 1
            raise _Passing(f"{_host(url)}: {type(error).__name__}") from error

    async def _count(self, size: int, deadline: asyncio.Timeout) -> None:
        """Waits for this peer's own limit, which is no fault of the server's."""
        if self._pace is not None:
            loop = asyncio.get_running_loop()
            began, until = loop.time(), deadline.when()
            await self._pace(size)
            if until is not None:
                deadline.reschedule(until + loop.time() - began)

    async def _good_answer(self, folder: WebFolder, url: str, span: _Span) -> httpx2.Response:
        at = self._known_redirect(url)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                response = await self._ask(folder, at, span)
            except (ValueError, httpx2.InvalidURL) as error:
                raise NetworkError(f"{_host(url)} redirects to an invalid URL") from error
            if response.has_redirect_location:
                target = urljoin(at, response.headers["location"])
                await response.aclose()
                if at.startswith("https:") and not target.startswith("https:"):
                    raise NetworkError(f"{_host(at)} redirects from https to {urlsplit(target).scheme[:10]}")
                at = target
                continue
            if response.status_code in (200, 206):
                self._remember(url, at)
                return response
            await response.aclose()
            self._redirects.pop(url, None)
            _refuse(response, at)
        raise NetworkError(f"{_host(url)} redirects more than {MAX_REDIRECTS} times")

    async def _ask(self, folder: WebFolder, url: str, span: _Span) -> httpx2.Response:
        parts = urlsplit(url)
        address = await self._address(folder, parts)
        is_keyed = _origin(parts) in self._keyed
        response = await self._send(parts, address, span, self._key(folder, parts) if is_keyed else "")
        if response.status_code in (401, 403) and not is_keyed and (key := self._key(folder, parts)):
            await response.aclose()
            self._keyed.add(_origin(parts))
            response = await self._send(parts, address, span, key)
        return response

    async def _send(self, parts: SplitResult, address: str, span: _Span, key: str) -> httpx2.Response:
        host = parts.hostname or ""
        place = f"[{address}]" if ":" in address else address
        request = self._client(host).build_request(
            "GET",
            parts._replace(netloc=f"{place}:{parts.port}" if parts.port else place, fragment="").geturl(),
            headers={
                "Host": parts.netloc.rpartition("@")[2],
                "Accept-Encoding": "identity",
                "User-Agent": f"spes-p2p/{__version__}",
                **({"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}),
                **({"Authorization": key} if key else {}),
            },
            extensions={"sni_hostname": host} if host != address else {},
        )
        return await self._client(host).send(request, stream=True)

    def _client(self, host: str) -> httpx2.AsyncClient:
        if host not in self._clients:
            self._tls = self._tls or httpx2.create_ssl_context()
            timeout = httpx2.Timeout(STALL_SECONDS, pool=None)
            self._clients[host] = httpx2.AsyncClient(verify=self._tls, timeout=timeout, trust_env=False)
        return self._clients[host]

    async def _address(self, folder: WebFolder, parts: SplitResult) -> str:
        """Where the host is. Raises NetworkError where we may not talk to it."""
        host = parts.hostname or ""
        if parts.scheme not in ("https", "http") or not host or parts.username is not None:
            raise NetworkError(f"the web server redirects to {parts.scheme[:10]}://{host}, which is not allowed")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _Passing(f"{host} could not be looked up") from error
        addresses = [str(entry[4][0]) for entry in found]
        is_typed = folder.is_own and host == urlsplit(folder.url).hostname
        if self._access is not WebAccess.ANY and not is_typed:
            if parts.scheme != "https":
                raise NetworkError(f"{host} would be contacted over plain http", fix=_CONSENT)
            inside = next((address for address in addresses if not is_public_address(address)), None)
            if inside is not None:
                raise NetworkError(f"{host} is {inside}, an address of a private network", fix=_CONSENT)
        return addresses[self._failures[host] % len(addresses)]

    def _key(self, folder: WebFolder, parts: SplitResult) -> str:
        """The header of this machine's key for a host; "" where it has none, or it is not for this URL."""
        if parts.scheme != "https":
            return ""
        if folder.is_hub:
            from huggingface_hub import constants, get_token

            token = get_token() if parts.netloc == urlsplit(constants.ENDPOINT).netloc else None
            return f"Bearer {token}" if token else ""
        if not folder.is_own or parts.netloc != urlsplit(folder.url).netloc:
            return ""
        return _netrc_key(parts.hostname or "")

    def _known_redirect(self, url: str) -> str:
        target, until = self._redirects.get(url, (url, 0.0))
        return target if until > asyncio.get_running_loop().time() else url

    def _remember(self, url: str, target: str) -> None:
        if target != url and url not in self._redirects:
            if len(self._redirects) >= MAX_KNOWN_REDIRECTS:
                self._redirects.clear()
            self._redirects[url] = target, asyncio.get_running_loop().time() + REDIRECT_SECONDS


_CONSENT = "if you trust who runs it, allow it: join --web-data any"


class _Passing(NetworkError):
    """A passing error, which another attempt may get past."""

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


def _refuse(response: httpx2.Response, url: str) -> None:
    """Raises what an answer without the bytes means."""
    text = f"{_host(url)} answered {response.status_code}"
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


def _netrc_key(host: str) -> str:
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):  # none here
        return ""
    return httpx2.BasicAuth(found[0], found[2] or "")._auth_header if found else ""


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.hostname}:{parts.port}"


def _host(url: str) -> str:
    """The host of a URL, the only part that messages show: the rest may hold a key after a redirect."""
    return urlsplit(url).hostname or ""
