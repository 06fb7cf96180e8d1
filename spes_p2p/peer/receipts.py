"""Makes a receipt for the peer of a folder, from its chain and what nodes of its run sign."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import ConfigError, NobodyAnswers
from spes_p2p.files import on_a_sound_disk, write_whole
from spes_p2p.ids import PeerId
from spes_p2p.peer.folder import CHAIN, OWNER, RUN
from spes_p2p.peer.kept_invite import RECEIPT_FILE, kept_invite
from spes_p2p.peer.network import visit
from spes_p2p.peer.options import JoinTarget, meeting
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.receipts import make_receipt, no_signer

ANSWER_SECONDS = 15.0


def get_receipt(output: Path) -> tuple[Path, bytes]:
    """Where in `output` the receipt of that folder's peer now lies, and its bytes. The peer may be running.

    Raises ConfigError where no run has begun there, NetworkError where nobody signs one, StorageBroken where it cannot
    be written, and Stopped on Ctrl-C.
    """
    run = meeting((kept_invite(output, "spes-p2p receipt --output peer"),), ())
    try:
        peer = PeerId((output / RUN / OWNER).read_text())
    except OSError as error:
        raise ConfigError(
            f"{output} holds no run of a peer ({error.strerror})", fix="give the folder of a peer with --output"
        ) from error
    chain = Chain(output / RUN / CHAIN, mends=False)
    try:
        data = visit(run, lambda network: _make(network, run, chain, peer))
    except NobodyAnswers as error:
        raise no_signer(str(error)) from error
    path = output / RECEIPT_FILE
    with on_a_sound_disk(output):
        write_whole(path, data)
    return path, data


async def _make(network: HivemindNetwork, run: JoinTarget, chain: Chain, peer: PeerId) -> bytes:
    info, _ = await find_and_load(network, run.run_id, run.fingerprint, ANSWER_SECONDS)
    return await make_receipt(network, info, chain, peer, ANSWER_SECONDS)
