"""Receipts: what a run has counted of one peer's work, in a small file that anybody checks without the run.

Manifests name the root of the run's ledger, so a receipt is an account, its path to that root, the manifest (most of
its fields by their hashes), and signatures of that by those whom the run's fingerprint leads to: its organiser, or more
than a third of the peers that the organiser vouches for. Votes of a certificate are such signatures; where they are too
few, nodes sign a `Witness` for who asks. What a receipt does not say is that the work was well done: rounds count what
a peer claimed, within bounds.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spes_p2p.config.load import published_config
from spes_p2p.consensus.certificate import CheckSignature, certificate_statement, is_signed
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.ledger import Account, Proof, check_account
from spes_p2p.consensus.manifest import WIRE_VERSION, Manifest, name_by_fields
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import QUORUM, RENEWAL, Certificate, Seal, Sealer, Signed, signing_bytes
from spes_p2p.errors import NetworkError, RemoteProtocolError, SpesError
from spes_p2p.exchange.patience import fetch_within
from spes_p2p.exchange.requests import WitnessRequest, pack_request
from spes_p2p.ids import Hash, PeerId, sha256, short
from spes_p2p.swarm.ports import Blob, Network
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import known_words
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.wire import pack, unpack

MAX_RECEIPT_BYTES = 10_000
MAX_UNPACKED_BYTES = 2**16
FILE_FORMAT = [{"id": lzma.FILTER_LZMA2, "dict_size": MAX_UNPACKED_BYTES, "lc": 0, "lp": 0, "pb": 0}]
"""Names that a receipt has twice, and the run's config, take few bytes: zlib's format takes 4% more."""
MAX_WITNESS_BYTES = 4096
MOST_BACK = 8
"""Who is asked to sign may be some rounds behind: so many manifests are tried, the newest first."""


@dataclass(frozen=True)
class Witness:
    """What a node signs for who asks: the history of the run that is on its disk has this manifest."""

    fingerprint: Hash
    round: int
    head: Hash


@dataclass(frozen=True)
class Shown:
    """A manifest of which these fields are shown; `others` are the hashes of the rest, in the manifest's order."""

    fingerprint: Hash
    round: int
    tokens: int
    ledger: Hash
    others: tuple[Hash, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> Shown:
        others = (sha256(pack(getattr(manifest, name))) for name in Manifest.__dataclass_fields__ if name not in _SHOWN)
        return cls(manifest.fingerprint, manifest.round, manifest.tokens, manifest.ledger, tuple(others))

    @property
    def name(self) -> Hash:
        """The hash of the manifest. Raises RemoteProtocolError where there are too many hashes, or too few."""
        names = tuple(Manifest.__dataclass_fields__)
        if len(self.others) != len(names) - len(_SHOWN):
            raise RemoteProtocolError("the receipt shows a manifest with other fields than there are")
        rest = iter(self.others)
        return name_by_fields([sha256(pack(getattr(self, n))) if n in _SHOWN else next(rest) for n in names])


_SHOWN = frozenset({"fingerprint", "round", "tokens", "ledger"})


@dataclass(frozen=True)
class Receipt:
    """`certificate` is that of the manifest, with the signatures that count here, if there are any; `witnesses` sign a
    `Witness`. `roll`: the organiser's newest, where others than itself have signed.
    """

    info: RunInfo
    roll: Signed[Roll] | None
    manifest: Shown
    account: Account
    proof: Proof
    certificate: Certificate | None
    witnesses: tuple[Seal, ...]

    @property
    def signers(self) -> tuple[PeerId, ...]:
        votes = self.certificate.seals if self.certificate is not None else ()
        return tuple(seal.peer for seal in (*votes, *self.witnesses))


def witness(chain: Chain, sealer: Sealer, fingerprint: Hash, asked: WitnessRequest) -> Blob:
    """The answer to a WitnessRequest. Raises RemoteProtocolError where the chain has no such manifest."""
    if not chain.has(asked.head, asked.round):
        raise RemoteProtocolError(f"manifest {short(asked.head)} of round {asked.round} is not of the history here")
    return Blob(pack(sealer.seal(Witness(fingerprint, asked.round, asked.head))))


# ---------------------------------------------------------------- checking


def pack_receipt(receipt: Receipt) -> bytes:
    """The file of a receipt."""
    return compressed(pack(receipt))


def compressed(packed: bytes) -> bytes:
    return lzma.compress(packed, lzma.FORMAT_RAW, filters=FILE_FORMAT)


def unpack_receipt(data: bytes) -> Receipt:
    """Raises RemoteProtocolError where `data` is not the file of a receipt, or too long for one."""
    if len(data) > MAX_RECEIPT_BYTES:
        raise RemoteProtocolError(f"a receipt has at most {MAX_RECEIPT_BYTES} bytes, but this file has {len(data)}")
    reader = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILE_FORMAT)
    try:
        packed = reader.decompress(data, MAX_UNPACKED_BYTES + 1)
    except lzma.LZMAError as error:
        raise RemoteProtocolError(f"this is no receipt: {error}") from error
    if not reader.eof or reader.unused_data:
        raise RemoteProtocolError("the file of the receipt is cut off, or there is something behind it")
    return unpack(Receipt, packed, MAX_UNPACKED_BYTES)


