"""What a node keeps of where others are: the newest first, never without bound, and only of its own run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import base58
import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.peer.contacts import ADDRESSES_FILE, MOST_ADDRESSES, Contacts, kept_addresses
from spes_p2p.peer.kept_invite import INVITE_FILE, kept_invite
from spes_p2p.swarm.invite import decode
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.genesis import describe_run


def peer_id(number: int) -> PeerId:
    return PeerId(base58.b58encode(b"\x12\x20" + bytes([number]) * 32).decode())


ORGANISER, ME = peer_id(0), peer_id(1)
INFO = describe_run(load_config(bundled_config("tiny")), NO_HASH, ORGANISER)
NAME = "/dnsaddr/run.example.org"


def record(number: int, role: str = "peer", hidden: bool = False) -> PeerRecord:
    address = f"/ip4/8.8.{number}.1/tcp/1/p2p/{peer_id(number)}"
    return PeerRecord("tiny", peer_id(number), (address,), "0.1.0", 0, 0, 0, 0.0, (), role, hidden, 100 + number)


def test_the_newest_invitation_names_who_is_there_now_and_is_kept(tmp_path: Path) -> None:
    node, others = record(0, role="bootstrap"), [record(1), record(2)]
    contacts = Contacts(tmp_path, INFO, ME, node.addresses)
    assert contacts.learnt([node, *others])
    assert not contacts.learnt([node, *others])
    assert set(decode(kept_invite(tmp_path)).addresses) == {*node.addresses, *(one.addresses[0] for one in others)}
    assert contacts.learnt(others)  # the bootstrap node is gone
    assert kept_invite(tmp_path) == contacts.word
    assert set(decode(contacts.word).addresses) == {one.addresses[0] for one in others}


def test_who_comes_back_knows_whom_it_knew_the_newest_first_and_itself_not(tmp_path: Path) -> None:
    contacts = Contacts(tmp_path, INFO, ME, (NAME,))
    contacts.learnt([record(0, role="bootstrap"), record(1), record(2), record(9, hidden=True)])
    again = Contacts(tmp_path, INFO, ME, ())
    again.learnt([record(3)])
    assert kept_addresses(tmp_path) == (*record(3).addresses, NAME, *record(0).addresses, *record(2).addresses)


def test_what_is_kept_is_bounded_and_names_are_not_pushed_out(tmp_path: Path) -> None:
    contacts = Contacts(tmp_path, INFO, ME, (NAME,))
    for number in range(2, 2 + 2 * MOST_ADDRESSES):
        contacts.learnt([record(number)])
    kept = kept_addresses(tmp_path)
    assert len(kept) == MOST_ADDRESSES
    assert NAME in kept
    assert kept[0] == record(1 + 2 * MOST_ADDRESSES).addresses[0]


def test_addresses_of_another_run_are_not_used(tmp_path: Path) -> None:
    Contacts(tmp_path, INFO, ME, ()).learnt([record(2)])
    assert kept_addresses(tmp_path, INFO.fingerprint.hex()[:16]) == kept_addresses(tmp_path) != ()
    assert kept_addresses(tmp_path, "0000") == ()
    other = replace(INFO, run_id="other")
    contacts = Contacts(tmp_path, other, ME, ())
    contacts.learnt([replace(record(3), run_id="other")])
    assert kept_addresses(tmp_path) == record(3).addresses


def test_what_somebody_mistyped_is_not_remembered(tmp_path: Path) -> None:
    wrong = ("192.0.2.2:31337", "/ip4/192.0.2.2/tcp/31337", "/dns4/example.org/tcp/1", "/ip4/192.0.2.2/tcp/1/p2p/Qm")
    contacts = Contacts(tmp_path, INFO, ME, (*wrong, *record(3).addresses))
    contacts.learnt([record(2)])
    assert kept_addresses(tmp_path) == (*record(2).addresses, *record(3).addresses)
    file = tmp_path / ADDRESSES_FILE
    file.write_text(f"{file.read_text()}{wrong[0]}\n")  # as it was kept before
    assert kept_addresses(tmp_path) == (*record(2).addresses, *record(3).addresses)


@pytest.mark.parametrize("content", ["", "zz", "\x00"])
def test_a_file_that_holds_nothing_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "addresses.txt").write_text(content)
    assert kept_addresses(tmp_path) == ()


def test_where_nobody_says_an_address_the_given_ones_stay(tmp_path: Path) -> None:
    contacts = Contacts(tmp_path, INFO, ME, record(2).addresses)
    contacts.learnt([record(9, hidden=True)])
    assert decode((tmp_path / INVITE_FILE).read_text()).addresses == record(2).addresses
