"""A Hugging Face hub on loopback, as far as huggingface_hub speaks with one to upload and download models.

Repositories are kept in memory, one commit after another; large files go through the protocol of git LFS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKENS = {"hf_me": "me", "hf_other": "other"}
"""Tokens and the accounts they belong to."""
LARGE = (".safetensors", ".bin")


@dataclass
class Repository:
    """One model. `commits`: (hash, files) from the oldest on."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append((name, files))
        return name


@dataclass
class Refusal:
    """An answer that is no success."""

    status: int
    message: str = ""
    code: str = ""


@dataclass
class Asked:
    """A request that came: what for, by whom, and its body."""

    method: str
    path: str
    account: str | None
    body: bytes


@dataclass
class HubServer:
    """Use as a context manager. `refuses` is asked first, and may answer in the place of the hub."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of large files, by sha256."""
    asked: list[Asked] = field(default_factory=list)
    refuses: Callable[[Asked], Refusal | None] = lambda asked: None

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, name: str) -> dict[str, bytes]:
        """What the newest commit holds, apart from what the hub adds by itself."""
        files = dict(self.repositories[name].commits[-1][1])
        files.pop(".gitattributes")
        return files

    def create(self, name: str, files: dict[str, bytes] | None = None, private: bool = False) -> str:
        """A model with these files; its newest commit."""
        repository = self.repositories[name] = Repository(private)
        commit = repository.commit({".gitattributes": b""})
        return commit if files is None else repository.commit({".gitattributes": b"", **files})

    def sent(self, method: str, pattern: str) -> list[Asked]:
        """The requests whose path matches."""
        return [asked for asked in self.asked if asked.method == method and re.search(pattern, asked.path)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = _chunks(self)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                asked = Asked(self.command, unquote(urlsplit(self.path).path), TOKENS.get(token), body)
                hub.asked.append(asked)
                answer = hub.refuses(asked)
                if answer is None and token and asked.account is None:
                    answer = Refusal(401, "Invalid credentials in Authorization header")
                self._send(answer or hub._answer(asked))

            do_HEAD = do_POST = do_PUT = do_GET

            def _send(self, answer: Any) -> None:
                headers: dict[str, str] = {}
                if isinstance(answer, Refusal):
                    status, body = answer.status, json.dumps({"error": answer.message}).encode()
                    headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
                elif isinstance(answer, tuple):
                    body, headers = answer
                    status = 200
                    if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                        status, body = 206, body[int(part[1]) : int(part[2]) + 1]
                else:
                    status, body = 200, json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def _answer(self, asked: Asked) -> Any:
        for pattern, answer in _PATHS:
            path = asked.path.replace("/api/datasets/", "/api/models/datasets/", 1)
            if match := re.fullmatch(pattern, f"{asked.method} {path}"):
                return answer(self, asked, *match.groups())
        return Refusal(404, f"nothing at {asked.path}")

    def _readable(self, asked: Asked, name: str) -> Repository | Refusal:
        found = self.repositories.get(name)
        if found is None or (found.private and asked.account != name.partition("/")[0]):
            return Refusal(404 if asked.account else 401, "Repository not found", "RepoNotFound")
        return found

    def _writable(self, asked: Asked, name: str) -> Repository | Refusal:
        found = self._readable(asked, name)
        if isinstance(found, Repository) and asked.account != name.partition("/")[0]:
            return Refusal(403, "you have no right to write there")
        return found

    # ---------------------------------------------------------------- what is asked

    def _whoami(self, asked: Asked) -> Any:
        return {"type": "user", "name": asked.account, "orgs": []} if asked.account else Refusal(401)

    def _create(self, asked: Asked) -> Any:
        wanted = json.loads(asked.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if asked.account != wanted["organization"]:
            return Refusal(403, f"you have no right to create a model under {wanted['organization']}")
        if name in self.repositories:
            return Refusal(409, "you already created this model")
        self.create(name, private=wanted.get("visibility") == "private" or wanted.get("private") is True)
        return {"url": f"{self.url}/{name}"}

    def _info(self, asked: Asked, name: str, revision: str | None = None) -> Any:
        found = self._readable(asked, name)
        if isinstance(found, Refusal):
            return found
        commit = found.at(revision or "main")
        if commit is None:
            return Refusal(404, f"no revision {revision}", "RevisionNotFound")
        files = [{"rfilename": path} for path in sorted(commit[1])]
        return {"id": name, "sha": commit[0], "private": found.private, "siblings": files}

    def _tree(self, asked: Asked, name: str, revision: str, folder: str | None = None) -> Any:
        found = self._readable(asked, name)
        if isinstance(found, Refusal):
            return found
        commit = found.at(revision)
        assert commit is not None
        if folder and not any(path.startswith(f"{folder}/") for path in commit[1]):
            return Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        return [
            {"type": "file", "path": path, "size": len(data), "oid": _git_hash(data)} | _lfs(path, data)
            for path, data in sorted(commit[1].items())
            if path.startswith(f"{folder}/" if folder else "")
        ]

    def _paths_info(self, asked: Asked, name: str, revision: str) -> Any:
        found = self._tree(asked, name, revision)
        wanted = re.findall(r"paths=([^&]*)", unquote(asked.body.decode())) or json.loads(asked.body)["paths"]
        return [one for one in found if one["path"] in wanted]

    def _resolve(self, asked: Asked, name: str, revision: str, path: str) -> Any:
        found = self._readable(asked, name)
        if isinstance(found, Refusal):
            return found
        commit = found.at(revision)
        if commit is None:
            return Refusal(404, f"no revision {revision}", "RevisionNotFound")
        if path not in commit[1]:
            return Refusal(404, f"no file {path}", "EntryNotFound")
        data = commit[1][path]
        return data, {"X-Repo-Commit": commit[0], "ETag": f'"{_oid(path, data)}"'}

    def _check_header(self, asked: Asked) -> Any:
        is_good = json.loads(asked.body)["content"].startswith("---\n")
        return {"errors": [], "warnings": []} if is_good else Refusal(400, "no header")

    def _preupload(self, asked: Asked, name: str) -> Any:
        found = self._writable(asked, name)
        if isinstance(found, Refusal):
            return found
        have = found.commits[-1][1]
        return {
            "files": [
                {
                    "path": (path := file["path"]),
                    "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": _oid(path, have[path]) if path in have else None,
                }
                for file in json.loads(asked.body)["files"]
            ]
        }

    def _batch(self, asked: Asked, name: str) -> Any:
        found = self._writable(asked, name)
        if isinstance(found, Refusal):
            return found
        objects = []
        for wanted in json.loads(asked.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.large:
                entry["actions"] = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        return {"objects": objects, "transfer": "basic"}

    def _take(self, asked: Asked, oid: str) -> Any:
        if hashlib.sha256(asked.body).hexdigest() != oid:
            return Refusal(422, "these bytes have another hash")
        self.large[oid] = asked.body
        return {}

    def _commit(self, asked: Asked, name: str) -> Any:
        found = self._writable(asked, name)
        if isinstance(found, Refusal):
            return found
        files = dict(found.commits[-1][1])
        for line in map(json.loads, asked.body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.large[line["value"]["oid"]]
        commit = found.commit(files)
        return {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit}


_MODEL = r"((?:datasets/)?[\w.-]+/[\w.-]+)"
_PATHS: list[tuple[str, Callable[..., Any]]] = [
    ("GET /api/whoami-v2", HubServer._whoami),
    ("POST /api/repos/create", HubServer._create),
    (f"GET /api/models/{_MODEL}(?:/revision/([^/]+))?", HubServer._info),
    (f"GET /api/models/{_MODEL}/tree/([^/]+)(?:/(.+))?", HubServer._tree),
    (f"POST /api/models/{_MODEL}/paths-info/([^/]+)", HubServer._paths_info),
    (f"(?:GET|HEAD) /{_MODEL}/resolve/([^/]+)/(.+)", HubServer._resolve),
    ("POST /api/validate-yaml", HubServer._check_header),
    (f"POST /api/models/{_MODEL}/preupload/main", HubServer._preupload),
    (rf"POST /{_MODEL}\.git/info/lfs/objects/batch", HubServer._batch),
    (r"PUT /lfs/(\w+)", HubServer._take),
    (f"POST /api/models/{_MODEL}/commit/main", HubServer._commit),
]


def _chunks(handler: BaseHTTPRequestHandler) -> bytes:
    parts = []
    while size := int(handler.rfile.readline(), 16):
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(parts)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _oid(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else _git_hash(data)


def _lfs(path: str, data: bytes) -> dict[str, Any]:
    if not path.endswith(LARGE):
        return {}
    return {"lfs": {"oid": _oid(path, data), "size": len(data), "pointerSize": 130}}


@contextmanager
def hub_for(monkeypatch: pytest.MonkeyPatch, cache: Any, token: str | None = "hf_me") -> Iterator[HubServer]:
    """A hub that huggingface_hub speaks with in this process, without Xet, as somebody who has `token`."""
    from huggingface_hub import constants

    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setenv("HF_TOKEN", token or "")
        yield hub
