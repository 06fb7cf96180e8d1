"""What an organiser does beside the bootstrap node: end a run well, look at its history, choose where it has two, say
who may vote and who is banned."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from spes_p2p.config.schema import Config
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Decay, Manifest
from spes_p2p.consensus.membership import MAX_BANNED, MAX_VOUCHED, Admission, Roll, electors
from spes_p2p.consensus.messages import Commit, Sealer
from spes_p2p.errors import ConfigError, NetworkError, StateError
from spes_p2p.files import NODE_FOLDER, in_folder
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import orphans
from spes_p2p.peer.fetching import RunFetcher
from spes_p2p.peer.folder import CHAIN, RUN, kept_run
from spes_p2p.peer.inviting import organisers_sealer, vouching_note
from spes_p2p.peer.network import visit
from spes_p2p.peer.options import JoinTarget
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.swarm.ports import Network
from spes_p2p.swarm.records import words_key
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import (
    LOOK_SECONDS,
    TTL_SECONDS,
    WORDS_FILE,
    Words,
    decay,
    ending,
    known_words,
    load_orders,
    read_words,
    roll,
    together,
)
from spes_p2p.sync.report import RunReport, read_run
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.train.schedule import learning_rate
from spes_p2p.wire import pack

ANSWER_SECONDS = 10.0
SPREAD_SECONDS = 2 * LOOK_SECONDS
"""In this time every peer that can be reached hears of an order."""
MOST_ROUNDS_MORE = 20
HEARD_SECONDS = 3 * LOOK_SECONDS
"""How long to wait for a node of the run to repeat, and so confirm, what the organiser announced."""
MOST_SIGNINGS = 5
"""Of one order: where another takes its place so often, somebody insists on the contrary."""


# ---------------------------------------------------------------- the organiser's words


def stop_run(identity: Path, meeting: JoinTarget, after_round: int | None, say: Callable[[str], None]) -> int:
    """Ends a run with the organiser's key; the last round: `after_round`, else the first that all hear of in time.

    Raises ConfigError where the key is not the organiser's, NetworkError where nobody hears.
    """

    async def stop(network: HivemindNetwork) -> int:
        report, newest = await read_run(network, meeting.run_id, time.time(), meeting.fingerprint)
        info, _ = await find_and_load(network, report.run_id, report.fingerprint, ANSWER_SECONDS)
        sealer = organisers_sealer(identity, info)
        last = last_round(report, newest, after_round)
        say(f"announcing that run {info.run_id} ends with round {last}, until one of its nodes confirms it")
        known = await tell(network, info, ending(info, last, sealer))
        return last if known.last_round is None else known.last_round

    return visit(meeting, stop)


def last_round(report: RunReport, newest: Commit | None, after_round: int | None) -> int:
    """Raises ConfigError where the round that was asked for is over: another one cannot be taken back."""
    if after_round is not None and after_round <= report.round and report.last_round is None:
        raise ConfigError(
            f"round {after_round:,} is over: the newest is round {report.round:,}",
            fix="give --after-round a later one, or leave it out to end the run as soon as all peers hear in time",
        )
    return max(report.round + 1, after_round or first_to_end_with(report, newest))


def first_to_end_with(report: RunReport, newest: Commit | None) -> int:
    """The first round that is under way when all peers have heard of an order; the current one where rounds are long.

    Who has heard stops when it is committed; who has not would go on alone. `newest`: what `report` is of.
    """
    speed = sum(peer.tokens_per_second for peer in report.live)
    tokens = 0 if newest is None else sum(entry.tokens for entry in newest.manifest.roster)
    if not speed or not tokens:
        return report.round + 1
    seconds = tokens / speed
    left = max(0.0, seconds - (report.head_age_seconds or 0.0))
    return report.round + 1 + min(MOST_ROUNDS_MORE, max(0, math.ceil((SPREAD_SECONDS - left) / seconds)))


def decay_run(folder: Path, meeting: JoinTarget, steps: int) -> int:
    """Signs with the organiser's key, in `folder`, that the learning rate falls over `steps` inner steps; those that
    count, where it was said a moment before.

    Raises as `stop_run` does, and ConfigError where that would change nothing.
    """

    async def announce(network: HivemindNetwork) -> int:
        info, config = await find_and_load(network, meeting.run_id, meeting.fingerprint, ANSWER_SECONDS)
        word = decay(info, steps, organisers_sealer(folder / "identity.key", info))
        _, newest = await read_run(network, info.run_id, time.time(), info.fingerprint.hex())
        words = await known_words(network, info)
        check_can_fall(config, newest.manifest if newest is not None else None, folder)
        if words.decay is not None and words.decay.value.steps < steps:
            raise ConfigError(
                f"the learning rate will fall over {words.decay.value.steps:,} steps from the next round on; a longer "
                "fall cannot take the place of that",
                fix="end the run when these steps are made: spes-p2p run stop",
            )
        known = await tell(network, info, word)
        return steps if known.decay is None else known.decay.value.steps

    return visit(meeting, announce)


def check_can_fall(config: Config, newest: Manifest | None, folder: Path) -> None:
    """Raises ConfigError where the learning rate falls already, has not risen yet, or has nowhere to fall to.

    `newest`: None where the run has not begun. `folder`: a node's, whose certificates say in which round it began to.
    """
    stop_command = in_folder("spes-p2p run stop", folder, NODE_FOLDER)
    if newest is not None and newest.decay is not None:
        raise ConfigError(
            f"the learning rate has been falling since {_begin_of_fall(newest.decay, folder)}, over "
            f"{newest.decay.steps:,} steps; this cannot be changed",
            fix=f"end the run when these steps are made: {stop_command}",
        )
    step, warmup_steps = 0 if newest is None else newest.step, config.scheduler.warmup_steps
    if step < warmup_steps:  # it never rises above where it began to fall
        raise ConfigError(
            f"the run is still in its warm-up, until step {warmup_steps:,} (now {step:,}): the learning rate would "
            "stay as low as it is, for good",
            fix="say it again when the warm-up is over",
        )
    lowest = config.scheduler.min_ratio * config.optimizer.lr
    if learning_rate(config, step + 1) <= lowest * (1 + 1e-6):
        raise ConfigError(
            f"the learning rate is already at its lowest ({lowest:.1e}): this changes nothing",
            fix=f"end the run whenever you like ({stop_command}); in the next one set scheduler.name=wsd and "
            "scheduler.total_steps beyond what you expect",
        )


def _begin_of_fall(fall: Decay, folder: Path) -> str:
    path = folder / RUN / CHAIN
    with contextlib.suppress(StateError, OSError):
        if path.is_dir():
            chain = Chain(path, mends=False)
            first = bisect_left(range(chain.length), True, key=lambda one: chain.commit(one).manifest.decay is not None)
            if first < chain.length:
                return f"round {first}"
    return f"step {fall.begin_step:,}"


def change_roll(
    identity: Path,
    meeting: JoinTarget,
    say: Callable[[str], None],
    vouched: Collection[PeerId] = (),
    banned: Collection[PeerId] = (),
    forgotten: Collection[PeerId] = (),
) -> tuple[Roll, Roll | None]:
    """Signs with the organiser's key whom it vouches for and whom it bans; all of both, and as it was before.

    `say` hears beforehand what comes of it. Raises as `stop_run` does.
    """

    async def announce(network: HivemindNetwork) -> tuple[Roll, Roll | None]:
        info, config = await find_and_load(network, meeting.run_id, meeting.fingerprint, ANSWER_SECONDS)
        if info.organiser in banned:
            raise ConfigError(
                f"{info.organiser} is the organiser's own node",
                fix="to end the run: spes-p2p run stop; for a node that takes no part, start it without --serve",
            )
        if vouched and (note := vouching_note(info)):
            say(note)
        if banned:
            known = await known_words(network, info)
            before = () if known.roll is None else known.roll.value.banned
            _, newest = await read_run(network, info.run_id, time.time(), info.fingerprint.hex())
            for line in after_ban(newest, {*before, *banned}, Faults(config.swarm.faults)):
                say(line)
        return await sign_roll(network, info, organisers_sealer(identity, info), vouched, banned, forgotten)

    return visit(meeting, announce)


async def sign_roll(
    network: Network,
    info: RunInfo,
    sealer: Sealer,
    vouched: Collection[PeerId] = (),
    banned: Collection[PeerId] = (),
    forgotten: Collection[PeerId] = (),
) -> tuple[Roll, Roll | None]:
    """The same on any network, by the organiser's key.

    Another roll, signed in the same moment, may take the place of this one: where that lacks the order, it is signed
    again, on top of that. Raises NetworkError where the other one comes again and again.
    """
    before: Roll | None = None
    for _ in range(MOST_SIGNINGS):
        known = await known_words(network, info)
        word = roll(info, known, sealer, vouched, banned, forgotten)
        assert word.roll is not None
        made = word.roll.value
        if not made.is_sane():
            raise ConfigError(
                f"{len(made.vouched)} peers to vouch for and {len(made.banned)} banned ones",
                fix=f"at most {MAX_VOUCHED} and {MAX_BANNED} fit: forget some with --undo",
            )
        before = before or (None if known.roll is None else known.roll.value)
        heard = (await tell(network, info, word)).roll
        if heard is not None and _has_order(heard.value, vouched, banned, forgotten):
            return heard.value, before
    raise NetworkError(
        "another order with the organiser's key says the contrary, and was repeated each time that this one was",
        fix="ask who else has that key what is meant, then repeat the command",
    )


def _has_order(
    said: Roll, vouched: Collection[PeerId], banned: Collection[PeerId], forgotten: Collection[PeerId]
) -> bool:
    """Whether a roll, perhaps one on top of ours, says of these peers what was ordered."""
    is_there = {*vouched} <= {*said.vouched} and {*banned} <= {*said.banned}
    return is_there and not {*forgotten} & {*said.vouched, *said.banned}


def after_ban(newest: Commit | None, banned: Collection[PeerId], faults: Faults) -> list[str]:
    """What comes of a ban, by the members that `newest` names; nothing where it takes no vote away."""
    voters = tuple(member.peer for member in electors(newest.manifest.members)) if newest is not None else ()
    staying = [peer for peer in voters if peer not in banned]
    if len(staying) == len(voters):
        return []
    quorum, said = Electorate(voters, faults).quorum, f"{len(staying)} of {len(voters)} voters stay"
    if len(staying) >= quorum:
        return [f"{said}: the run goes on with them"]
    if not staying:
        return [f"{said}: the run stands still until somebody who may vote has come"]
    said = f"{said}, and a round needs {quorum}: the run stands still"
    if faults is Faults.BYZANTINE and len(staying) < 2:
        return [f"{said}: with swarm.faults: byzantine a renewal names two voters at least"]
    return [f"{said} until the organiser's node has renewed the run, at once if it is up"]


async def tell(network: Network, info: RunInfo, word: Words) -> Words:
    """Publishes an order of the organiser until a node of the run repeats it. Returns all orders in force by then.

    Raises NetworkError if nobody does; the order is then without effect.
    """
    check, now = EnvelopeChecker(network.verifier).check, asyncio.get_running_loop().time
    until = now() + HEARD_SECONDS
    known = (await known_words(network, info)).merged(word)
    await network.directory.publish(words_key(info.run_id), pack(known), TTL_SECONDS)
    while True:
        said = await read_words(network.directory, info, check)
        nodes = await read_peers(network, info.run_id, ANSWER_SECONDS)  # who gives an order publishes it, too
        repeated = [words for peer, words in said.items() if peer in nodes and words.has(word)]
        if repeated:
            return together(repeated)
        if now() > until:
            raise NetworkError(
                "no node of the run has confirmed it", fix="repeat the command while the bootstrap node is running"
            )
        await asyncio.sleep(1.0)


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
    decay_steps: int
    """Over which the learning rate falls from this round on; 0 in all rounds but the one that says so."""
    electors: int
    banned: tuple[PeerId, ...]
    """Whom the organiser's roll excludes that this round is the first to have."""
    state_root: str
    seals: int
    ends: bool
    """Whether the organiser has ended the run with this round."""
    received_at: float
    """When the commit arrived, in Unix seconds by the clock of a node that has it; 0 where none says so."""


