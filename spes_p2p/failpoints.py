"""Named steps that a peer passes, for whoever wants to break it exactly there.

`reached` costs one comparison unless somebody listens, and nobody listens in a product run: only tests do.
The rules of `consensus/table.py` are steps too, by their names: they are reached when the rule has fired and nothing
that follows from it has been carried out. Facts say where: `peer`, `round` (the one being made), and what each call
adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

INNER_STEP = "inner step"
"""The trainer has completed an inner step, which took `seconds`."""
READY = "ready"
"""Training of the round is over and its snapshot is taken; no other peer has been told yet."""
PERSIST = "persist"
"""A voting record is about to be written."""
PERSISTED = "persisted"
"""The voting record is on disk; what follows from it has not left."""
COLLECTED = "collected"
"""As reducer: the contributions of a slice are here."""
STAGE = "stage"
"""As reducer: the mean of a slice is about to be written."""
STAGED = "staged"
"""As reducer: a slice is on disk; nobody has heard of it."""
SERVE = "serve "
"""Bytes are about to be handed out; a kind of request follows (see `sync.requests`). `caller` asks."""
STREAM = "stream"
"""Part of a blob has been sent, but not all: `to` (peer), packed `request`, `sent` of `size` bytes."""
APPENDED = "appended"
"""A certificate is on disk; its state is not published yet."""
PUBLISHED = "published"
"""Certificate and state are committed on disk; the state machine does not know."""
APPLIED = "applied"
"""The round is over here."""
HEADERS = "headers"
"""Behind: the missing part of the chain is on disk."""
CAUGHT_UP = "caught up"
"""Behind: the newest state is staged, not published."""
CHECKPOINT_LINKED = "checkpoint linked"
"""The state's files are in the new checkpoint's partial `folder`."""
CHECKPOINT_WRITTEN = "checkpoint written"
"""The private state too; only the metadata is missing."""
CHECKPOINT_SEALED = "checkpoint sealed"
"""All is written; it has not got its name."""

Listener = Callable[[str, Mapping[str, Any]], None]
_listener: Listener | None = None


def reached(step: str, **facts: Any) -> None:
    """Tells the listener, if there is one, that `step` is reached. Raises what the listener raises."""
    if _listener is not None:
        _listener(step, facts)


def listen(listener: Listener | None) -> Listener | None:
    """Makes `listener` (None: nobody) be called for each step, in all threads. Returns the previous listener."""
    global _listener
    before, _listener = _listener, listener
    return before
