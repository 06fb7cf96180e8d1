"""What an organiser, or an elector, is told before it vouches for more than a run has room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.ids import PeerId
from spes_p2p.peer.folder import CHAIN, RUN
from spes_p2p.peer.inviting import full_note, no_more_by_electors
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organiser_words import WORDS_FILE, Words, roll
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.sync.chains import A, MadeRun
from tests.sync.swarm_cases import small_config

RUN_MADE = MadeRun(small_config("swarm.electors=vouched", peers=1))
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


def test_an_elector_is_told_that_no_more_can_be_let_in_by_electors(tmp_path: Path) -> None:
    assert no_more_by_electors(tmp_path, [A]) == ""
    chain = Chain(tmp_path / RUN / CHAIN)
    genesis, first = RUN_MADE.chain(2)
    chain.append(genesis)
    assert no_more_by_electors(tmp_path, [A]) == ""
    chain.append(RUN_MADE.certified(replace(first.manifest, vouched=tuple(NAMES))))
    assert no_more_by_electors(tmp_path, [A, NAMES[0]]).endswith(f"ask the organiser for: spes-p2p run vouch {A}")
    assert no_more_by_electors(tmp_path, NAMES[:1]) == ""
