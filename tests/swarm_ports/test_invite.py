"""Invitations: nothing is lost on the way, whatever happens to the word is told, and it stays short."""

from __future__ import annotations

from dataclasses import replace

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import ConfigError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.invite import MARK, Invite, decode, encode, invited_to, looks_like_invite, to_be_shown
from spes_p2p.swarm.records import PeerRecord

ORGANISER = PeerId("QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn")
OTHER = PeerId(base58.b58encode(b"\x12\x20" + bytes(range(32))).decode())
INVITE = Invite(
    "tiny",
    bytes(range(16)),
    ORGANISER,
    (
        f"/ip4/109.0.113.7/tcp/31337/p2p/{ORGANISER}",
        f"/ip6/2001:db8::7/tcp/31337/p2p/{ORGANISER}",
        f"/dns4/node.example.org/tcp/443/p2p/{ORGANISER}",
        f"/ip4/198.51.100.2/tcp/1/p2p/{OTHER}",
    ),
)
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def test_what_goes_in_comes_out() -> None:
    assert decode(encode(INVITE)) == INVITE
    broken = encode(INVITE)[:50] + "\n  " + encode(INVITE)[50:]
    assert decode(f" {broken.replace(MARK, 'Spes', 1)} ") == INVITE


def test_a_token_goes_with_it() -> None:
    word = encode(replace(INVITE, token=bytes(range(256)) * 3))
    assert decode(word) == replace(INVITE, token=bytes(range(256)) * 3)
    assert word.startswith("spes2")
    assert looks_like_invite(word)
    with pytest.raises(ConfigError, match="mistyped or cut short"):
        decode(word.replace("spes2", "spes1", 1))


def test_one_address_makes_a_short_word_that_a_double_click_selects() -> None:
    word = encode(Invite("spes-7b", bytes([255]) * 16, ORGANISER, INVITE.addresses[:1]))
    assert len(word) <= 125
    assert word.isalnum()
    assert looks_like_invite(word)


@given(st.data())
def test_one_wrong_character_is_one_clear_error(data: st.DataObject) -> None:
    word = encode(INVITE)
    at = data.draw(st.integers(len(MARK) + 1, len(word) - 1))
    wrong = data.draw(st.sampled_from([character for character in ALPHABET + "0OIl" if character != word[at]]))
    with pytest.raises(ConfigError, match="mistyped or cut short"):
        decode(word[:at] + wrong + word[at + 1 :])


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_word_that_was_cut_short_is_told(cut: int) -> None:
    with pytest.raises(ConfigError, match="mistyped or cut short"):
        decode(encode(INVITE)[:-cut])


@pytest.mark.parametrize(("word", "fix"), [("spes3", "upgrade spes-p2p"), ("spes0", "spes-p2p invite prints it")])
def test_another_version_says_who_must_do_something(word: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"version {word[-1]}, but this program reads versions 1 and 2") as caught:
        decode(encode(INVITE).replace("spes1", word, 1))
    assert fix in caught.value.fix


@given(st.binary(max_size=80))
def test_whatever_bytes_have_a_right_checksum_end_in_an_invitation_or_an_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        decode("spes1" + base58.b58encode_check(data).decode())


def test_what_could_harm_a_terminal_is_not_taken() -> None:
    for wrong in (Invite("ti\x1b[2Jny", bytes(16), ORGANISER, INVITE.addresses[:1]),
                  Invite("tiny", bytes(16), ORGANISER, (f"/dns4/\x1b[2J/p2p/{ORGANISER}",))):  # fmt: skip
        with pytest.raises(ConfigError):
            decode(encode(wrong))


@pytest.mark.parametrize("word", ["", "tiny", "/ip4/1.2.3.4/tcp/1", "a=b", "spes1" + "z" * 5000, "spes"])
def test_other_words_are_no_invitations(word: str) -> None:
    with pytest.raises(ConfigError):
        decode(word)


