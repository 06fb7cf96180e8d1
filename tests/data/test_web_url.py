"""URLs of data: what may be told to others, and which addresses a stranger's URL may lead to."""

from __future__ import annotations

import pytest

from spes_p2p.data.web_url import WebFolder, checked_url, checked_urls, is_public_address, needs_consent
from spes_p2p.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/shards/",
        "https://example.org:8443/a/b",
        "https://[2606:4700::1]/x",
        "hf://datasets/me/mine",
        "hf://datasets/me/mine@main/a/b",
        "http://192.168.1.5:8000/shards",
        "http://localhost:8000",
    ],
)
def test_addresses_of_folders_are_taken(url: str) -> None:
    assert checked_url(url) == url
    assert needs_consent(url) == url.startswith("http:")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://me:secret@example.org/x", "contains a user name or a password"),
        ("https://secret@example.org/x", "contains a user name or a password"),
        ("hf://datasets/me/mine@main/x?token=secret", "has a part after"),
        ("https://example.org/x?X-Amz-Signature=secret", "has a part after"),
        ("https://example.org/x#secret", "has a part after"),
        ("http://example.org/x", "uses plain http"),
        ("http://8.8.8.8/x", "uses plain http"),
        ("ftp://example.org/x", "is not on the web"),
        ("/srv/shards", "the data URL /srv/shards is not on the web"),
        ("10.0.0.5:80/x", "the data URL 10.0.0.5:80/x is not on the web"),
        ("https:///x", "is not on the web"),
        ("hf://models/me/mine", "names no dataset"),
        ("hf://datasets/me", "names no dataset"),
        ("https://[::1/x", "is invalid"),
        ("https://example.org:99999/x", "is invalid"),
        ("https://example.org/" + 600 * "x", "has over 512"),
        ("https://example.org/\u00f6", "not ASCII"),
    ],
)
def test_what_may_hold_a_secret_or_leads_nowhere_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        checked_url(url)
    assert "secret" not in f"{caught.value} {caught.value.fix}"
    assert caught.value.fix


def test_each_counts_once_and_they_are_bounded() -> None:
    assert checked_urls(["https://a.org", "https://a.org"]) == ("https://a.org",)
    with pytest.raises(ConfigError, match="17 URLs"):
        checked_urls([f"https://a.org/{number}" for number in range(17)])


def test_a_folder_on_the_hub_is_resolved_there() -> None:
    url = "https://huggingface.co/datasets/me/mine/resolve"
    assert WebFolder("hf://datasets/me/mine").of("a.npy") == f"{url}/main/a.npy"
    assert WebFolder("hf://datasets/me/mine@v1/x/y/").of("a.npy") == f"{url}/v1/x/y/a.npy"
    assert WebFolder("hf://datasets/me/mine@refs%2Fpr%2F1").of("a.npy") == f"{url}/refs%2Fpr%2F1/a.npy"
    assert WebFolder("https://example.org/x/").of("a b.npy") == "https://example.org/x/a%20b.npy"


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:192.168.1.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:c0a8:101::1",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_and_of_private_networks(address: str) -> None:
    assert not is_public_address(address)
