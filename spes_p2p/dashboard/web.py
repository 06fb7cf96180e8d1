"""The web application: one page, its assets, its state as JSON, and a stream that says when there is news.

Everything that the page needs comes from here, and the browser is told to refuse anything else (Content-Security-
Policy). Only GET is answered; nothing can be changed through it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import plotly
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spes_p2p import __version__
from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.state import page_state

STATIC = Path(__file__).parent / "static"
NEWS_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
MOST_HOURS = 24 * 366.0
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(history: History, clock: Callable[[], float] = time.time) -> Starlette:
    """The page of `history`. `app.state.stopping = True` ends the streams of news."""
    routes = [
        Route("/", _page),
        Route("/plotly.js", _plotly),
        Route("/api/state", partial(_state, history=history, clock=clock)),
        Route("/api/news", partial(_news, history=history)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(_Headers), Middleware(GZipMiddleware, minimum_size=1000)])
    app.state.stopping = False
    return app


class _Headers:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self._app(scope, receive, send_with)


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


@cache
def plotly_file() -> Path:
    """plotly.js as the Python package brings it."""
    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


async def _plotly(request: Request) -> Response:
    return FileResponse(plotly_file(), media_type="text/javascript")


async def _state(request: Request, history: History, clock: Callable[[], float]) -> Response:
    hours = _number(request.query_params.get("hours"))
    state = await run_in_threadpool(page_state, history, clock(), hours)
    text = json.dumps(_finite({**state, "program": __version__}), allow_nan=False)
    return Response(text, media_type="application/json")


def _number(text: str | None) -> float | None:
    """Hours to show; None for all of them, and for what is no such number."""
    try:
        hours = float(text or 0)
    except ValueError:
        return None
    return hours if 0 < hours <= MOST_HOURS else None


def _finite(value: Any) -> Any:
    """`value` with every non-finite number, which JSON cannot hold, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


async def _news(request: Request, history: History) -> Response:
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(_versions(request, history), media_type="text/event-stream", headers=headers)


async def _versions(request: Request, history: History) -> AsyncIterator[str]:
    """Yields the version of the history whenever it changes, and a comment now and then to keep the stream open."""
    told, quiet = -1, 0.0
    while not request.app.state.stopping and not await request.is_disconnected():
        if history.version != told:
            told, quiet = history.version, 0.0
            yield f"data: {told}\n\n"
        elif quiet >= KEEP_ALIVE_SECONDS:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(NEWS_SECONDS)
        quiet += NEWS_SECONDS
