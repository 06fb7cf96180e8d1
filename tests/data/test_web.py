"""Data from web servers on loopback: right pieces by ranges, and servers that are slow, lie, break off or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpcore2
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from spes_p2p.data import web_client, web_shards
from spes_p2p.data.manifest import Dataset, Manifest
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.trees import TREES, FolderPieces
from spes_p2p.data.web_client import WebClient
from spes_p2p.data.web_shards import MAX_MANIFEST_ENTRIES, WebMirrors
from spes_p2p.data.web_url import WebAccess, WebFolder
from spes_p2p.errors import NetworkError
from spes_p2p.ids import HASH_BYTES
from tests.data.web_server import Asked, Faults, WebServer


@dataclass
class Lab:
    """A dataset as `tokenize` writes it, in three shards of about 280 pieces of 16 bytes, and a client."""

    folder: Path
    whole: FolderPieces
    told: list[str] = field(default_factory=list)
    paced: int = 0

    def play(
        self,
        story: Callable[[WebMirrors], Awaitable[None]],
        *urls: str,
        access: WebAccess = WebAccess.ANY,
        own: bool = False,
    ) -> None:
        async def pace(size: int) -> None:
            self.paced += size

        async def main() -> None:
            mirrors = WebMirrors(WebClient(access, pace), self.whole.grid, self.told.append)
            mirrors.use([WebFolder(url, own) for url in urls])
            try:
                await story(mirrors)
            finally:
                await mirrors.close()

        asyncio.run(main())

    async def check(self, mirrors: WebMirrors, *numbers: int) -> None:
        found = dict(await mirrors.pieces(numbers))
        assert sorted(found) == sorted(numbers)
        assert all(found[number] == self.whole.find(number) for number in numbers)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FolderPieces]:
    folder = tmp_path_factory.mktemp("web")
    (folder / "a.txt").write_bytes(bytes(np.random.default_rng(0).integers(97, 122, 6600, np.uint8)))
    tokenize([str(folder / "a.txt")], folder / "shards", TokenizeOptions(processes=1, max_shard_bytes=128 + 4500))
    (folder / "shards" / TREES).unlink()  # here with small pieces
    return folder / "shards", FolderPieces.open(Dataset.open(folder / "shards"), folder, print, 16)


@pytest.fixture
def lab(made: tuple[Path, FolderPieces], monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(web_client, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(web_shards, "REST_SECONDS", (0.01, 0.02))
    return Lab(*made)


@pytest.fixture
def server(lab: Lab) -> Iterator[WebServer]:
    with WebServer(lab.folder) as server:
        yield server


def of_shard(asked: Asked) -> bool:
    return asked.path.endswith(".npy")


def test_every_piece_comes_with_its_proof_and_neighbours_in_one_request(lab: Lab, server: WebServer) -> None:
    total = lab.whole.grid.total
    assert total > 800

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, *range(total))
        assert server.count(".npy") <= total // web_shards.MOST_TOGETHER + 4
        size = 2 * lab.whole.grid.tokens + (lab.folder / TREES).stat().st_size
        assert server.sent < 1.1 * size
        assert lab.paced == server.sent

    lab.play(story, server.url)


def test_a_single_piece_costs_its_own_hashes_alone(lab: Lab, server: WebServer) -> None:
    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, 150)
        before = server.sent
        await lab.check(mirrors, 151)
        assert server.sent - before == 16
        await lab.check(mirrors, 10)
        assert server.sent - before == 32 + web_shards.GROUP * HASH_BYTES

    lab.play(story, server.url)


def test_a_server_that_breaks_off_is_asked_for_the_rest(lab: Lab, server: WebServer) -> None:
    server.faults = Faults(breaks_off=lambda asked: 100 if of_shard(asked) else None)

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, *range(60))
        spans = [asked.span for asked in server.asked if of_shard(asked)]
        assert spans == [(at, 128 + 960) for at in range(128, 128 + 960, 100)]

    lab.play(story, server.url)


def test_a_server_that_is_gone_and_comes_back(lab: Lab, server: WebServer) -> None:
    port = server.port

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, 3)
        server.__exit__(None, None, None)
        with pytest.raises(NetworkError, match="Connect"):
            await mirrors.pieces([4])
        with WebServer(lab.folder, port):
            while not mirrors.can_be_asked:
                await asyncio.sleep(0.01)
            await lab.check(mirrors, 4)
        server.__enter__()

    lab.play(story, server.url)


def test_a_slow_server_is_given_up_and_another_one_gives_it(
    lab: Lab, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_seconds = web_client.STALL_SECONDS
    monkeypatch.setattr(web_client, "STALL_SECONDS", 0.3)

    def stalls(asked: Asked) -> bool:
        """The client for this host has its patience by now; that for the other host gets the usual one."""
        monkeypatch.setattr(web_client, "STALL_SECONDS", patient_seconds)
        return of_shard(asked)

    server.faults = Faults(stalls=stalls)

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, *range(20))

    with WebServer(lab.folder) as good:
        lab.play(story, server.url, good.url.replace("127.0.0.1", "localhost"))
        assert good.count(".npy") == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (".npy", "piece 200 has another hash"),
        (TREES, "does not belong to the run's data"),
        ("manifest.json", "is damaged"),
    ],
)
def test_a_server_that_lies_is_named_and_asked_no_more(lab: Lab, server: WebServer, what: str, words: str) -> None:
    server.faults = Faults(lies=lambda asked: asked.path.endswith(what))

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, 200)
        asked = len(server.asked)
        await lab.check(mirrors, 201, 500)
        assert len(server.asked) == asked
        assert len(lab.told) == 1
        assert f"at {server.url}" in lab.told[0]
        assert words in lab.told[0]
        assert "not asked for data again" in lab.told[0]

    with WebServer(lab.folder) as good:
        lab.play(story, server.url, good.url)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"a-00000.npy"', '"../../a-00000.npy"'), "has names that lead out of its folder"),
        (('"a-00000.npy"', '"/a-00000.npy"'), "has names that lead out of its folder"),
        (('"a-00000.npy"', '"\\ud800"'), "has names that lead out of its folder"),
        (('"a-00000.npy"', "7"), "has names that lead out of its folder"),
        (('"tokens": 2250', '"tokens": 2251'), "lists shards other than the run's"),
        (('"shards": [', '"shards": [[],'), "is damaged"),
        (('"shards": [', '"shards": ' + "[" * 100_000), "is damaged"),
        (('{', "\\xff", ), "is damaged"),
    ],
    ids=["up", "root", "no text", "number", "tokens", "types", "nested", "no JSON"],
)  # fmt: skip
def test_what_a_manifest_says_is_no_trap(lab: Lab, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    text = (lab.folder / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace(*change, 1))
    assert change[0] in text

    async def story(mirrors: WebMirrors) -> None:
        with pytest.raises(NetworkError, match=words):
            await mirrors.pieces([0])

    with WebServer(tmp_path) as wrong:
        lab.play(story, wrong.url)
        assert wrong.count(".npy") == 0


def test_redirects_are_followed(lab: Lab, server: WebServer) -> None:
    with WebServer(lab.folder) as door:
        door.faults = Faults(redirect=lambda asked: f"{server.url}/{asked.path.rpartition('/')[2]}?signature=secret")

        async def story(mirrors: WebMirrors) -> None:
            await lab.check(mirrors, 1)
            await lab.check(mirrors, 2)
            assert server.count("?signature=secret") == len(server.asked) == len(door.asked) > 4
            server.faults = Faults(status=lambda asked: 403)
            with pytest.raises(NetworkError, match="answered 403") as caught:
                await mirrors.pieces([3])
            assert "secret" not in str(caught.value)

        lab.play(story, door.url)
        door.faults = Faults(redirect=lambda asked: asked.path)

        async def endless(mirrors: WebMirrors) -> None:
            with pytest.raises(NetworkError, match="redirects more than 5 times"):
                await mirrors.pieces([3])

        lab.play(endless, door.url)


def test_a_server_without_ranges_is_borne_with_for_small_files(
    lab: Lab, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = Faults(ignores_range=True)

    async def story(mirrors: WebMirrors) -> None:
        await lab.check(mirrors, 0, 100, 101, 600)

    async def refused(mirrors: WebMirrors) -> None:
        with pytest.raises(
            NetworkError, match=r"127.0.0.1 does not support range requests, which its large files need"
        ):
            await mirrors.pieces([100])

    lab.play(story, server.url)
    monkeypatch.setattr(web_client, "MAX_UNRANGED_BYTES", 1000)
    lab.play(refused, server.url)


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (503, web_client.TRIES), (429, web_client.TRIES)])
def test_what_may_pass_is_tried_again(lab: Lab, server: WebServer, status: int, requests: int) -> None:
    server.faults = Faults(status=lambda asked: status, retry_after="0")

    async def story(mirrors: WebMirrors) -> None:
        with pytest.raises(NetworkError, match=f"127.0.0.1 answered {status}"):
            await mirrors.pieces([100])

    lab.play(story, server.url)
    assert len(server.asked) == requests


@pytest.mark.parametrize("own", [False, True])
def test_strangers_urls_lead_to_no_private_address(lab: Lab, server: WebServer, own: bool) -> None:
    """Typed here, its own host may be private, and others that it leads to not."""

    async def story(mirrors: WebMirrors) -> None:
        if own:
            await lab.check(mirrors, 1)
            server.faults = Faults(redirect=lambda asked: f"http://localhost:{server.port}{asked.path}")
        before = len(server.asked)
        with pytest.raises(NetworkError, match=r"over plain http .*--web-data any"):
            await mirrors.pieces([300])
        assert len(server.asked) == before + own

    lab.play(story, server.url, access=WebAccess.PUBLIC, own=own)
    if own:
        return

    async def inside(mirrors: WebMirrors) -> None:
        with pytest.raises(NetworkError, match=r"localhost is .*, an address of a private network"):
            await mirrors.pieces([1])

    lab.play(inside, f"https://localhost:{server.port}/shards", access=WebAccess.PUBLIC)
    assert server.asked == []


class Rebinding:
    """A resolver that says something else each time, and a network in which each address answers with nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers, self.dialled = list(answers), list[str]()
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", self.connect_tcp)

    async def getaddrinfo(self, host: str, port: int, **hints: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in self.answers.pop(0)]

    async def connect_tcp(self, address: str, *rest: Any) -> Any:
        self.dialled.append(address)
        raise httpcore2.ConnectError("nobody")


