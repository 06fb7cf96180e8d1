"""How a run begins: what its name stands for, and manifest 0 with the organiser's signature.

The organiser's key signs genesis, and a renewal where a quorum is lost; else the chain needs nobody. Leaves out where
run and genesis are kept and how they travel, and when the organiser renews (see `renewing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spes_p2p.config.fingerprint import fingerprint
from spes_p2p.config.load import published_config, published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.electorate import Faults, SealRule
from spes_p2p.consensus.manifest import WIRE_VERSION, Manifest, manifest_hash
from spes_p2p.consensus.messages import GENESIS, Certificate, Commit, Precommit, Seal, Sealer, signing_bytes
from spes_p2p.errors import RemoteProtocolError, for_good
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.wire import pack


@dataclass(frozen=True)
class RunInfo:
    """Everything that a run's fingerprint stands for. `dataset` is NO_HASH where peers bring data of their own."""

    wire_version: int
    run_id: str
    config: str
    config_fingerprint: Hash
    dataset: Hash
    organiser: PeerId

    @property
    def fingerprint(self) -> Hash:
        """The name of the run: SHA-256 of this record."""
        return sha256(pack(self))

    @cached_property
    def seals(self) -> SealRule:
        """Whose seals commit a manifest, by the run's config. Raises ConfigError where that cannot be read."""
        config = published_config(self.config, origin=f"the config of run {self.run_id}")
        return SealRule(self.organiser, Faults(config.swarm.faults))


def describe_run(config: Config, dataset: Hash, organiser: PeerId) -> RunInfo:
    """The run that an organiser starts from a config. Raises ConfigError where no peer would take what is published."""
    text = published_yaml(config)
    published_config(text, origin=f"the config of run {config.run.run_id}, as it is published,")
    return RunInfo(WIRE_VERSION, config.run.run_id, text, fingerprint(config), dataset, organiser)


def check_run(info: RunInfo, expected: Hash) -> Config:
    """The config of a run that somebody served, without a word of it on what is this machine's own.

    Raises RemoteProtocolError where it is not the run expected, PermanentError where its config is none that this
    program takes from others: the fingerprint stands for it, so that nobody can serve a better one.
    """
    if info.fingerprint != expected:
        raise RemoteProtocolError(
            f"the served run has fingerprint {info.fingerprint.hex()[:16]}, but {expected.hex()[:16]} was expected",
            fix="ask the organiser for the run's fingerprint; another initial peer may serve the right one",
        )
    if info.wire_version != WIRE_VERSION:
        older = "this program" if info.wire_version > WIRE_VERSION else "the run"
        raise RemoteProtocolError(
            f"the run speaks wire version {info.wire_version}, but this program speaks {WIRE_VERSION}",
            fix=f"upgrade {older} to the newer spes-p2p",
        )
    with for_good():
        config = published_config(info.config, origin=f"the config of run {info.run_id[:64]!r}")
    if config.run.run_id != info.run_id:
        raise RemoteProtocolError(
            f"the config of run {info.run_id[:64]!r} is that of run {config.run.run_id}",
            fix="ask the organiser for the right invitation",
        )
    if fingerprint(config) != info.config_fingerprint:
        raise RemoteProtocolError(
            f"the config of run {info.run_id} does not hash to its fingerprint {info.config_fingerprint.hex()[:16]}",
            fix="use the same spes-p2p version as the organiser",
        )
    return config


def check_same_run(envelope: Envelope, info: RunInfo) -> None:
    """Raises RemoteProtocolError where the sender speaks of another run than ours."""
    for signed in envelope.statuses:
        if signed.author == envelope.sender and signed.value.fingerprint != info.fingerprint:
            raise RemoteProtocolError(
                f"this is run {info.run_id} with fingerprint {info.fingerprint.hex()[:16]}, "
                f"but yours is {signed.value.fingerprint.hex()[:16]}: join again to get its config"
            )


def sign_genesis(manifest: Manifest, organiser: PeerId, sealer: Sealer) -> Commit:
    """Genesis with its certificate: one seal, the organiser's."""
    name = manifest_hash(manifest)
    signed = sealer.seal(Precommit(manifest.fingerprint, NO_HASH, 0, name))
    seal = Seal(organiser, signed.public_key, signed.signature)
    return Commit(Certificate(NO_HASH, GENESIS, 0, name, (seal,)), manifest)


def check_genesis(commit: Commit, info: RunInfo, check: CheckSignature) -> None:
    """Raises RemoteProtocolError unless `commit` is the genesis of `info`, signed by its organiser."""
    manifest, certificate = commit.manifest, commit.certificate
    if manifest.round != 0 or manifest.fingerprint != info.fingerprint or certificate.kind != GENESIS:
        raise RemoteProtocolError("the first manifest of the chain is not the genesis of this run")
    if certificate.manifest != manifest_hash(manifest) or len(certificate.seals) != 1:
        raise RemoteProtocolError("the genesis certificate names another manifest")
    seal = certificate.seals[0]
    statement = signing_bytes(Precommit(manifest.fingerprint, NO_HASH, 0, certificate.manifest))
    if seal.peer != info.organiser or not check(seal.peer, seal.public_key, statement, seal.signature):
        raise RemoteProtocolError(f"genesis is not signed by the organiser {info.organiser}")