def kept_history(folder: Path) -> list[HistoryLine]:
    """The history kept in a node's folder. Raises ConfigError if no run has begun in it."""
    path = folder / RUN / CHAIN
    if not path.is_dir() or not any(path.glob("*.commit")):
        raise ConfigError(
            f"{folder} holds no history of a run",
            fix="wait for the first round if it is the folder of a bootstrap node or of a peer; "
            "else give one, or an invitation to a live run",
        )
    chain = Chain(path, mends=False)
    commits = [chain.commit(round) for round in range(chain.length)]
    info = kept_run(folder)
    words = load_orders(path.parent / WORDS_FILE, info, EnvelopeChecker(RsaVerifier()).check) if info else Words()
    return list(history(commits, [chain.received_at(round) for round in range(chain.length)], words.last_round))


def live_history(meeting: JoinTarget) -> list[HistoryLine]:
    """Of a live run: all certificates are fetched and checked. Raises NetworkError, ConfigError."""

    return visit(meeting, lambda network: history_on(network, meeting.run_id, meeting.fingerprint))


async def history_on(network: Network, run_id: str | None, fingerprint: str | None) -> list[HistoryLine]:
    """The same on any network. Of the newest commit alone somebody says when it came."""
    info, config = await find_and_load(network, run_id, fingerprint, ANSWER_SECONDS)
    with _chain_of(network, info, config) as fetcher:
        newest, _, _ = await fetcher.newest()
        commits = [fetcher.chain.commit(round) for round in range(fetcher.chain.length)]
        times = [fetcher.seen_at(newest) if commit == newest else 0.0 for commit in commits]
    return list(history(commits, times, (await known_words(network, info)).last_round))


