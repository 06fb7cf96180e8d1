"""What proves that a manifest is committed: who must have signed a certificate, and what. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spes_p2p.consensus.electorate import Electorate, SealRule
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import QUORUM, RENEWAL, Certificate, Precommit, Renewal, Signed, signing_bytes
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
    if certificate.kind == RENEWAL:
        return signing_bytes(Renewal(fingerprint, parent, manifest))
    return signing_bytes(Precommit(fingerprint, parent, ballot, manifest))


def check_certificate(
    parent: Manifest, child: Manifest, certificate: Certificate, check: CheckSignature, rule: SealRule
) -> None:
    """Raises RemoteProtocolError unless `certificate` commits `child` on `parent`.

    That of a quorum needs good seals of a quorum of the parent's electors, that of a renewal the organiser's.
    """
    where = f"certificate of round {child.round}"
    if certificate.kind not in (QUORUM, RENEWAL):  # not quoted: it may be any text
        raise RemoteProtocolError(f"{where} has an unknown kind")
    if certificate.parent != manifest_hash(parent) or certificate.manifest != manifest_hash(child):
        raise RemoteProtocolError(f"{where} is for another manifest")
    if child.parent != certificate.parent:
        raise RemoteProtocolError(f"{where}: the manifest has another parent")
    voters = tuple(member.peer for member in electors(parent.members))
    needed = Electorate(voters, rule.faults).quorum
    if certificate.kind == RENEWAL:
        voters, needed = (rule.organiser,), 1
    statement = certificate_statement(child.fingerprint, certificate)
    good = {
        seal.peer
        for seal in certificate.seals
        if seal.peer in voters and check(seal.peer, seal.public_key, statement, seal.signature)
    }
    if len(good) < needed:
        raise RemoteProtocolError(
            f"{where} ({certificate.kind}) has only {len(good)} valid seals from {len(voters)} electors"
        )
