"""Opens a peer's chain, where certificates that this disk cannot give any more are taken from others.

The hash of a manifest is known by its child; the newest has none, and is whatever its parent's electors have signed.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import QUORUM, Commit
from spes_p2p.errors import NetworkError, RemoteProtocolError, StateError
from spes_p2p.sync.catch_up import commits_from
from spes_p2p.sync.chain import Chain, CommitFiles
from spes_p2p.sync.node import Node, Run
from spes_p2p.sync.starting import Sources


async def opened_chain(directory: Path, run: Run, node: Node, sources: Sources) -> Chain:
    """Raises StateError where a certificate is missing, or cannot be read and nobody gives it; StorageFull."""
    try:
        return Chain(directory)
    except StateError:
        files = CommitFiles(directory, mends=True)
        for round in range(1, files.count()):  # without genesis nothing says which run this folder is of
            if _readable(files, round) is None:
                if not (given := await _given(files, round, run, node, sources)):
                    raise
                for commit in given:
                    files.write(commit)
                    at = commit.manifest.round
                    node.say(f"{directory}: the certificate of round {at} was damaged; another peer has given it again")
        return Chain(directory)


def _readable(files: CommitFiles, round: int) -> Commit | None:
    try:
        return files.parsed(round)
    except StateError:
        return None


async def _given(files: CommitFiles, first: int, run: Run, node: Node, sources: Sources) -> list[Commit]:
    """The commits from round `first` to the next that can be read, all from one holder: each alone might be of another
    history, where the one after it is damaged too. Empty where nobody has them. The newest is one with a quorum, if a
    member or the organiser gives such: one without may be of another history, while ours has one.
    """
    before = files.parsed(first - 1)
    readable = (at for at in range(first, files.count()) if _readable(files, at) is not None)
    count = next(readable, files.count()) - first
    after = _readable(files, first + count)
    known = {run.info.organiser, *(member.peer for member in before.manifest.members)}
    found = list[Commit]()
    try:
        holders = [peer for peer in await sources() if peer != node.me]
    except NetworkError:
        return found
    for holder in sorted(holders, key=lambda peer: peer not in known):
        if found and holder not in known:  # strangers may be many, and never done
            break
        transfers, part = run.transfers(node.transport), list[Commit]()
        try:
            while len(part) < count and (more := await commits_from(transfers, holder, first + len(part))):
                part += more
            del part[count:]
            if len(part) < count or (after is not None and after.manifest.parent != manifest_hash(part[-1].manifest)):
                continue
            for parent, commit in pairwise((before, *part)):
                manifest, certificate = commit.manifest, commit.certificate
                check_certificate(parent.manifest, manifest, certificate, node.checker.check, run.rules.seals)
            if after is not None or part[-1].certificate.kind == QUORUM:
                return part
            found = found or part
        except (NetworkError, RemoteProtocolError):
            continue
    return found
