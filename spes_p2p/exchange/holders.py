"""Asking those who may have something, one after the other, until one of them gives what is good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId, short

T = TypeVar("T")


async def first_good(
    holders: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[T]], failure: str, fix: str = ""
) -> T:
    """What `ask` makes of the first holder's answer that is good; it raises NetworkError or RemoteProtocolError if not.

    Raises NetworkError with `failure` and each holder's reason when nobody's is.
    """
    reasons: list[str] = []
    for holder in holders:
        try:
            return await ask(holder)
        except (NetworkError, RemoteProtocolError) as error:
            reasons.append(f"{short(holder)}: {error}")
    raise NetworkError(f"{failure} ({'; '.join(reasons) or 'nobody to ask'})", fix=fix)