def check_receipt(data: bytes, check: CheckSignature) -> Receipt:
    """The receipt in the file `data`, good for the run whose fingerprint it names; which that is, the caller must know.

    Raises RemoteProtocolError with the reason where it is altered or forged, ConfigError where its run has a config
    that this program cannot read.
    """
    receipt = unpack_receipt(data)
    info, shown, account, certificate = receipt.info, receipt.manifest, receipt.account, receipt.certificate
    if info.wire_version != WIRE_VERSION:
        raise RemoteProtocolError(
            f"the receipt is of a run with wire version {info.wire_version}, but this program reads {WIRE_VERSION}"
        )
    if shown.fingerprint != info.fingerprint:
        raise RemoteProtocolError("the receipt's manifest is of another run than its record says, or one was altered")
    if not 0 <= account.tokens <= shown.tokens or not 0 < account.rounds <= shown.round:
        raise RemoteProtocolError("the receipt's numbers cannot be")
    check_account(account, receipt.proof, shown.ledger)
    if receipt.roll is not None:
        _check_roll(receipt.roll, info, check)
    if certificate is not None:
        is_known = certificate.kind in (QUORUM, RENEWAL)
        if certificate.manifest != shown.name or not certificate.seals or not is_known:
            raise RemoteProtocolError("the receipt's certificate is not that of the manifest: one of them was altered")
        _check_seals(certificate.seals, certificate_statement(info.fingerprint, certificate), check)
    _check_seals(receipt.witnesses, signing_bytes(Witness(info.fingerprint, shown.round, shown.name)), check)
    _check_signers(info, _vouched(receipt.roll), account.peer, receipt.signers)
    return receipt


def _vouched(roll: Signed[Roll] | None) -> tuple[PeerId, ...]:
    return () if roll is None else roll.value.vouched


def _check_seals(seals: Sequence[Seal], statement: bytes, check: CheckSignature) -> None:
    for seal in seals:
        if not check(seal.peer, seal.public_key, statement, seal.signature):
            raise RemoteProtocolError(f"{short(seal.peer)} did not sign this: the receipt was altered or forged")


def _check_roll(roll: Signed[Roll], info: RunInfo, check: CheckSignature) -> None:
    is_theirs = (roll.author, roll.value.fingerprint) == (info.organiser, info.fingerprint)
    if not is_theirs or not is_signed(roll, check):
        raise RemoteProtocolError("the receipt's list of vouched peers is not signed by the run's organiser")


