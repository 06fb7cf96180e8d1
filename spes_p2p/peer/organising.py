"""What an organiser does beside the bootstrap node: end a run, and look at its history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spes_p2p.errors import ConfigError, NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.ownership.expert_map import orphans
from spes_p2p.peer.connection import open_network
from spes_p2p.peer.fetching import fetch_chain
from spes_p2p.peer.folder import CHAIN, RUN
from spes_p2p.peer.options import Meeting, NetworkOptions
from spes_p2p.peer.stopping import leaving_on_signals, until_stopped
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.swarm.hivemind_backend.identity import signer_of
from spes_p2p.swarm.records import ending_key
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.core.messages import Commit
from spes_p2p.sync.ending import LOOK_SECONDS, TTL_SECONDS, read_ending, sign_ending
from spes_p2p.sync.finding import find_run
from spes_p2p.sync.joining import load_run
from spes_p2p.sync.report import read_report
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.wire import pack

ANSWER_SECONDS = 10.0
HEARD_SECONDS = 3 * LOOK_SECONDS
"""How long to wait until a node of the run repeats what was told."""


def on_network(meeting: Meeting, work: Callable[[HivemindNetwork], Any]) -> Any:
    """The result of the coroutine `work(network)`, with a throw-away identity, until Ctrl-C (Stopped)."""

    async def run() -> Any:
        with TemporaryDirectory(prefix="spes-p2p-run-") as folder:
            options = NetworkOptions(meeting.addresses, client_mode=True, use_relay=False)
            network = await open_network(options, Path(folder) / "identity.key")
            try:
                return await work(network)
            finally:
                await network.close()

    with NetworkThread() as thread:
        stop = asyncio.Event()
        with leaving_on_signals(lambda: thread.loop.call_soon_threadsafe(stop.set), lambda text: None):
            return thread.run(until_stopped(stop, run()))


# ---------------------------------------------------------------- the end


def stop_run(identity: Path, meeting: Meeting, after_round: int | None, say: Callable[[str], None]) -> int:
    """Ends a run with the organiser's key; the last round: `after_round`, else the one that runs now.

    Raises ConfigError where the key is not the organiser's, NetworkError where nobody hears.
    """
    found: int = on_network(meeting, lambda network: _stop(network, identity, meeting, after_round, say))
    return found


async def _stop(
    network: HivemindNetwork, identity: Path, meeting: Meeting, after_round: int | None, say: Callable[[str], None]
) -> int:
    parts = (network.directory, network.transport, network.verifier)
    report = await read_report(*parts, meeting.run_id, time.time(), meeting.fingerprint)
    group = await find_run(network.directory, report.run_id, ANSWER_SECONDS, report.fingerprint)
    info, _ = await load_run(network.transport, group, ANSWER_SECONDS)
    signer = signer_of(identity)
    if signer.peer_id != info.organiser:
        raise ConfigError(
            f"{identity} is the key of {signer.peer_id}, run {info.run_id} is of {info.organiser}",
            fix="give the folder of the run's bootstrap node with --output",
        )
    last = max(report.round + 1, after_round or 0)
    signed = sign_ending(info, last, signer)
    await network.directory.publish(ending_key(info.run_id), pack(signed), TTL_SECONDS)
    say(f"told that run {info.run_id} ends with round {last}; waiting until a node of the run says so too")
    until = time.monotonic() + HEARD_SECONDS
    while not await _is_repeated(network, info.run_id):
        if time.monotonic() > until:
            raise NetworkError("no node of the run repeats it", fix="do it again while the bootstrap node runs")
        await asyncio.sleep(1.0)
    ended = await read_ending(network.directory, info, EnvelopeChecker(network.verifier).check)
    return last if ended is None else ended.ending.last_round


async def _is_repeated(network: HivemindNetwork, run_id: str) -> bool:
    return bool(set(await network.directory.read(ending_key(run_id), ANSWER_SECONDS)) - {network.signer.peer_id})


# ---------------------------------------------------------------- history


@dataclass(frozen=True)
class HistoryLine:
    """One manifest of the chain, for people and for scripts."""

    round: int
    kind: str
    step: int
    tokens: int
    """Counted in the whole run so far."""
    round_tokens: int
    roster: tuple[PeerId, ...]
    members: int
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    without_owner: tuple[int, ...]
    merge_alpha: float
    state_root: str
    seals: int
    received_at: float
    """Unix seconds, by the clock of whoever's disk it is; 0 where it was fetched just now."""


def kept_history(folder: Path) -> list[HistoryLine]:
    """Of a node's output folder. Raises ConfigError where no run has begun in it."""
    path = folder / RUN / CHAIN
    if not path.is_dir() or not any(path.glob("*.commit")):
        raise ConfigError(
            f"{folder} holds no history of a run",
            fix="give the output folder of a bootstrap node or of a peer, or an invitation to a live run",
        )
    chain = Chain(path)
    commits = [chain.commit(round) for round in range(chain.length)]
    return list(history(commits, [chain.received_at(round) for round in range(chain.length)]))


def live_history(meeting: Meeting) -> list[HistoryLine]:
    """Of a live run: all certificates are fetched and checked. Raises NetworkError, ConfigError."""

    async def fetch(network: HivemindNetwork) -> list[Commit]:
        with TemporaryDirectory(prefix="spes-p2p-chain-") as folder:
            parts = (network.directory, network.transport, network.verifier)
            chain = await fetch_chain(*parts, Path(folder), meeting.run_id, meeting.fingerprint)
            return [chain.commit(round) for round in range(chain.length)]

    return list(history(on_network(meeting, fetch)))


def history(commits: Sequence[Commit], received_at: Sequence[float] = ()) -> Iterator[HistoryLine]:
    """One line a commit, from genesis on."""
    before: frozenset[PeerId] = frozenset()
    for at, commit in enumerate(commits):
        manifest, certificate = commit.manifest, commit.certificate
        members = frozenset(member.peer for member in manifest.members)
        yield HistoryLine(
            round=manifest.round,
            kind=certificate.kind,
            step=manifest.step,
            tokens=manifest.tokens,
            round_tokens=sum(entry.tokens for entry in manifest.roster),
            roster=tuple(entry.peer for entry in manifest.roster),
            members=len(members),
            joined=tuple(sorted(members - before)),
            left=tuple(sorted(before - members)),
            without_owner=tuple(orphans(manifest.ownership)),
            merge_alpha=manifest.merge.alpha if manifest.merge else 0.0,
            state_root=manifest.state_root.hex(),
            seals=len(certificate.seals),
            received_at=received_at[at] if received_at else 0.0,
        )
        before = members
