"""The web application: one page, its assets, its state as JSON, and a stream that says when there is news.

Everything that the page needs comes from here, and the browser is told to refuse anything else (Content-Security-
Policy). Only GET is answered; nothing can be changed through it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
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
from spes_p2p.observe.events import finite
from spes_p2p.swarm.vitals import PHASES

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


def make_app(history: History) -> Starlette:
    """The page of `history`. `app.state.stopping = True` ends the streams of news."""
    routes = [
        Route("/", _page),
        Route("/plotly.js", _plotly),
        Route("/api/state", partial(_state, history=history)),
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


async def _state(request: Request, history: History) -> Response:
    hours = _number(request.query_params.get("hours"))
    state = await run_in_threadpool(page_state, history, time.time(), hours)
    text = json.dumps(finite({**state, "program": __version__}), allow_nan=False)
    return Response(text, media_type="application/json")


def _number(text: str | None) -> float | None:
    """Hours to show; None for all of them, and for what is no such number."""
    try:
        hours = float(text or 0)
    except ValueError:
        return None
    return hours if 0 < hours <= MOST_HOURS else None


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


MOST_POINTS = 600
TIMED_ROUNDS = 60
"""Newest rounds of which the phases of each peer are shown."""
SHOWN_EVENTS = 400
LOAD_ROUNDS, LOAD_NUMBERS = 60, 20_000
"""Number of rounds for which the experts' load is shown, fewer if LOAD_NUMBERS would be exceeded."""


def page_state(history: History, now: float, hours: float | None = None) -> dict[str, Any]:
    """Everything, or the last `hours` of what depends on time. `now`: Unix seconds."""
    newest = history.rows("SELECT MAX(at) FROM samples")[0][0] or now
    since = newest - hours * 3600 if hours else 0.0
    return {
        "version": history.version,
        "now": now,
        "run": history.get("run"),
        "replay": history.get("replay"),
        "source": history.get("source"),
        "head": history.get("head"),
        "phases": PHASES,
        "peers": history.peers(),
        "rounds": _rounds(history, since),
        "held_out": _columns(
            history.rows(
                "SELECT h.round, h.loss, h.peer, COALESCE(r.at, h.at) at, r.tokens tokens FROM held_out h "
                "LEFT JOIN rounds r ON r.round = h.round WHERE COALESCE(r.at, h.at) >= ? ORDER BY h.round",
                (since,),
            ),
            ("round", "loss", "peer", "at", "tokens"),
        ),
        "samples": _samples(history, since),
        "timeline": _timeline(history),
        "loads": _loads(history, since),
        "events": [dict(row) for row in history.rows("SELECT * FROM events ORDER BY id DESC LIMIT ?", (SHOWN_EVENTS,))],
    }


def _rounds(history: History, since: float) -> dict[str, list[Any]]:
    """`loss`: mean training loss, weighted with the tokens that the round counted of each peer."""
    first, last = history.rows("SELECT MIN(round), MAX(round) FROM rounds WHERE at >= ?1 OR ?1 = 0", (since,))[0]
    width = max(1, -(-((last or 0) - (first or 0) + 1) // MOST_POINTS))
    rows = history.rows(
        "SELECT MAX(r.round) round, MAX(r.at) at, MAX(r.step) step, MAX(r.tokens) tokens, "
        "AVG(r.round_tokens) round_tokens, AVG(r.roster) roster, MAX(r.members) members, MAX(r.alpha) alpha, "
        "MAX(r.stale) stale, SUM(r.kind = 'renewal') renewals, "
        "(SELECT SUM(p.loss * MAX(p.tokens, 1)) / SUM(MAX(p.tokens, 1)) FROM peer_rounds p "
        " WHERE p.loss IS NOT NULL AND p.round / ?1 = r.round / ?1) loss "
        "FROM rounds r WHERE (r.at >= ?2 OR ?2 = 0) GROUP BY r.round / ?1 ORDER BY r.round",
        (width, since),
    )
    names = ("round", "at", "step", "tokens", "round_tokens", "roster", "members", "alpha", "stale", "renewals", "loss")
    return _columns(rows, names)


def _samples(history: History, since: float) -> dict[str, dict[str, list[Any]]]:
    first, last = history.rows("SELECT MIN(at), MAX(at) FROM samples WHERE at >= ?", (since,))[0]
    width = max(1.0, ((last or 0) - (first or 0)) / MOST_POINTS)
    rows = history.rows(
        "SELECT peer, AVG(at) at, AVG(loss) loss, AVG(tokens_per_second) tokens_per_second, MAX(sent) sent, "
        "MAX(received) received, MAX(tokens) tokens FROM samples WHERE at >= ?1 "
        "GROUP BY peer, CAST((at - ?2) / ?3 AS INTEGER) ORDER BY peer, at",
        (since, first or 0.0, width),
    )
    by_peer: dict[str, list[Any]] = {}
    for row in rows:
        by_peer.setdefault(row["peer"], []).append(row)
    names = ("at", "loss", "tokens_per_second", "sent", "received", "tokens")
    return {peer: _columns(mine, names) for peer, mine in by_peer.items()}


def _timeline(history: History) -> list[dict[str, Any]]:
    rows = history.rows(
        "SELECT * FROM peer_rounds WHERE seconds != '[]' AND round > "
        "(SELECT MAX(round) FROM peer_rounds WHERE seconds != '[]') - ? ORDER BY round, peer",
        (TIMED_ROUNDS,),
    )
    return [{**dict(row), "seconds": json.loads(row["seconds"])} for row in rows]


def _loads(history: History, since: float) -> list[dict[str, Any]]:
    """Rounds at equal distances up to the newest one: no mean over rounds, which would hide what one of them had."""
    newest = history.rows("SELECT round, mean FROM loads WHERE at >= ? ORDER BY round DESC LIMIT 1", (since,))
    if not newest:
        return []
    last, experts = newest[0]["round"], len(json.loads(newest[0]["mean"]))
    first = history.rows("SELECT MIN(round) FROM loads WHERE at >= ?", (since,))[0][0]
    most = max(1, min(LOAD_ROUNDS, LOAD_NUMBERS // max(1, experts)))
    width = -(-(last - first + 1) // most)
    rows = history.rows(
        "SELECT * FROM loads WHERE at >= ? AND (? - round) % ? = 0 ORDER BY round", (since, last, width)
    )
    lists = ("mean", "highest", "lowest")
    return [
        {"round": row["round"], "at": row["at"], "peers": len(json.loads(row["peers"]))}
        | {name: [round(one, 3) for one in json.loads(row[name])] for name in lists}
        for row in rows
    ]


def _columns(rows: list[Any], names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}