def _trusted(info: RunInfo, vouched: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Those of whom more than a third prove a receipt: nobody but the organiser where every member votes."""
    config = published_config(info.config, origin=f"the config of run {info.run_id}")
    return tuple(vouched) if config.swarm.electors == "vouched" else ()


def _check_signers(info: RunInfo, vouched: Sequence[PeerId], peer: PeerId, signers: Sequence[PeerId]) -> None:
    if len(set(signers)) != len(signers):
        raise RemoteProtocolError("the receipt has two signatures of one peer")
    is_by_organiser = info.organiser in signers
    voters = tuple(vouched) if is_by_organiser else _trusted(info, vouched)
    strangers = set(signers) - {info.organiser, *voters}
    if strangers:
        raise RemoteProtocolError(f"the receipt is signed by {short(min(strangers))}, whose word the run does not give")
    others = {signer for signer in signers if signer != peer}  # nobody vouches for itself
    needed = Electorate(voters, Faults.BYZANTINE).believed if voters else 1
    if not is_by_organiser and len(others) < needed:
        raise RemoteProtocolError(
            f"the receipt has signatures of {len(others)} of {len(voters)} vouched peers: "
            f"it needs {needed}, or the organiser's"
        )


# ---------------------------------------------------------------- making


def no_signer(why: str) -> NetworkError:
    """Nobody can be asked for the signature that a receipt needs."""
    return NetworkError(
        f"a receipt needs the organiser's signature, and its machine does not answer: {why}",
        fix="ask the organiser to start it again, then try again",
    )


async def make_receipt(network: Network, info: RunInfo, chain: Chain, peer: PeerId, timeout_seconds: float) -> bytes:
    """A receipt of what is counted by now in the history on `chain`, a peer's own.

    Raises NetworkError, with what each said, where too few sign one.
    """
    roll = (await known_words(network, info, timeout_seconds)).roll
    records = await read_peers(network, info.run_id, timeout_seconds)
    askable = [one for one in (info.organiser, *_trusted(info, _vouched(roll))) if one in records]
    reasons: dict[PeerId, SpesError] = {}
    for round in range(chain.length - 1, max(0, chain.length - 1 - MOST_BACK), -1):
        bare = _unsigned(chain, info, roll, round, peer)
        found = None if bare is None else await _signed(network, bare, chain, askable, reasons, timeout_seconds)
        if found is not None:
            return found
    if not chain.ledger(chain.length - 1).of(peer).rounds:
        raise NetworkError(
            f"no receipt for {short(peer)}: no round has counted any of its work",
            fix="try again once a round has counted this peer's work",
        )
    if not _trusted(info, _vouched(roll)) and not isinstance(reasons.get(info.organiser), RemoteProtocolError):
        raise no_signer(str(reasons.get(info.organiser, "it is not among the nodes of the run")))
    said = "; ".join(f"{short(one)}: {reason}" for one, reason in reasons.items())
    raise NetworkError(
        f"no receipt for {short(peer)}: {said or 'nothing of it is counted, or nobody who may sign can be found'}",
        fix="try again while the run's bootstrap node is up, and once a round has counted this peer's work",
    )


def _unsigned(chain: Chain, info: RunInfo, roll: Signed[Roll] | None, round: int, peer: PeerId) -> Receipt | None:
    """All but the signatures; None where nothing of the peer is counted up to that round."""
    commit, ledger = chain.find(round), chain.ledger(round)
    proof = ledger.proof_of(peer)
    if commit is None or proof is None:
        return None
    return Receipt(info, roll, Shown.of(commit.manifest), ledger.of(peer), proof, None, ())


async def _signed(
    network: Network,
    bare: Receipt,
    chain: Chain,
    askable: Iterable[PeerId],
    reasons: dict[PeerId, SpesError],
    timeout_seconds: float,
) -> bytes | None:
    """With as few signatures as it takes: those of the certificate, then such as are asked for."""
    peer, check = bare.account.peer, EnvelopeChecker(network.verifier).check
    trusted = {bare.info.organiser, *_trusted(bare.info, _vouched(bare.roll))} - {peer}
    certificate = chain.commit(bare.manifest.round).certificate
    votes = [seal for seal in certificate.seals if seal.peer in trusted]
    for count in range(1, len(votes) + 1):
        bare = replace(bare, certificate=replace(certificate, seals=tuple(votes[:count])))
        if (data := _good(bare, check)) is not None:
            return data
    for one in (signer for signer in askable if signer not in bare.signers):
        try:
            bare = replace(bare, witnesses=(*bare.witnesses, await _ask(network, one, bare, timeout_seconds)))
        except (NetworkError, RemoteProtocolError) as error:
            reasons[one] = error
            continue
        if (data := _good(bare, check)) is not None:
            return data
    return None


def _good(receipt: Receipt, check: CheckSignature) -> bytes | None:
    """Packed, where it proves anything by now. The organiser's signature needs neither a roll nor others'."""
    organiser, voted = receipt.info.organiser, receipt.certificate
    if organiser in receipt.signers:
        votes = () if voted is None else tuple(seal for seal in voted.seals if seal.peer == organiser)
        theirs = tuple(seal for seal in receipt.witnesses if seal.peer == organiser)
        kept = None if voted is None or not votes else replace(voted, seals=votes)
        receipt = replace(receipt, roll=None, certificate=kept, witnesses=theirs)
    data = pack_receipt(receipt)
    try:
        check_receipt(data, check)
    except RemoteProtocolError:
        return None
    return data


async def _ask(network: Network, signer: PeerId, bare: Receipt, timeout_seconds: float) -> Seal:
    wanted = Witness(bare.info.fingerprint, bare.manifest.round, bare.manifest.name)
    request = pack_request(WitnessRequest(wanted.round, wanted.head))
    _, data = await fetch_within(
        network.transport, signer, request, timeout_seconds, MAX_WITNESS_BYTES, lambda: timeout_seconds, patient=True
    )
    signed = unpack(Signed[Witness], data)
    is_theirs = signed.value == wanted and signed.author == signer
    if not is_theirs or not is_signed(signed, EnvelopeChecker(network.verifier).check):
        raise RemoteProtocolError("it signs something else")
    return Seal(signer, signed.public_key, signed.signature)
