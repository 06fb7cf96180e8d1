"""Receipts: what a run has counted of one peer's work, in a small file that anybody checks without the run.

A **tally** is the sum over the rosters of a chain up to one manifest. Every node that has the chain signs it for who
asks; a **receipt** is a tally with signatures of those whom the run's fingerprint leads to: of its organiser, or of
more than a third of the peers that the organiser vouches for. The chain itself would prove more, and grows without
end. What a receipt does not say is that the work was well done: rounds count what a peer claimed, within bounds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spes_p2p.config.load import config_from_text
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import Seal, Sealer, Signed, signing_bytes
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.requests import TallyRequest, pack_request
from spes_p2p.ids import NO_HASH, Hash, PeerId, short
from spes_p2p.swarm.ports import Blob, Network
from spes_p2p.swarm.records import parse_all, parse_peer, peers_key
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import read_words, together
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.wire import pack, unpack

MAX_RECEIPT_BYTES = 10_000
MAX_TALLY_BYTES = 4096
RECENT_ROUNDS = 64
"""Signers stand on different manifests: each signs for any of so many."""


@dataclass(frozen=True)
class Tally:
    """What the history that ends with `head` has counted of one peer: in how many rounds, tokens, and inner steps.

    `run_tokens`: of all peers.
    """

    fingerprint: Hash
    round: int
    head: Hash
    peer: PeerId
    rounds: int
    tokens: int
    steps: int
    run_tokens: int


@dataclass(frozen=True)
class Receipt:
    """`roll`: the organiser's newest, where others than itself have signed."""

    info: RunInfo
    roll: Signed[Roll] | None
    tally: Tally
    seals: tuple[Seal, ...]


# ---------------------------------------------------------------- signing


