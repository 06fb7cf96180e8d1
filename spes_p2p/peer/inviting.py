"""Makes a new invitation to a run for somebody who can reach a live node but takes no part in the run.

The format is in `swarm/invite.py`; the one that a node keeps, in `peer/contacts.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from spes_p2p.config.load import published_config
from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.peer.contacts import invite_of
from spes_p2p.peer.entrance import ANSWER_SECONDS
from spes_p2p.peer.folder import RUN
from spes_p2p.peer.network import visit
from spes_p2p.peer.options import JoinTarget
from spes_p2p.swarm.hivemind_backend import HivemindNetwork
from spes_p2p.swarm.hivemind_backend.identity import signer_of
from spes_p2p.swarm.invite import Invite, decode, encode, invited_to
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.finding import find_and_load
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import WORDS_FILE, Words, load_orders
from spes_p2p.sync.passes import full_roll_line, make_pass
from spes_p2p.sync.sealing import EnvelopeChecker, KeySealer

EVERYBODY_VOTES = "note: in this run every member is trusted (swarm.trusted: all); vouching changes nothing"


def fresh_invite(meeting: JoinTarget) -> str:
    """One with the addresses of nodes that live now. Raises NetworkError, ConfigError, and Stopped on Ctrl-C."""
    return visit(meeting, lambda network: _read(network, meeting))


def invite_for(word: str, identity: Path, peer: PeerId) -> str:
    """The invitation `word` with a token for one peer. Raises ConfigError where that is not the organiser's key."""
    invite = decode(word)
    sealer = organisers_sealer(identity, invite)
    return encode(replace(invite, token=make_pass(invite.fingerprint, peer, sealer, time.time_ns())))


def organisers_sealer(identity: Path, run: RunInfo | Invite) -> KeySealer:
    """Signs with the key of a run's organiser. Raises ConfigError where `identity` is another one."""
    signer = signer_of(identity)
    if signer.peer_id != run.organiser:
        raise ConfigError(
            f"{identity} is the key of {signer.peer_id}, but the organiser of run {run.run_id} is {run.organiser}",
            fix="give the folder of the run's bootstrap node with --folder",
        )
    return KeySealer(signer)


def vouching_note(run: RunInfo | None) -> str:
    """What there is to say to somebody who vouches for a peer of this run; "" for nothing, or where it is not known."""
    config = None if run is None else published_config(run.config, origin=f"the config of run {run.run_id}")
    return EVERYBODY_VOTES if config is not None and config.swarm.trusted == "all" else ""


def full_note(folder: Path, run: RunInfo | None, peer: PeerId) -> str:
    """That the roll, as the organiser's node in `folder` has it, names too many for `peer` to come onto it; or ""."""
    words = load_orders(folder / RUN / WORDS_FILE, run, EnvelopeChecker(RsaVerifier()).check) if run else Words()
    vouched = words.roll.value.vouched if words.roll is not None else ()
    is_full = len(vouched) >= MAX_VOUCHED and peer not in vouched
    return f"note: {full_roll_line(peer, folder)}" if is_full else ""


async def _read(network: HivemindNetwork, meeting: JoinTarget) -> str:
    info, _ = await find_and_load(network, meeting.run_id, meeting.fingerprint, ANSWER_SECONDS)
    peers = await read_peers(network, info.run_id, ANSWER_SECONDS)
    return invite_of(info, invited_to(peers.values(), info.organiser, meeting.addresses) or meeting.addresses)
