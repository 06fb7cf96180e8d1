"""The end of a run: the organiser signs after which round it is over, and everybody who knows it tells the DHT.

It cannot be taken back; of several the earliest round counts. Rounds themselves know nothing of it: a peer whose newest
round is the last one stops to train, saves and goes, as with `--rounds`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.files import write_whole
from spes_p2p.swarm.ports import Directory, Signer
from spes_p2p.swarm.records import ending_key
from spes_p2p.sync.core.messages import signing_bytes
from spes_p2p.sync.core.rules import CheckSignature
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack, unpack

ENDING_FILE = "ending"
"""In `run/` of a bootstrap node."""
LOOK_SECONDS = 10.0
TTL_SECONDS = 90.0
MAX_BYTES = 8192


@dataclass(frozen=True)
class Ending:
    """What the organiser signs: the run is over when `last_round` is committed."""

    fingerprint: Hash
    last_round: int


@dataclass(frozen=True)
class SignedEnding:
    ending: Ending
    author: PeerId
    public_key: bytes
    signature: bytes


def sign_ending(info: RunInfo, last_round: int, signer: Signer) -> SignedEnding:
    """For the organiser's key alone."""
    ending = Ending(info.fingerprint, last_round)
    return SignedEnding(ending, signer.peer_id, signer.public_key, signer.sign(signing_bytes(ending)))


def check_ending(signed: SignedEnding, info: RunInfo, check: CheckSignature) -> None:
    """Raises RemoteProtocolError unless the organiser of this run has signed it."""
    if signed.ending.fingerprint != info.fingerprint or signed.author != info.organiser:
        raise RemoteProtocolError(f"an end of another run, or by {signed.author}, not by its organiser")
    if not check(signed.author, signed.public_key, signing_bytes(signed.ending), signed.signature):
        raise RemoteProtocolError("an end of the run without a good signature of its organiser")


def load_ending(path: Path, info: RunInfo, check: CheckSignature) -> SignedEnding | None:
    """What `keep_ending` wrote; None where there is nothing, or nothing good."""
    try:
        signed = unpack(SignedEnding, path.read_bytes(), MAX_BYTES)
        check_ending(signed, info, check)
    except (OSError, RemoteProtocolError):
        return None
    return signed


def keep_ending(path: Path, signed: SignedEnding) -> None:
    """Raises StorageFull."""
    write_whole(path, pack(signed))


async def read_ending(
    directory: Directory, info: RunInfo, check: CheckSignature, timeout_seconds: float = 10.0
) -> SignedEnding | None:
    """The earliest end that the DHT knows of. Raises PeerSilent."""
    found = []
    for data in set((await directory.read(ending_key(info.run_id), timeout_seconds)).values()):  # all repeat the same
        with contextlib.suppress(RemoteProtocolError):  # anybody may write there
            signed = unpack(SignedEnding, data, MAX_BYTES)
            check_ending(signed, info, check)
            found.append(signed)
    return min(found, key=lambda signed: signed.ending.last_round, default=None)


class EndingWatch:
    """Looks for the end of a run, and repeats it once it is known; on the network's loop.

    `told` hears of it once, and again where an earlier one comes. `failed` hears of what is no matter of the network.
    """

    def __init__(
        self,
        info: RunInfo,
        directory: Directory,
        check: CheckSignature,
        told: Callable[[SignedEnding], None],
        failed: Callable[[BaseException], None],
        known: SignedEnding | None = None,
    ) -> None:
        self._info, self._directory, self._check = info, directory, check
        self._told, self._failed = told, failed
        self._known: SignedEnding | None = None
        self._task: asyncio.Task[None] | None = None
        if known is not None:
            self._take(known)

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._for_ever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def look(self) -> None:
        """Once; what the network refuses is tried again with the next look."""
        with contextlib.suppress(NetworkError):
            found = await read_ending(self._directory, self._info, self._check)
            if found is not None:
                self._take(found)
        if self._known is not None:
            with contextlib.suppress(NetworkError):
                await self._directory.publish(ending_key(self._info.run_id), pack(self._known), TTL_SECONDS)

    def _take(self, found: SignedEnding) -> None:
        if self._known is None or found.ending.last_round < self._known.ending.last_round:
            self._known = found
            self._told(found)

    async def _for_ever(self) -> None:
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 (nobody waits for this task)
            self._failed(error)
