"""Attacks by what is said, beside the rounds: many keys, chains that do not end, floods of well-signed messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from typing import ClassVar

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import (
    RENEWAL,
    Ballots,
    Certificate,
    Commit,
    Intent,
    Renewal,
    Seal,
    Signed,
    Status,
    Work,
)
from spes_p2p.consensus.rules import Outcome, child_manifest
from spes_p2p.exchange.requests import MAX_COMMITS_AT_ONCE, ChainPart, ChainRequest, unpack_request
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.attackers.attack import Attack, Liar

KEYS = 50
"""Of each of two liars."""
FLOOD_STATUSES = 100
FLOOD_PAUSE_SECONDS = 0.1
AHEAD = 1000
"""Rounds that an endless chain claims to be ahead."""
_LATE = 2**40
"""A sequence that no true status has."""


class StrangerKeys(Attack):
    """Brings fifty keys that join, say that they serve and have caught up, and never vote."""

    name = "stranger-keys"
    serving: ClassVar[bool] = True

    async def beside(self, liar: Liar) -> None:
        keys = [PeerId(f"{liar.name} key {number}") for number in range(KEYS)]
        for sequence in itertools.count(1):
            tip = liar.driver.core.tip
            said = [
                _status(liar, key, sequence, tip.round, manifest_hash(tip), Intent(joining=True, serving=self.serving))
                for key in keys
            ]
            await asyncio.gather(*(_tell(liar, key, [one]) for key, one in zip(keys, said, strict=True)))
            await asyncio.sleep(liar.heartbeat_seconds)


class IdleKeys(StrangerKeys):
    """Fifty keys that join as trainers, and never hand anything in: others wait for them, if they do."""

    name = "idle-keys"
    serving = False


class Flood(Attack):
    """Calls everybody ten times a second, each time with a hundred statuses of keys that nobody has seen."""

    name = "signature-flood"

    async def beside(self, liar: Liar) -> None:
        for number in itertools.count():
            names = [PeerId(f"{liar.name} makes {number} {at}") for at in range(FLOOD_STATUSES)]
            said = [_status(liar, name, number, -1, sha256(), Intent(joining=True)) for name in names]
            await _tell(liar, liar.name, said)
            await asyncio.sleep(FLOOD_PAUSE_SECONDS)


class EndlessChain(Attack):
    """Says that it is a thousand rounds ahead, and has commits of its own making for whoever asks."""

    name = "endless-chain"

    async def beside(self, liar: Liar) -> None:
        fork = liar.driver.core.tip
        made, more = [_own_commit(liar, fork)], _chain(liar, fork)
        answers = liar.driver.answers
        honest = answers.on_fetch

        async def on_fetch(caller: PeerId, request: bytes) -> Blob:
            asked = unpack_request(request)
            if not isinstance(asked, ChainRequest) or asked.first <= fork.round:
                return await honest(caller, request)
            first = asked.first - fork.round - 1
            while len(made) < first + MAX_COMMITS_AT_ONCE and len(made) < AHEAD:
                made.append(next(more))
            return Blob(pack(ChainPart(tuple(map(pack, made[first : first + MAX_COMMITS_AT_ONCE])))))

        vars(answers)["on_fetch"] = on_fetch
        for sequence in itertools.count(_LATE):
            head = sha256(liar.name.encode())
            said = _status(liar, liar.name, sequence, fork.round + AHEAD, head, Intent(joining=True))
            await _tell(liar, liar.name, [said])
            await asyncio.sleep(liar.heartbeat_seconds)


def _status(liar: Liar, name: PeerId, sequence: int, round: int, head: Hash, intent: Intent) -> Signed[Status]:
    incarnation = liar.driver.core.state.own.incarnation if name == liar.name else 1
    fingerprint = liar.driver.core.state.rules.fingerprint
    said = Status(fingerprint, name, incarnation, sequence, round, head, Work(), intent, Ballots())
    return KeySealer(liar.network.keys.signer(name)).seal(said)


async def _tell(liar: Liar, sender: PeerId, statuses: Iterable[Signed[Status]]) -> None:
    """Calls all honest peers, whatever they answer."""
    said, transport = pack(Envelope(sender, tuple(statuses))), liar.network.peer(sender).transport
    calls = (transport.call(peer, said, liar.heartbeat_seconds) for peer in liar.honest)
    await asyncio.gather(*calls, return_exceptions=True)


def _chain(liar: Liar, parent: Manifest) -> Iterator[Commit]:
    """Commits that follow each other, from the second on."""
    commit = _own_commit(liar, parent)
    while True:
        commit = _own_commit(liar, commit.manifest)
        yield commit


def _own_commit(liar: Liar, parent: Manifest) -> Commit:
    """An empty child with a renewal's certificate that the liar alone has signed."""
    outcome = Outcome((), (), sha256(), parent.state_root, None, roll=parent.roll)
    child = child_manifest(liar.driver.core.state.rules, parent, outcome, parent.members, {})
    head, name = manifest_hash(parent), manifest_hash(child)
    sealer = KeySealer(liar.network.keys.signer(liar.name))
    signed = sealer.seal(Renewal(child.fingerprint, head, name))
    seal = Seal(liar.name, signed.public_key, signed.signature)
    return Commit(Certificate(head, RENEWAL, 0, name, (seal,)), child)
