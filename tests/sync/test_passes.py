"""Passes: the organiser's node vouches for the one peer that a pass names, once, and for nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.errors import RemoteProtocolError, StateError, StorageFull
from spes_p2p.ids import PeerId
from spes_p2p.sync import passes
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.passes import Doorkeeper, Pass, full_roll_line, make_pass, read_pass
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.sync.chains import ORGANISER, A, B, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun(small_config("swarm.trusted=vouched", peers=1))
OTHER_RUN = MadeRun(small_config("run.seed=9", peers=1)).info
KEY, OTHER_KEY = KeySealer(RUN.keys.signer(ORGANISER)), KeySealer(RUN.keys.signer(A))
PREFIX = RUN.info.fingerprint[:16]
check = RUN.keys.verify


def keeper(folder: Path, say: Callable[[str], None] = print) -> Doorkeeper:
    return Doorkeeper(RUN.info, check, KEY, folder / "passes", lambda peer, missing: None, say)


def a_pass(peer: PeerId = A, number: int = 7, sealer: KeySealer = KEY) -> bytes:
    return make_pass(PREFIX, peer, sealer, number)


def vouched(words: Words) -> tuple[PeerId, ...]:
    return () if words.roll is None else words.roll.value.vouched


def test_who_brings_a_pass_of_its_own_is_vouched_for(tmp_path: Path) -> None:
    known = roll(RUN.info, Words(), KEY, vouched=[B])
    word = keeper(tmp_path).admitted(known, {A: a_pass(), B: b""})
    assert vouched(word) == (A, B)
    assert word.roll is not None
    assert word.roll.value.number == 2


@pytest.mark.parametrize(
    "token",
    [
        a_pass(B),  # somebody else's, which anybody may read in the DHT
        a_pass(sealer=OTHER_KEY),
        make_pass(OTHER_RUN.fingerprint[:16], A, KEY, 7),
        make_pass(b"", A, KEY, 7),
        make_pass(PREFIX[:4], A, KEY, 7),
        pack(replace(OTHER_KEY.seal(Pass(PREFIX, A, 7)), author=ORGANISER)),
        pack(replace(KEY.seal(Pass(PREFIX, B, 7)), value=Pass(PREFIX, A, 7))),
        b"noise",
    ],
)
def test_no_other_token_is_good(tmp_path: Path, token: bytes) -> None:
    assert keeper(tmp_path).admitted(Words(), {A: token}) == Words()
    if token != a_pass(B):
        with pytest.raises(RemoteProtocolError):
            read_pass(token, RUN.info, check)


def test_it_is_good_once_also_after_a_restart(tmp_path: Path) -> None:
    tokens = {A: a_pass()}
    admitted = keeper(tmp_path).admitted(Words(), tokens)
    assert keeper(tmp_path).admitted(admitted, tokens) == Words()
    forgotten = admitted.merged(roll(RUN.info, admitted, KEY, forgotten=[A]))
    assert keeper(tmp_path).admitted(forgotten, tokens) == Words()
    assert vouched(keeper(tmp_path).admitted(forgotten, {A: a_pass(number=6)})) == ()
    assert vouched(keeper(tmp_path).admitted(forgotten, {A: a_pass(number=8)})) == (A,)


def test_a_full_disk_ends_no_node_and_a_used_pass_is_written_down_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*file: object) -> None:
        raise StorageFull("no room")

    said = list[str]()
    tokens, desk = {A: a_pass()}, keeper(tmp_path, said.append)
    admitted = desk.admitted(Words(), tokens)
    forgotten = admitted.merged(roll(RUN.info, admitted, KEY, forgotten=[A]))
    with monkeypatch.context() as full:
        full.setattr(passes, "write_whole", write)
        assert desk.admitted(admitted, tokens) == Words()
        assert desk.admitted(forgotten, tokens) == Words()
    assert desk.admitted(forgotten, tokens) == Words()
    assert keeper(tmp_path).admitted(forgotten, tokens) == Words()
    assert said == ["no room; until there is room, a restart of this node forgets which passes were used"]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"Qm 7 8\n", b"Qm seven\n"])
def test_a_damaged_note_of_used_passes_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "passes").write_bytes(damage)
    with pytest.raises(StateError, match=f"{tmp_path / 'passes'}, which names the passes that were used, is damaged"):
        keeper(tmp_path)


def test_it_is_not_used_up_as_long_as_another_roll_took_the_place_of_ours(tmp_path: Path) -> None:
    desk = keeper(tmp_path)
    assert vouched(desk.admitted(Words(), {A: a_pass()})) == (A,)
    another = roll(RUN.info, Words(), KEY, vouched=[B])
    assert vouched(desk.admitted(another, {A: a_pass()})) == (A, B)


def test_who_is_banned_is_not_let_in(tmp_path: Path) -> None:
    assert keeper(tmp_path).admitted(roll(RUN.info, Words(), KEY, banned=[A]), {A: a_pass()}) == Words()


def test_a_full_roll_takes_nobody_and_uses_no_pass(tmp_path: Path) -> None:
    names = [PeerId(f"{number:02}") for number in range(MAX_VOUCHED)]
    full = roll(RUN.info, Words(), KEY, vouched=names)
    told: list[tuple[PeerId, Sequence[PeerId]]] = []
    desk = Doorkeeper(RUN.info, check, KEY, tmp_path / "passes", lambda *words: told.append(words), print)
    here = dict.fromkeys(names[2:], b"") | {A: a_pass()}
    for _ in range(2):
        assert desk.admitted(full, here) == Words()
    assert told == [(A, names[:2])]  # once
    room = full.merged(roll(RUN.info, full, KEY, forgotten=names[:1]))
    assert A in vouched(desk.admitted(room, {A: a_pass()}))


def test_the_organiser_reads_who_waits_and_what_helps() -> None:
    line = full_roll_line(A, Path("my node"), [PeerId(name) for name in "pqrs"])
    assert line.startswith(f"64 peers are vouched for, the most there can be, so {A} stays a stranger: ")
    assert line.endswith("with spes-p2p run vouch PEER --undo --folder 'my node' (not here now: p, q, r, ...)")
    assert full_roll_line(A, Path("bootstrap-node")).endswith("with spes-p2p run vouch PEER --undo")