def test_folders_and_overrides_are_not_taken_for_one() -> None:
    assert not any(map(looks_like_invite, ["spes1b", "spes-7b", "run.seed=1", "/ip4/1.2.3.4/tcp/1", "peer", ""]))


def test_loopback_is_shown_only_where_there_is_nothing_else() -> None:
    local, outside = "/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/192.0.2.1/tcp/1/p2p/x"
    assert to_be_shown([local, outside]) == [outside]
    assert list(to_be_shown([local])) == [local]


def test_a_name_that_lists_nodes_goes_through_without_an_id() -> None:
    invite = Invite("tiny", bytes(16), ORGANISER, ("/dnsaddr/run.example.org", *INVITE.addresses[2:]))
    assert sorted(decode(encode(invite)).addresses) == sorted(invite.addresses)


def peer_id(number: int) -> PeerId:
    return PeerId(base58.b58encode(b"\x12\x20" + bytes([number]) * 32).decode())


def record(peer: PeerId, *addresses: str, since: int = 0, role: str = "peer", hidden: bool = False) -> PeerRecord:
    whole = tuple(address if address.startswith("/dnsaddr/") else f"{address}/p2p/{peer}" for address in addresses)
    return PeerRecord("tiny", peer, whole, "0.1.0", 0, 0, 0, 0.0, (), role, hidden, since)


PEERS = [record(peer_id(number), f"/ip4/8.8.8.{number}/tcp/1", since=100 - number) for number in range(8)]


def test_it_names_the_bootstrap_nodes_and_the_peers_that_are_there_longest() -> None:
    node = record(ORGANISER, "/ip4/9.9.9.9/tcp/31337", since=200, role="bootstrap")
    mirror = record(OTHER, "/dnsaddr/run.example.org", "/ip4/9.9.9.8/tcp/31337", since=1, role="bootstrap")
    found = invited_to([*PEERS, mirror, node], ORGANISER)
    assert found[:3] == (*node.addresses, *mirror.addresses)
    assert found[3:] == tuple(PEERS[at].addresses[0] for at in (7, 6, 5, 4))
    assert set(decode(encode(Invite("tiny", bytes(16), ORGANISER, found))).addresses) == set(found)


def test_who_cannot_be_dialled_is_not_in_it_and_loopback_only_alone() -> None:
    hidden = record(peer_id(20), "/ip4/8.8.4.4/tcp/1", hidden=True)
    home = record(peer_id(21), "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1", "/ip4/8.8.4.4/tcp/1", "/ip6/::1/tcp/1")
    assert invited_to([hidden, home, record(peer_id(22))], ORGANISER) == (home.addresses[2], home.addresses[1])


def test_names_stay_when_those_who_said_them_are_gone() -> None:
    known = ("/ip4/9.9.9.9/tcp/1/p2p/x", "/dnsaddr/run.example.org", f"/dns4/node.example.org/tcp/1/p2p/{OTHER}")
    assert invited_to(PEERS[:1], ORGANISER, known) == (*known[1:], *PEERS[0].addresses)


def test_what_a_liar_says_of_itself_spoils_no_invitation() -> None:
    liar = peer_id(30)
    wrong = ("/ip4/8.8.8.8/tcp/99999", "/ip4/what/tcp/1", "/ip4/8.8.8.8/tcp/1/p2p/" + OTHER)
    records = [replace(record(liar), addresses=(f"{wrong[0]}/p2p/{liar}", f"{wrong[1]}/p2p/{liar}", wrong[2]))]
    records.append(record(PeerId("0OIl-no-base58"), "/ip4/8.8.8.8/tcp/1"))
    assert invited_to([*records, PEERS[0]], ORGANISER) == PEERS[0].addresses


def test_the_longest_addresses_still_make_a_word_that_can_be_read() -> None:
    long = tuple(f"/dns4/{'x' * 180}{number}.example.org/tcp/1/p2p/{peer_id(number)}" for number in range(16))
    assert decode(encode(Invite("tiny", bytes(16), ORGANISER, long))).addresses[0] == long[0]