PUBLIC, OTHER = "93.184.216.34", "2606:4700::1111"


@pytest.mark.parametrize(
    ("answers", "dialled", "words"),
    [
        ([[PUBLIC], ["127.0.0.1"]], [PUBLIC], "is 127.0.0.1, an address of a private network"),
        ([[PUBLIC, "169.254.169.254"]], [], "is 169.254.169.254, an address of a private network"),
        ([["fec0::1"]], [], "is fec0::1, an address of a private network"),
        ([[PUBLIC, OTHER]] * web_client.TRIES, [PUBLIC, OTHER] * web_client.TRIES, "ConnectError"),
    ],
    ids=["rebinding", "metadata beside", "site-local", "all of its addresses"],
)
def test_the_address_that_was_judged_is_the_one_that_is_dialled(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, answers: list[list[str]], dialled: list[str], words: str
) -> None:
    resolver = Rebinding(monkeypatch, *answers)

    async def story(mirrors: WebMirrors) -> None:
        with pytest.raises(NetworkError, match=words):
            await mirrors.pieces([1])

    lab.play(story, "https://rebinds.example/shards", access=WebAccess.PUBLIC)
    assert resolver.dialled == dialled
    assert resolver.answers == []


def test_a_redirect_to_what_is_not_the_web_ends_there(lab: Lab, server: WebServer) -> None:
    server.faults = Faults(redirect=lambda asked: "gopher://127.0.0.1/shards")

    async def story(mirrors: WebMirrors) -> None:
        with pytest.raises(NetworkError, match=r"redirects to gopher://127.0.0.1, which is not allowed"):
            await mirrors.pieces([1])

    lab.play(story, server.url)
    assert len(server.asked) == 1


