"""What proves that a manifest is committed: who must have signed a certificate, and what. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spes_p2p.consensus.electorate import Electorate, Faults, SealRule
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import DEGRADED, QUORUM, Certificate, DegradedVote, Precommit, Signed, signing_bytes
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId

CheckSignature = Callable[[PeerId, bytes, bytes, bytes], bool]
"""(peer, public key, data, signature) -> the signature is good."""


def is_signed(signed: Signed[Any], check: CheckSignature) -> bool:
    """Whether its author has signed this."""
    return check(signed.author, signed.public_key, signing_bytes(signed.value), signed.signature)


def certificate_statement(fingerprint: Hash, certificate: Certificate) -> bytes:
    """The bytes that every seal of a certificate signs."""
    parent, ballot, manifest = certificate.parent, certificate.ballot, certificate.manifest
    if certificate.kind == DEGRADED:
        return signing_bytes(DegradedVote(fingerprint, parent, certificate.heard, ballot, manifest))
    return signing_bytes(Precommit(fingerprint, parent, ballot, manifest))


def check_certificate(
    parent: Manifest, child: Manifest, certificate: Certificate, check: CheckSignature, rule: SealRule
) -> None:
    """Raises RemoteProtocolError unless `certificate` commits `child` on `parent`.

    A certificate of a quorum needs good seals of a quorum of the parent's electors; a degraded one those of all its
    makers, where none may lie, or of the organiser alone, who counts nobody's work.
    """
    where = f"certificate of round {child.round}"
    if certificate.kind not in (QUORUM, DEGRADED):  # not quoted: it may be any text
        raise RemoteProtocolError(f"{where} has an unknown kind")
    if certificate.parent != manifest_hash(parent) or certificate.manifest != manifest_hash(child):
        raise RemoteProtocolError(f"{where} is for another manifest")
    if child.parent != certificate.parent:
        raise RemoteProtocolError(f"{where}: the manifest has another parent")
    voters = tuple(member.peer for member in electors(parent.members))
    quorum = Electorate(voters, rule.faults).quorum
    if certificate.by_organiser:
        if child.roster or child.slices:
            raise RemoteProtocolError(f"{where}: the organiser may not count work")
        voters = (rule.organiser,)
    statement = certificate_statement(child.fingerprint, certificate)
    good = {
        seal.peer
        for seal in certificate.seals
        if seal.peer in voters and check(seal.peer, seal.public_key, statement, seal.signature)
    }
    if certificate.kind == QUORUM:
        is_sealed = len(good) >= quorum
    else:  # where electors may lie, one alone may
        may_be_degraded = certificate.by_organiser or rule.faults is not Faults.BYZANTINE
        is_sealed = may_be_degraded and good == set(certificate.heard or (rule.organiser,))
    if not is_sealed:
        raise RemoteProtocolError(
            f"{where} ({certificate.label}) has only {len(good)} valid seals from {len(voters)} electors"
        )
