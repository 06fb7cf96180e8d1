"""Opens a peer's chain, where certificates that this disk cannot give any more are taken from others.

The hash of a manifest is known by its child; the newest has none, and is whatever its parent's electors have signed.
"""

from __future__ import annotations

from pathlib import Path

from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.chain import Chain, CommitFiles
from spes_p2p.sync.genesis import check_genesis
from spes_p2p.sync.node import Node, Run
from spes_p2p.sync.starting import Sources


async def opened_chain(directory: Path, run: Run, node: Node, sources: Sources) -> Chain:
    """Raises StateError where a certificate is missing, or cannot be read and nobody gives it; StorageFull."""
    try:
        return Chain(directory)
    except StateError:
        files = CommitFiles(directory, mends=True)
        for round in range(files.count()):
            if _readable(files, round) is None:
                if (given := await _given(files, round, run, node, sources)) is None:
                    raise
                files.write(given)
                node.say(f"{directory}: the certificate of round {round} was damaged; another peer has given it again")
        return Chain(directory)


def _readable(files: CommitFiles, round: int) -> Commit | None:
    try:
        return files.parsed(round)
    except StateError:
        return None


async def _given(files: CommitFiles, round: int, run: Run, node: Node, sources: Sources) -> Commit | None:
    """The commit of `round` from the first who has it, checked against those beside it here."""
    before = files.parsed(round - 1) if round else None
    after = _readable(files, round + 1)
    for holder in await sources():
        try:
            part = await commits_from(run.transfers(node.transport), holder, round)
            if not part or (after is not None and after.manifest.parent != manifest_hash(part[0].manifest)):
                continue
            if before is None:
                check_genesis(part[0], run.info, node.checker.check)
            else:
                manifest, certificate = part[0].manifest, part[0].certificate
                check_certificate(before.manifest, manifest, certificate, node.checker.check, run.rules.seals)
            return part[0]
        except (NetworkError, RemoteProtocolError):
            continue
    return None