def test_a_manifest_of_millions_of_entries_is_not_taken_apart(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("it is taken apart")

    monkeypatch.setattr(Manifest, "parse", parse)
    (tmp_path / "manifest.json").write_bytes(b'{"inputs":[' + b"[]," * MAX_MANIFEST_ENTRIES + b"[]]}")
    with WebServer(tmp_path) as server:

        async def story(mirrors: WebMirrors) -> None:
            with pytest.raises(NetworkError, match="has more than 1048576 entries"):
                await mirrors.pieces([1])

        lab.play(story, server.url)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Certificate and key of localhost, which this process trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    today = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(today - timedelta(days=1)).not_valid_after(today + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    return certificate, private


def test_keys_go_to_their_host_alone_when_it_asks_for_them(
    lab: Lab, tmp_path: Path, tls: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By https, whose certificate is checked for the name while the connection goes to the address that was judged."""
    (tmp_path / "netrc").write_text("machine localhost login me password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with WebServer(lab.folder, tls=tls) as door, WebServer(lab.folder) as shop:
        url = f"https://localhost:{door.port}/shards"
        door.faults = Faults(status=lambda asked: None if "authorization" in asked.headers else 401)

        async def story(mirrors: WebMirrors) -> None:
            await lab.check(mirrors, 1)
            keys = [asked.headers.get("authorization") for asked in door.asked]
            assert keys[0] is None
            assert set(keys[1:]) == {"Basic bWU6c2VjcmV0"}
            assert {asked.host for asked in door.asked} == {f"localhost:{door.port}"}

        lab.play(story, url, own=True)
        door.asked.clear()

        async def stranger(mirrors: WebMirrors) -> None:
            with pytest.raises(NetworkError, match="localhost answered 401"):
                await mirrors.pieces([1])
            assert all("authorization" not in asked.headers for asked in door.asked)

        lab.play(stranger, url)

        async def downgraded(mirrors: WebMirrors) -> None:
            door.faults = Faults(redirect=lambda asked: f"{shop.url}/{asked.path}")
            with pytest.raises(NetworkError, match="localhost redirects from https to http"):
                await mirrors.pieces([1])

        lab.play(downgraded, url, own=True)
        assert shop.asked == []

        async def other_name(mirrors: WebMirrors) -> None:
            with pytest.raises(NetworkError, match=r"127.0.0.1: ConnectError"):
                await mirrors.pieces([1])

        lab.play(other_name, url.replace("localhost", "127.0.0.1"))


def test_the_hubs_token_goes_to_the_hub_alone(
    lab: Lab, tls: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    with WebServer(lab.folder, tls=tls) as hub, WebServer(lab.folder, tls=tls) as cdn:
        endpoint = f"https://localhost:{hub.port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
        hub.faults = Faults(
            status=lambda asked: None if "authorization" in asked.headers else 401,
            redirect=lambda asked: (
                f"https://localhost:{cdn.port}{asked.path}" if "authorization" in asked.headers else None
            ),
        )

        async def story(mirrors: WebMirrors) -> None:
            await lab.check(mirrors, 1)

        lab.play(story, "hf://datasets/me/mine@v1/shards")
        assert {asked.path.rpartition("/")[0] for asked in hub.asked} == {"/datasets/me/mine/resolve/v1/shards"}
        assert hub.asked[1].headers["authorization"] == "Bearer hf_secret"
        assert cdn.asked
        cdn.faults = Faults(status=lambda asked: 401)  # it would like to have one, too

        async def greedy(mirrors: WebMirrors) -> None:
            with pytest.raises(NetworkError, match="answered 401"):
                await mirrors.pieces([1])

        lab.play(greedy, "hf://datasets/me/mine@v1/shards")
        assert all("authorization" not in asked.headers for asked in cdn.asked)
