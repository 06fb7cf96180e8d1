"""What an organiser is told before it vouches for more than a run has room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.ids import PeerId
from spes_p2p.peer.folder import RUN
from spes_p2p.peer.inviting import full_note
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.sync.organiser_words import WORDS_FILE, Words, roll
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.sync.chains import A, MadeRun
from tests.sync.swarm_cases import small_config

RUN_MADE = MadeRun(small_config("swarm.trusted=vouched", peers=1))
NAMES = [PeerId(f"{number:02}") for number in range(MAX_VOUCHED)]


def test_who_invites_a_peer_while_the_roll_is_full_is_told(tmp_path: Path) -> None:
    identity = IdentityFile(tmp_path / "identity.key")
    identity.release()
    key, info = KeySealer(identity.signer), replace(RUN_MADE.info, organiser=identity.signer.peer_id)
    assert full_note(tmp_path, info, A) == ""
    for names, notes in ((NAMES, True), (NAMES[1:], False), ([*NAMES[1:], A], False)):
        said = roll(info, Words(), key, vouched=names)
        (tmp_path / RUN).mkdir(exist_ok=True)
        (tmp_path / RUN / WORDS_FILE).write_bytes(pack(said))
        assert full_note(tmp_path, info, A).startswith("note: 64 peers are vouched for") is notes
