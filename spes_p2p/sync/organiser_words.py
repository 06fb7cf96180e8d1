"""Orders that the organiser signs during a run: after which round it ends, that the learning rate falls, and who may
vote or is banned.

Everybody who knows it keeps it on disk and repeats it in the DHT, so it outlives who said it first. An end cannot be
taken back: of several the earliest round counts. Rounds themselves know nothing of an end: a peer whose newest round is
the last one stops to train, saves and goes, as with `--until-round`. Of several orders to
let the learning rate fall the shortest is kept, of several rolls the one with the highest number; what counts of both
is what a manifest has taken up (`consensus/statements.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.certificate import CheckSignature, is_signed
from spes_p2p.consensus.membership import Admission, Roll
from spes_p2p.consensus.messages import DecayOrder, Sealer, Signed
from spes_p2p.consensus.rules import RunRules
from spes_p2p.errors import NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash, PeerId
from spes_p2p.swarm.ports import Directory, Network
from spes_p2p.swarm.records import words_key
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.tasks import Tasks
from spes_p2p.wire import pack, unpack

WORDS_FILE = "words"
"""In `run/` of every node's folder."""
LOOK_SECONDS = 10.0
TTL_SECONDS = 90.0
MAX_BYTES = 32768


@dataclass(frozen=True)
class Ending:
    """What the organiser signs: the run is over when `last_round` is committed."""

    fingerprint: Hash
    last_round: int


@dataclass(frozen=True)
class Words:
    """All that the organiser has said, as it is published and kept."""

    ending: Signed[Ending] | None = None
    decay: Signed[DecayOrder] | None = None
    roll: Signed[Roll] | None = None

    @property
    def last_round(self) -> int | None:
        """After which the run is over; None where that was not said."""
        return None if self.ending is None else self.ending.value.last_round

    def admission(self, rules: RunRules) -> Admission:
        """Who may take part and who may vote by the newest roll."""
        return rules.admission(None if self.roll is None else self.roll.value)

    def is_banned(self, peer: PeerId) -> bool:
        return self.roll is not None and peer in self.roll.value.banned

    def merged(self, other: Words) -> Words:
        """Both, reduced to the orders that are still in force."""
        endings = [ending for ending in (self.ending, other.ending) if ending is not None]
        decays = [decay for decay in (self.decay, other.decay) if decay is not None]
        rolls = [roll for roll in (self.roll, other.roll) if roll is not None]
        return Words(
            min(endings, key=lambda signed: signed.value.last_round, default=None),
            min(decays, key=lambda signed: signed.value.steps, default=None),
            max(rolls, key=lambda signed: (signed.value.number, signed.signature), default=None),
        )

    def has(self, other: Words) -> bool:
        """Whether merging `other` into this would change nothing."""
        return self.merged(other) == self


def ending(info: RunInfo, last_round: int, sealer: Sealer) -> Words:
    """For the organiser's key alone."""
    return Words(ending=sealer.seal(Ending(info.fingerprint, last_round)))


def decay(info: RunInfo, steps: int, sealer: Sealer) -> Words:
    """For the organiser's key alone; `steps`: inner steps of the run, 1 or more."""
    return Words(decay=sealer.seal(DecayOrder(info.fingerprint, steps)))


def roll(
    info: RunInfo,
    known: Words,
    sealer: Sealer,
    vouched: Collection[PeerId] = (),
    banned: Collection[PeerId] = (),
    forgotten: Collection[PeerId] = (),
) -> Words:
    """For the organiser's key alone: the next roll after the one in `known`, with more who are `vouched` for or
    `banned`; a peer is one of both at most. Who is `forgotten` is neither.
    """  # fmt: skip
    last = Roll(info.fingerprint, 0) if known.roll is None else known.roll.value
    more = {*vouched, *banned, *forgotten}
    trusted, out = sorted({*last.vouched} - more | {*vouched}), sorted({*last.banned} - more | {*banned})
    return Words(roll=sealer.seal(Roll(info.fingerprint, last.number + 1, tuple(trusted), tuple(out))))