class Ledger:
    """The sums of a chain, brought up to date when somebody asks; threads wait for each other."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._lock = threading.Lock()
        self._sums: dict[PeerId, tuple[int, int, int]] = {}
        self._recent: deque[Tally] = deque(maxlen=RECENT_ROUNDS)
        self._rosters: deque[Mapping[PeerId, tuple[int, int, int]]] = deque(maxlen=RECENT_ROUNDS)

    def tally(self, peer: PeerId, round: int = -1, head: Hash = NO_HASH) -> Tally:
        """Up to manifest `head` of `round`; up to the newest where `round` is below zero.

        Raises RemoteProtocolError where that is none of the newest here, and StateError where a commit is damaged.
        """
        with self._lock:
            self._follow()
            rounds, tokens, steps = self._sums.get(peer, (0, 0, 0))
            for end, roster in zip(reversed(self._recent), reversed(self._rosters), strict=True):
                if round < 0 or (end.round, end.head) == (round, head):
                    return replace(end, peer=peer, rounds=rounds, tokens=tokens, steps=steps)
                less = roster.get(peer, (0, 0, 0))
                rounds, tokens, steps = rounds - less[0], tokens - less[1], steps - less[2]
        raise RemoteProtocolError(f"manifest {short(head)} of round {round} is none of the newest here")

    def _follow(self) -> None:
        if self._recent and not self._chain.has(self._recent[-1].head, self._recent[-1].round):
            self._sums.clear()  # another history has taken its place
            self._recent.clear()
            self._rosters.clear()
        first = self._recent[-1].round + 1 if self._recent else 0
        for round in range(first, self._chain.length):
            commit = self._chain.find(round)
            if commit is None:
                return
            self._add(commit.manifest)

    def _add(self, manifest: Manifest) -> None:
        roster = {entry.peer: (1, entry.tokens, entry.steps) for entry in manifest.roster}
        for peer, (one, tokens, steps) in roster.items():
            before = self._sums.get(peer, (0, 0, 0))
            self._sums[peer] = before[0] + one, before[1] + tokens, before[2] + steps
        name = manifest_hash(manifest)
        end = Tally(manifest.fingerprint, manifest.round, name, PeerId(""), 0, 0, 0, manifest.tokens)
        self._recent.append(end)
        self._rosters.append(roster)


def signed_tally(ledger: Ledger, sealer: Sealer, asked: TallyRequest) -> Blob:
    """The answer to a TallyRequest. Raises as `Ledger.tally` does."""
    return Blob(pack(sealer.seal(ledger.tally(asked.peer, asked.round, asked.head))))


# ---------------------------------------------------------------- checking


def check_receipt(data: bytes, check: CheckSignature) -> Receipt:
    """The receipt in `data`, good for the run whose fingerprint it names; which that is, the caller must know.

    Raises RemoteProtocolError with the reason where it is altered or forged, ConfigError where its run has a config
    that this program cannot read.
    """
    receipt = unpack(Receipt, data, MAX_RECEIPT_BYTES)
    info, tally, roll = receipt.info, receipt.tally, receipt.roll
    if tally.fingerprint != info.fingerprint:
        raise RemoteProtocolError("the receipt's tally is of another run than its record says, or one was altered")
    if not 0 <= tally.tokens <= tally.run_tokens or not 0 < tally.rounds <= tally.round:
        raise RemoteProtocolError("the receipt's numbers cannot be")
    if roll is not None:
        _check_roll(roll, info, check)
    statement, signers = signing_bytes(tally), [seal.peer for seal in receipt.seals]
    for seal in receipt.seals:
        if not check(seal.peer, seal.public_key, statement, seal.signature):
            raise RemoteProtocolError(f"{short(seal.peer)} did not sign this: the receipt was altered or forged")
    if len(set(signers)) != len(signers):
        raise RemoteProtocolError("the receipt has two signatures of one peer")
    _check_signers(info, () if roll is None else roll.value.vouched, tally.peer, signers)
    return receipt


def _check_roll(roll: Signed[Roll], info: RunInfo, check: CheckSignature) -> None:
    is_good = check(roll.author, roll.public_key, signing_bytes(roll.value), roll.signature)
    if (roll.author, roll.value.fingerprint) != (info.organiser, info.fingerprint) or not is_good:
        raise RemoteProtocolError("the receipt's list of vouched peers is not signed by the run's organiser")


def _check_signers(info: RunInfo, vouched: Sequence[PeerId], peer: PeerId, signers: Sequence[PeerId]) -> None:
    if info.organiser in signers:
        strangers = set(signers) - {info.organiser, *vouched}
        needed = 0
    else:
        config = config_from_text(info.config, origin=f"the config of run {info.run_id}")
        voters = vouched if config.swarm.electors == "vouched" else ()
        strangers = set(signers) - {*voters}
        needed = Electorate(tuple(voters), Faults.BYZANTINE).believed if voters else 1
    if strangers:
        raise RemoteProtocolError(f"the receipt is signed by {short(min(strangers))}, whose word the run does not give")
    others = {signer for signer in signers if signer != peer}  # nobody vouches for itself
    if len(others) < needed:
        raise RemoteProtocolError(
            f"the receipt has signatures of {len(others)} of {len(vouched)} vouched peers: "
            f"it needs {needed}, or the organiser's"
        )


# ---------------------------------------------------------------- asking


async def fetch_receipt(network: Network, info: RunInfo, peer: PeerId, timeout_seconds: float) -> bytes:
    """A receipt of what is counted by now. Raises NetworkError, with what each said, where too few sign one."""
    check = EnvelopeChecker(network.verifier).check
    roll = together((await read_words(network.directory, info, check, timeout_seconds)).values()).roll
    records, _ = parse_all(parse_peer, await network.directory.read(peers_key(info.run_id), timeout_seconds))
    for one, record in records.items():
        network.transport.learn(one, record.addresses)
    vouched = () if roll is None else roll.value.vouched
    signers = [one for one in (info.organiser, *vouched) if one in records and one != peer]
    if info.organiser == peer:
        signers.insert(0, peer)
    reasons: dict[PeerId, str] = {}
    for first, opener in enumerate(signers):  # where one who is vouched for lies, another one begins
        tally: Tally | None = None
        seals: list[Seal] = []
        for signer in (opener, *signers[:first], *signers[first + 1 :]):
            try:
                signed = await _ask(network, signer, peer, tally, timeout_seconds)
                tally = signed.value
                seals.append(Seal(signer, signed.public_key, signed.signature))
                data = pack(Receipt(info, None if signer == info.organiser else roll, tally, tuple(seals)))
                check_receipt(data, check)
                return data
            except (NetworkError, RemoteProtocolError) as error:
                reasons[signer] = f"{short(signer)}: {error}"
                if tally is None:
                    break
    raise NetworkError(
        f"no receipt for {short(peer)}: {'; '.join(reasons.values()) or 'nobody who may sign one can be found'}",
        fix="try again while the run's bootstrap node is up, and once a round has counted this peer's work",
    )


async def _ask(
    network: Network, signer: PeerId, peer: PeerId, tally: Tally | None, timeout_seconds: float
) -> Signed[Tally]:
    """The same tally, signed by another one; any by the first."""
    round, head = (-1, NO_HASH) if tally is None else (tally.round, tally.head)
    request = pack_request(TallyRequest(peer, round, head))
    _, data = await network.transport.fetch(signer, request, timeout_seconds, MAX_TALLY_BYTES, patient=True)
    signed = unpack(Signed[Tally], data)
    if tally not in (None, signed.value) or signed.value.peer != peer:
        raise RemoteProtocolError("it counts otherwise")
    return signed
