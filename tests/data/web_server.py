"""A real web server on loopback that serves a folder by ranges, and does wrong what a story asks for."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType


@dataclass
class Asked:
    """One request as it came."""

    path: str
    span: tuple[int, int] | None
    headers: dict[str, str]
    host: str


@dataclass
class Faults:
    """What the server does wrong; each is told the request."""

    lies: Callable[[Asked], bool] = lambda asked: False
    """Sends other bytes."""
    breaks_off: Callable[[Asked], int | None] = lambda asked: None
    """Ends the connection after so many bytes of the body."""
    stalls: Callable[[Asked], bool] = lambda asked: False
    """Sends half, and nothing more until the server is stopped."""
    status: Callable[[Asked], int | None] = lambda asked: None
    redirect: Callable[[Asked], str | None] = lambda asked: None
    ignores_range: bool = False
    retry_after: str = ""


@dataclass
class WebServer:
    """Use as a context manager. `port` 0: a free one."""

    folder: Path
    port: int = 0
    tls: tuple[Path, Path] | None = None
    """Certificate and private key."""
    faults: Faults = field(default_factory=Faults)
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0
    """Bytes of bodies."""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/shards"

    def __enter__(self) -> WebServer:
        self.stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        if self.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def count(self, name: str) -> int:
        """Requests for one file."""
        return sum(asked.path.endswith(name) for asked in self.asked)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_GET(self) -> None:
                self.close_connection = site.stopped.is_set()  # a connection may outlive the server
                if not self.close_connection:
                    site._answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        span = (int(match[1]), int(match[2]) + 1) if match else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.path, span, headers, headers.get("host", ""))
        self.asked.append(asked)
        faults = self.faults
        if (target := faults.redirect(asked)) is not None:
            return self._head(handler, 302, b"", {"Location": target})
        if (status := faults.status(asked)) is not None:
            return self._head(handler, status, b"", {"Retry-After": faults.retry_after} if faults.retry_after else {})
        path = self.folder / asked.path.partition("?")[0].rpartition("/")[2]
        if not path.is_file():
            return self._head(handler, 404, b"", {})
        data = path.read_bytes()
        if span is not None and not faults.ignores_range:
            if span[0] >= len(data):
                return self._head(handler, 416, b"", {})
            extra = {"Content-Range": f"bytes {span[0]}-{min(span[1], len(data)) - 1}/{len(data)}"}
            return self._body(handler, asked, 206, data[span[0] : span[1]], extra)
        return self._body(handler, asked, 200, data, {})

    def _body(
        self, handler: BaseHTTPRequestHandler, asked: Asked, status: int, data: bytes, extra: dict[str, str]
    ) -> None:
        if self.faults.lies(asked):
            data = bytes(byte ^ 1 for byte in data)
        until = self.faults.breaks_off(asked)
        if until is None and self.faults.stalls(asked):
            until = len(data) // 2
        self._head(handler, status, data[:until], extra, len(data))
        if until is not None:
            if self.faults.stalls(asked):
                self.stopped.wait(30.0)
            handler.close_connection = True

    def _head(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, extra: dict[str, str], size: int | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in extra.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if size is None else size))
        handler.end_headers()
        with self._counting:  # before: who has all of it looks at once
            self.sent += len(body)
        try:
            handler.wfile.write(body)
            handler.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):  # the client has what it wants
            handler.close_connection = True