def checked(data: bytes, info: RunInfo, check: CheckSignature) -> Words:
    """Raises RemoteProtocolError unless the organiser of this run has signed every part."""
    words = unpack(Words, data, MAX_BYTES)
    parts = (words.ending, words.decay, words.roll)
    for signed in (part for part in parts if part is not None):
        if signed.value.fingerprint != info.fingerprint or signed.author != info.organiser:
            raise RemoteProtocolError(
                f"an order for another run, or signed by {signed.author} instead of the organiser"
            )
        if not is_signed(signed, check):
            raise RemoteProtocolError("an order without a valid signature of the organiser")
    if words.roll is not None and not words.roll.value.is_sane():
        raise RemoteProtocolError("a roll of the organiser that is not in order")
    return Words().merged(words)


async def read_words(
    directory: Directory, info: RunInfo, check: CheckSignature, timeout_seconds: float = 10.0
) -> dict[PeerId, Words]:
    """What the DHT knows of, by who says so; all repeat the same, but anybody may write there. Raises PeerSilent."""
    found = {}
    for peer, data in (await directory.read(words_key(info.run_id), timeout_seconds)).items():
        with contextlib.suppress(RemoteProtocolError):
            found[peer] = checked(data, info, check)
    return found


async def known_words(network: Network, info: RunInfo, timeout_seconds: float = 10.0) -> Words:
    """All that the organiser has said, as far as the DHT knows. Raises PeerSilent."""
    check = EnvelopeChecker(network.verifier).check
    return together((await read_words(network.directory, info, check, timeout_seconds)).values())


def together(all_words: Iterable[Words]) -> Words:
    """What counts of them all."""
    result = Words()
    for words in all_words:
        result = result.merged(words)
    return result


def load_orders(path: Path, info: RunInfo, check: CheckSignature) -> Words:
    """What a node keeps on disk; none where there is nothing, or nothing good."""
    try:
        return checked(path.read_bytes(), info, check)
    except (OSError, RemoteProtocolError):
        return Words()


class OrganiserWatch:
    """Looks for the organiser's words, keeps and repeats them once they are known; on the network's loop.

    `told` hears of all of them whenever something is new, and at once where some are on disk. `failed` hears of what is
    no matter of the network.
    """

    def __init__(
        self,
        info: RunInfo,
        directory: Directory,
        check: CheckSignature,
        told: Callable[[Words], None],
        failed: Callable[[BaseException], None],
        path: Path,
    ) -> None:
        self._info, self._directory, self._check = info, directory, check
        self._told, self._path = told, path
        self._tasks = Tasks(failed)
        self.known = load_orders(path, info, check)
        if self.known != Words():
            told(self.known)

    async def start(self) -> None:
        """Returns when it has looked once: a peer knows of a run's end before its first step."""
        await self._read()
        self._tasks.spawn(self._for_ever())

    async def stop(self) -> None:
        await self._tasks.stop()

    async def look(self) -> None:
        """Once; what the network refuses is tried again with the next look."""
        await self._read()
        if self.known != Words():
            with contextlib.suppress(NetworkError):
                await self._directory.publish(words_key(self._info.run_id), pack(self.known), TTL_SECONDS)

    async def _read(self) -> None:
        with contextlib.suppress(NetworkError):
            self.take(together((await read_words(self._directory, self._info, self._check)).values()))

    def take(self, found: Words) -> None:
        """Heard of these, which were checked; they are repeated with the next look."""
        if self.known.has(found):
            return
        self.known = self.known.merged(found)
        with contextlib.suppress(StorageFull):  # who has heard of it too repeats it meanwhile
            write_whole(self._path, pack(self.known))
        self._told(self.known)

    async def _for_ever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)
