"""Where a dataset lies on the web: which URLs may name it, and which machines one that a stranger wrote may lead to.

A URL is that of a folder with the files that `spes-p2p tokenize` writes: `https://...`, or
`hf://datasets/OWNER/NAME[@REVISION][/FOLDER]` on the Hugging Face hub. It holds no secret: keys stay on the machine
that has them (`web_client.py`). Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, quote, unquote, urlsplit

from spes_p2p.errors import ConfigError

MAX_URLS = 16
MAX_URL_CHARACTERS = 512
HUB_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.*))?", re.ASCII)
"""A revision with a slash has it as %2F, as in @refs%2Fconvert%2Fparquet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class WebAccess(StrEnum):
    """Which web servers a peer fetches the run's data from, of those that the organiser names."""

    NO = "no"
    PUBLIC = "public"
    """By https, and at addresses that everybody can reach: none in the network at home."""
    ANY = "any"
    """Also by plain http, and at private addresses."""


@dataclass(frozen=True)
class WebFolder:
    """A checked URL. `is_own`: typed on this machine, which is a consent to its host."""

    url: str
    is_own: bool = False

    def __str__(self) -> str:
        return self.url

    @property
    def is_hub(self) -> bool:
        return self.url.startswith("hf://")

    def of(self, name: str) -> str:
        """The address of one file in it."""
        found = HUB_DATASET.fullmatch(self.url)
        if found is None:
            return f"{self.url.rstrip('/')}/{quote(name)}"
        from huggingface_hub import hf_hub_url  # takes long to import

        repository, revision, folder = found.groups()
        path = f"{folder.strip('/')}/{name}" if folder else name
        return hf_hub_url(repository, path, repo_type="dataset", revision=unquote(revision or "") or None)


def checked_url(text: str, is_own: bool = False) -> str:
    """A URL as it may be told to others, or used by this machine alone.

    Raises ConfigError, which never repeats what may be a secret.
    """
    try:
        parts = urlsplit(text)
        shown, host, _ = shown_url(parts), parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError("a URL given for the data is invalid", fix="write https://HOST/FOLDER") from error
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ConfigError(
            f"the data URL {shown} contains a user name or a password, which all peers would see",
            fix="remove them; keep credentials in ~/.netrc (or `hf auth login`) on the machine that needs them",
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"the data URL {shown} has a part after ? or #, which may hold keys or signatures",
            fix="give the plain URL of the folder that holds manifest.json",
        )
    if len(text) > MAX_URL_CHARACTERS or not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(
            f"the data URL {shown[:80]!r} has over {MAX_URL_CHARACTERS} characters, or some that are not ASCII",
            fix="shorten it, and percent-encode what is not ASCII",
        )
    if parts.scheme == "hf":
        if not HUB_DATASET.fullmatch(text) or ".." in text:
            raise ConfigError(f"{shown} names no dataset on the hub", fix="write hf://datasets/OWNER/NAME/FOLDER")
    elif parts.scheme not in ("https", "http") or not host:
        raise ConfigError(
            f"the data URL {shown.removeprefix('://')} is not on the web",
            fix="write https://HOST/FOLDER or hf://datasets/...",
        )
    elif parts.scheme == "http" and not is_own and not _is_private_host(host):
        raise ConfigError(
            f"{shown} uses plain http, so anybody on the way can read what volunteers fetch",
            fix="write https:// (http:// is for addresses of your own network, such as 192.168.1.5)",
        )
    return text


def checked_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """All of them, each once. Raises ConfigError."""
    found = tuple(dict.fromkeys(checked_url(text) for text in texts))
    if len(found) > MAX_URLS:
        raise ConfigError(f"{len(found)} URLs of the data were given", fix=f"give at most {MAX_URLS}")
    return found


def shown_url(parts: SplitResult) -> str:
    """For people, without whatever may be a secret."""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def needs_consent(url: str) -> bool:
    """Whether peers fetch from it with `--web-data any` alone."""
    return url.startswith("http://") or _is_private_host(urlsplit(url).hostname or "")


def is_public_address(address: str) -> bool:
    """Whether an IP address is one of the internet's: neither of this machine nor of a network at home."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.is_site_local:  # of old networks at home, which Python takes for global
            return False
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if any(one is not None and not is_public_address(str(one)) for one in inner):
            return False
        if found.ipv4_mapped is not None or found in _NAT64:
            return True
    return found.is_global and not found.is_multicast and not found.is_reserved


def _is_private_host(host: str) -> bool:
    """As far as can be seen without asking anybody."""
    try:
        return not is_public_address(host)
    except ValueError:
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
