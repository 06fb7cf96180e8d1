"""Getting the run's data from those who hold some of it: the catalogue, then pieces, from several at a time.

Each holder takes the next pieces when it is done with its last ones, so the fastest gives most. What a holder has not,
or does not give in time, is asked of another; who sends what does not hash is named and asked no more. The bootstrap
node, which everybody knows, is left for what others lack, unless training waits. What none of them has comes from the
web, if it lies there, to one peer first: of each run of pieces one of the peers, drawn by hash, is the first to fetch
them, and the others wait a little before they do. Leaves out which pieces are wanted (`data/feed.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from spes_p2p.data.pieces import MAX_CATALOGUE_BYTES, Catalogue, PieceGrid
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.patience import NeverEnding, Patience, ask_small, fetch_within, first_good
from spes_p2p.exchange.pieces import MAX_GIVEN, DataTraffic, PiecesHead, given_pieces
from spes_p2p.exchange.requests import MAX_PIECES_AT_ONCE, CatalogueRequest, PiecesRequest, pack_request
from spes_p2p.exchange.transfers import InThread
from spes_p2p.ids import Hash, PeerId, sha256, short
from spes_p2p.swarm.ports import Transport
from spes_p2p.swarm.streams import BlobTooLarge
from spes_p2p.wire import unpack

T = TypeVar("T")
AT_ONCE = 32
"""Pieces to ask for at once: enough to make up for latency, few enough to spread over several holders."""
STREAMS_EACH = 2
MOST_HOLDERS = 6
"""Asked at a time; with STREAMS_EACH and MAX_GIVEN the bound of the memory: 7 MB with the usual pieces."""
LATE_SECONDS = 2.0
"""After this many seconds, and four times the usual, pieces asked of one holder may be asked of another, too."""
UNKNOWN_SECONDS = 1.25
"""How long an answer takes, as long as none has come."""
ASKED_BEFORE_ORGANISER = 3
EXPECTED_AT_LEAST = 8
"""A holder that gave none of the pieces asked for, although by its own record it should have at least this many of
them, is left alone for a while, too."""
REST_SECONDS = (1.0, 60.0)
"""Seconds for which a holder that fails is left alone: the first number, doubling each time up to the second."""
LEAST_SECONDS = 60.0
HEADER_BYTES = 64 * 2**10
WEB = PeerId("web")
"""Stands for the web servers among the holders; no peer has such a name."""
WEB_STREAMS = 3
WEB_RUN = 64
"""Pieces one behind the other that the same peer fetches first."""
WEB_SECONDS = 10.0
"""Seconds that other peers wait for the one that fetches from the web first, unless their training is waiting."""
Take = Callable[[Sequence[tuple[int, bytes]]], None]
"""Is given checked pieces as (number, bytes and proof); called in a thread."""
Tell = Callable[[PeerId, str], None]
"""Is told whom a person should know of, and why."""


class Web(Protocol):
    """Web servers with the run's data."""

    @property
    def can_be_asked(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """Why none gave anything at the last time; "" where one did."""

    async def pieces(self, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        """What they give of these, checked. Raises NetworkError where they give none."""


class WrongData(RemoteProtocolError):
    """Somebody sent what does not hash to what it should."""


async def fetch_catalogue(
    transport: Transport, dataset: Hash, holders: Sequence[PeerId], stall_seconds: float, tell: Tell
) -> Catalogue:
    """The catalogue of a dataset, from the first holder that gives it.

    Raises NetworkError when nobody does; who sends another one is named to `tell`.
    """

    async def ask(holder: PeerId) -> Catalogue:
        data = await ask_small(transport, holder, CatalogueRequest(dataset), stall_seconds, MAX_CATALOGUE_BYTES)
        try:
            return Catalogue.checked(data, dataset)
        except RemoteProtocolError as error:
            tell(holder, f"sent {error}; it is not asked for data again")
            raise

    fix = "keep the bootstrap node running, which serves its --data, or give a copy of the token shards with --data"
    return await first_good(holders, ask, "no node could provide the catalogue of the run's data", fix)


@dataclass(frozen=True)
class DataHolders:
    """Who has the data. `pieces()`: how many of them each node has, as far as known.

    `organiser` is the bootstrap node, taken to have all of them where nothing is known. `web`: where else they lie.
    """

    organiser: PeerId
    pieces: Callable[[], Mapping[PeerId, int]]
    web: Web | None = None


class PieceFetcher:
    """All fetches of data of one peer. `stall_seconds()`: how long a stream may pause."""

    def __init__(
        self,
        transport: Transport,
        grid: PieceGrid,
        holders: DataHolders,
        tell: Tell,
        traffic: DataTraffic,
        stall_seconds: Callable[[], float],
        in_thread: InThread,
    ) -> None:
        self._web = holders.web
        self._wanted_since: dict[int, float] = {}
        self._transport = transport
        self._grid = grid
        self._dataset = grid.catalogue.dataset_hash
        self._organiser = holders.organiser
        self._holders = holders.pieces
        self._tell = tell
        self._traffic = traffic
        self._stall_seconds = stall_seconds
        self._in_thread = in_thread
        self._patience = Patience(lambda: LEAST_SECONDS, lambda: 0.0)
        self._liars: set[PeerId] = set()
        self._failures: Counter[PeerId] = Counter()
        self._rests_until: dict[PeerId, float] = {}
        self._answer_seconds = UNKNOWN_SECONDS

    @property
    def liars(self) -> frozenset[PeerId]:
        return frozenset(self._liars)

    async def fetch(
        self, wanted: Sequence[int], take: Take, urgent: int = 0, among: Collection[PeerId] | None = None
    ) -> None:
        """Fetches these pieces and hands them to `take`, the first ones first; training waits for the first `urgent`.

        `among`: they are copies for others; who is known to have all of them is asked alone beside the organiser, and
        everybody where nobody is.

        Raises NetworkError when nobody who could be asked gave the rest, and what `take` raises.
        """
        chosen = self._chosen(among)
        for_web = frozenset[int]()
        if WEB in chosen:
            for_web = self._first_from_web(wanted) | (self._late(wanted, urgent) if among is None else frozenset())
        job = _Job(
            wanted, self._organiser, tuple(chosen), urgent > 0, lambda: max(LATE_SECONDS, 4 * self._answer_seconds),
            for_web,
        )  # fmt: skip
        works = [
            asyncio.ensure_future(self._work(peer, share, job, take))
            for peer, share in chosen.items()
            for _ in range(WEB_STREAMS if peer == WEB else STREAMS_EACH)
        ]
        try:
            pending: set[asyncio.Future[None]] = set(works)
            while pending and job.left:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for work in done:
                    work.result()
        finally:
            for work in works:
                work.cancel()
            if works:
                await asyncio.wait(works)
        if job.left:
            if self._web is not None and self._web.trouble and WEB not in chosen:
                job.reasons.append(f"{WEB}: {self._web.trouble}")
            reasons = "; ".join(dict.fromkeys(job.reasons)) or "nobody has them"
            raise NetworkError(f"{len(job.left)} pieces of the data could not be fetched ({reasons})")

    def _chosen(self, among: Collection[PeerId] | None) -> dict[PeerId, float]:
        """Whom to ask, and what part of the dataset each has; those with most, and always organiser and web."""
        now, total = self._now(), max(1, self._grid.total)
        known = {self._organiser: total} | dict(self._holders())
        if among:
            known = dict.fromkeys(among, total) | {self._organiser: known[self._organiser]}
        shares = {peer: min(1.0, held / total) for peer, held in known.items() if held > 0}
        shares.pop(self._transport.peer_id, None)
        able = [peer for peer in shares if peer not in self._liars and self._rests_until.get(peer, now) <= now]
        able.sort(key=lambda peer: (peer != self._organiser, self._failures[peer], -shares[peer], peer))
        chosen = {peer: shares[peer] for peer in able[:MOST_HOLDERS]}
        if not among and self._web is not None and self._web.can_be_asked and self._rests_until.get(WEB, now) <= now:
            chosen[WEB] = 1.0
        return chosen

    def _first_from_web(self, wanted: Sequence[int]) -> frozenset[int]:
        """Those that this peer is the first to fetch from the web, so that about one copy leaves it."""
        others = set(self._holders()) - {self._organiser, self._transport.peer_id}
        is_first: dict[int, bool] = {}
        for run in {number // WEB_RUN for number in wanted}:
            mine = _lot(self._transport.peer_id, run)
            is_first[run] = all(mine <= _lot(peer, run) for peer in others)
        return frozenset(number for number in wanted if is_first[number // WEB_RUN])

    def _late(self, wanted: Sequence[int], urgent: int) -> frozenset[int]:
        """Those that another peer should have fetched from the web by now, or that training waits for."""
        now = self._now()
        self._wanted_since = {number: self._wanted_since.get(number, now) for number in wanted}
        late = (number for number, since in self._wanted_since.items() if now - since > WEB_SECONDS)
        return frozenset({*wanted[:urgent], *late})

    async def _work(self, peer: PeerId, share: float, job: _Job, take: Take) -> None:
        """Asks one holder for the next pieces until it can give none that are wanted, or fails."""
        most = min(MAX_PIECES_AT_ONCE, max(AT_ONCE, int(AT_ONCE / share))) if peer != WEB else WEB_RUN
        job.enter(peer)
        try:
            while (numbers := await job.claim(peer, most, self._now)) is not None:
                try:
                    found = await self._ask(peer, numbers)
                    new = [(number, joined) for number, joined in found if number in job.left]
                    await self._in_thread(partial(take, new))
                    job.answered(peer, numbers, [number for number, _ in found])
                finally:
                    job.release(peer, numbers)
                if not found and share * len(numbers) >= EXPECTED_AT_LEAST:
                    raise NetworkError(f"it gave none of {len(numbers)} pieces")
                self._failures.pop(peer, None)
        except WrongData as error:
            if peer not in self._liars:
                self._liars.add(peer)
                self._tell(peer, f"{error}; it is not asked for data again")
            job.reasons.append(f"{short(peer)}: {error}")
        except (NetworkError, RemoteProtocolError) as error:
            self._rest(peer, isinstance(error, RemoteProtocolError))
            job.reasons.append(f"{short(peer)}: {error}")
        finally:
            job.leave(peer)

    async def _ask(self, peer: PeerId, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        """What the holder has of these, checked."""
        if peer == WEB and self._web is not None:
            return await self._web.pieces(numbers)
        most, began = min(len(numbers), MAX_GIVEN) * self._grid.max_bytes, self._now()
        try:
            header, data = await fetch_within(
                self._transport,
                peer,
                pack_request(PiecesRequest(self._dataset, tuple(numbers))),
                self._stall_seconds(),
                most,
                lambda: self._patience.seconds(peer, most),
                patient=True,
            )
        except NeverEnding as error:
            self._patience.note_timeout(peer, error)
            raise
        except BlobTooLarge as error:
            raise WrongData(f"sent data that is not what was asked for: {error}") from error
        self._patience.note_success(peer)
        self._answer_seconds += 0.2 * (self._now() - began - self._answer_seconds)
        self._traffic.received += len(data)
        found: list[tuple[int, bytes]] = []

        def check() -> None:
            try:
                head = unpack(PiecesHead, header, HEADER_BYTES)
                found.extend(given_pieces(self._grid, numbers, head.given, bytes(data)))
            except RemoteProtocolError as error:
                raise WrongData(f"sent data that is not what was asked for: {error}") from error

        await self._in_thread(check)
        return found

    def _rest(self, peer: PeerId, refused: bool) -> None:
        """Leaves a peer alone for a while; longer at once where it said that it has nothing for us."""
        least, most = REST_SECONDS
        self._failures[peer] += 4 if refused else 1
        pause = min(most, least * 2.0 ** min(self._failures[peer] - 1, 16))
        self._rests_until[peer] = self._now() + pause

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Job:
    """Pieces that are wanted, and who was asked for which."""

    def __init__(
        self,
        wanted: Sequence[int],
        organiser: PeerId,
        holders: tuple[PeerId, ...],
        urgent: bool,
        late_seconds: Callable[[], float],
        for_web: frozenset[int],
    ) -> None:
        self.left: dict[int, set[PeerId]] = {number: set() for number in wanted}
        """Who has said not to have each that is still wanted, in the order of need."""
        self.reasons: list[str] = []
        self._organiser = organiser
        self._urgent = urgent
        self._for_web = for_web
        self._late_seconds = late_seconds
        self._asked: dict[int, tuple[PeerId, float]] = {}
        """Who was asked last for what is on its way, and when."""
        self._active = Counter[PeerId](dict.fromkeys(holders, 0))
        self._changed = asyncio.Event()

    def enter(self, peer: PeerId) -> None:
        self._active[peer] += 1

    def leave(self, peer: PeerId) -> None:
        self._active[peer] -= 1
        if not self._active[peer]:
            del self._active[peer]
        self._wake()

    async def claim(self, peer: PeerId, most: int, now: Callable[[], float]) -> list[int] | None:
        """The next pieces to ask this holder for; waits while others are asked for all; None when it can give none."""
        while True:
            able = [number for number, lack in self.left.items() if peer not in lack and self._is_for(peer, number)]
            if not able:
                return None
            turn = [number for number in able if self._is_turn(peer, number, now())][:most]
            if turn:
                self._asked.update(dict.fromkeys(turn, (peer, now())))
                return turn
            changed = self._changed
            try:
                async with asyncio.timeout(LATE_SECONDS / 2):
                    await changed.wait()
            except TimeoutError:
                continue

    def release(self, peer: PeerId, numbers: Sequence[int]) -> None:
        """They are not on their way from this holder any more."""
        for number in numbers:
            if self._asked.get(number, (None, 0.0))[0] == peer:
                del self._asked[number]
        self._wake()

    def answered(self, peer: PeerId, asked: Sequence[int], found: Sequence[int]) -> None:
        """Notes an answer. Pieces that it skipped, up to the last one that it could give, count as not held there."""
        for number in found:
            self.left.pop(number, None)
        given = set(found)
        end = len(asked) if len(found) < MAX_GIVEN else asked.index(found[-1])
        for number in asked[:end]:
            if number not in given and number in self.left:
                self.left[number].add(peer)

    def _is_for(self, peer: PeerId, number: int) -> bool:
        return peer != WEB or number in self._for_web

    def _is_turn(self, peer: PeerId, number: int, now: float) -> bool:
        if number in self._asked:
            other, at = self._asked[number]
            is_late = now - at > self._late_seconds()
            return other != peer and is_late and (peer != WEB or self._urgent)
        if peer == WEB:
            return set(self._active) - {WEB} <= self.left[number]
        if peer != self._organiser or self._urgent:
            return True
        lack, others = self.left[number], set(self._active) - {peer, WEB}
        return len(lack) >= ASKED_BEFORE_ORGANISER or others <= lack

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _lot(peer: PeerId, run: int) -> Hash:
    """Whose is lowest is the first to fetch a run of pieces from the web."""
    return sha256(peer.encode(), run.to_bytes(8, "big"))
