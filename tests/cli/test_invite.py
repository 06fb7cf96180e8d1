"""With an invitation and nothing else: join, status, eval and export find the run, and say what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.cli.arguments import met
from spes_p2p.errors import ConfigError
from spes_p2p.peer.options import meeting
from spes_p2p.swarm.invite import Invite, decode, encode
from tests.cli.conftest import LOOPBACK, Organiser, spes_p2p
from tests.cli.test_errors import refused


@pytest.fixture(scope="module")
def word(organiser: Organiser) -> str:
    return spes_p2p("invite", "--folder", str(organiser.folder)).output.strip()


def changed(word: str, **fields: object) -> str:
    known = decode(word)
    values = {name: getattr(known, name) for name in ("run_id", "fingerprint", "organiser", "addresses")}
    return encode(Invite(**(values | fields)))


def test_the_bootstrap_node_says_it_and_prints_it_again(organiser: Organiser, word: str) -> None:
    assert f"volunteers join with:\n  spes-p2p join {word}" in organiser.said
    assert decode(word).addresses == (organiser.address,)
    assert decode(word).organiser == organiser.address.rpartition("/")[2]


def test_anybody_who_reaches_the_run_can_make_one(organiser: Organiser, word: str) -> None:
    assert spes_p2p("invite", word).output.strip() == word
    assert spes_p2p("invite", "--initial-peers", organiser.address).output.strip() == word


def test_status_takes_it(word: str) -> None:
    for arguments in ((word,), ("--initial-peers", word)):
        assert spes_p2p("status", *arguments).output.startswith("run tiny, fingerprint ")


def test_join_takes_it_beside_overrides(tmp_path: Path, word: str) -> None:
    more = ("-o", str(tmp_path), "--host-maddrs", LOOPBACK)
    refused(spes_p2p("join", word, "output.tensorboard=nonsense", *more), "output.tensorboard", code=3)
    refused(
        spes_p2p("join", "run.seed=1", *more, "--initial-peers", word), "run.seed=1 cannot be set for one peer", code=3
    )


@pytest.mark.parametrize("command", ["join", "status", "export", "eval", "invite"])
def test_a_mistyped_one_is_one_clear_error(tmp_path: Path, word: str, command: str) -> None:
    more = {"join": ("-o", str(tmp_path / "out")), "export": ("-o", str(tmp_path / "out"))}.get(command, ())
    answer = spes_p2p(command, word[:-1] + ("1" if word[-1] != "1" else "2"), *more)
    refused(answer, "mistyped or cut short", code=3 if command == "join" else 1)


def test_a_mirror_takes_the_run_as_it_is(tmp_path: Path, word: str) -> None:
    more = ("--host-maddrs", LOOPBACK, "--output", str(tmp_path))
    for changes in (("--config", "tiny"), ("run.seed=1",), ("--init-from", str(tmp_path))):
        refused(
            spes_p2p("bootstrap", "--mirror", word, *changes, *more),
            "--mirror serves an existing run",
            "leave these out",
        )
    refused(spes_p2p("bootstrap", "--mirror", word[:-1], *more), "mistyped or cut short")


def test_nothing_at_all_is_told(tmp_path: Path) -> None:
    refused(spes_p2p("join", "-o", str(tmp_path)), "no invitation was given", "spes1", code=3)
    refused(spes_p2p("status"), "no invitation was given")
    (tmp_path / "mine.yaml").write_text("# Made by spes-p2p run init")
    refused(spes_p2p("status", str(tmp_path / "mine.yaml")), f"the file {tmp_path / 'mine.yaml'} holds no invitation")
    for word, reason in (
        ("nofile.txt", "No such file or directory"),
        (str(tmp_path), "Is a directory"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/Qm", "No such file or directory"),
        ("x" * 300, "File name too long"),  # an invitation whose beginning is missing
    ):
        refused(spes_p2p("status", word), f"{word[:80]!r} is not an invitation, and no file with one: {reason}")
    refused(spes_p2p("status", "spes1..."), "'spes1...' is not an invitation")
    refused(spes_p2p("invite", "-f", str(tmp_path / "nowhere")), "holds no invitation", "spes-p2p invite --folder peer")


def test_a_command_that_looks_at_a_run_takes_the_invitation_of_the_peer_here(tmp_path: Path, word: str) -> None:
    (tmp_path / "invite.txt").write_text(f"{word}\n")
    assert met(None, None, None, None, tmp_path) == meeting((word,), ())
    assert met(None, ["/ip4/127.0.0.1/tcp/1/p2p/Qm"], None, None, tmp_path).fingerprint is None
    with pytest.raises(ConfigError, match="no invitation was given"):
        met(None, None, None, None, tmp_path / "other")


def test_an_invitation_to_another_run_or_organiser_is_refused(tmp_path: Path, word: str) -> None:
    more = ("-o", str(tmp_path), "--host-maddrs", LOOPBACK)
    other = "QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"
    refused(spes_p2p("join", changed(word, organiser=other), *more), "the invitation is from", other)
    refused(spes_p2p("join", changed(word, fingerprint=bytes(16)), *more), "no run with fingerprint 0000")
    refused(spes_p2p("join", changed(word, run_id="big"), *more), "no run 'big'")


def test_two_that_do_not_belong_together_are_told(word: str) -> None:
    refused(spes_p2p("status", word, "--run-id", "big"), "is to run tiny", "not to big")
    refused(spes_p2p("status", word, "--fingerprint", "0000"), "not to fingerprint 0000")
    refused(spes_p2p("status", changed(word, run_id="b"), "--initial-peers", changed(word, fingerprint=bytes(16))), "b")