@contextlib.contextmanager
def _chain_of(network: Network, info: RunInfo, config: Config) -> Iterator[RunFetcher]:
    """Fetches certificates, which are forgotten in the end."""
    with (
        TemporaryDirectory(prefix="spes-p2p-chain-") as folder,
        contextlib.closing(RunFetcher(network, info, config, Path(folder))) as fetcher,
    ):
        yield fetcher


def history(
    commits: Sequence[Commit], received_at: Sequence[float] = (), last_round: int | None = None
) -> Iterator[HistoryLine]:
    """One line a commit, from genesis on. `last_round`: with which the organiser ends the run."""
    before: frozenset[PeerId] = frozenset()
    barred: frozenset[PeerId] = frozenset()
    for at, commit in enumerate(commits):
        manifest, certificate = commit.manifest, commit.certificate
        members = frozenset(member.peer for member in manifest.members)
        excluded = frozenset(Admission(manifest.roll).banned)
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
            decay_steps=manifest.decay.steps if manifest.decay and manifest.decay.begin_step == manifest.step else 0,
            electors=len(electors(manifest.members)),
            banned=tuple(sorted(excluded - barred)),
            state_root=manifest.state_root.hex(),
            seals=len(certificate.seals),
            ends=last_round is not None and manifest.round >= last_round and at == len(commits) - 1,
            received_at=received_at[at] if received_at else 0.0,
        )
        before, barred = members, excluded
