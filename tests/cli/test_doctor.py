"""The doctor against a real bootstrap node over loopback; and `join`, which refuses with the same sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.cli.doctor import verdict
from spes_p2p.peer import doctor
from spes_p2p.peer.checks import Check, Disk
from spes_p2p.peer.herald import OWN_DATA
from spes_p2p.swarm.hivemind_backend.identity import signer_of
from tests.cli.conftest import LOOPBACK, Answer, Organiser, serve, spes_p2p
from tests.cli.test_errors import NOBODY, refused


def checks(answer: Answer) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(answer.output)["checks"]}


def test_everything_is_looked_at_and_only_the_key_is_left_behind(tmp_path: Path, organiser: Organiser) -> None:
    where = ("--output", str(tmp_path / "peer"), "--host-maddrs", LOOPBACK)
    answer = spes_p2p("doctor", "--initial-peers", organiser.address, *where, "--json")
    assert answer.exit_code == 0, answer
    found = checks(answer)
    names = ["python", "torch", "gpu", "memory", "network", "clock", "port", "reach", "run", "fit", "disk"]
    assert list(found) == [*names, "peer"]
    peer = signer_of(tmp_path / "peer" / "identity.key").peer_id
    assert found["peer"]["text"] == f"this peer will be {peer}"
    assert "and up to" in found["disk"]["text"]
    assert "GB for its data" not in found["disk"]["text"]  # of which there is less than a megabyte
    assert found["run"]["text"] == "tiny, round 0, 0 peers"
    assert "room for 8 of 8 expert columns" in found["fit"]["text"]
    assert all(check["fix"] for check in found.values() if check["level"] != "ok")
    assert {path.name for path in (tmp_path / "peer").iterdir()} <= {".gitignore", "identity.key", "identity.key.lock"}


def test_the_web_servers_that_the_organiser_names_are_looked_at(tmp_path: Path, tokens: Path) -> None:
    url = "http://127.0.0.1:1/shards"
    for node in serve(tmp_path / "node", tokens, f'data.urls=["{url}"]'):
        found = checks(spes_p2p("doctor", "--initial-peers", node.address, "--host-maddrs", LOOPBACK, "--json"))["web"]
    assert found["level"] == "warning"
    assert found["text"].startswith(f"0 of 1 web servers have the run's data; {url}: not on the public web")


def test_whose_data_is_its_own_is_told_to_bring_it(tmp_path: Path, tokens: Path) -> None:
    for node in serve(tmp_path / "node", tokens, "data.source=local"):
        found = checks(spes_p2p("doctor", "--initial-peers", node.address, "--host-maddrs", LOOPBACK, "--json"))
        assert "it adds --data DIR to join" in found["data"]["text"]
        assert found["data"]["text"] in node.said
        assert "for its data" not in found["disk"]["text"]


def test_lines_for_people_end_with_what_it_comes_to(tmp_path: Path) -> None:
    answer = spes_p2p("doctor", "--output", str(tmp_path))
    assert answer.exit_code == 0
    assert answer.output.startswith("ok       python  3.")
    assert "not checked: no invitation was given" in answer.output
    assert "nothing was found that keeps this machine from training" in answer.output


def test_who_reaches_nobody_is_told_why_and_gets_an_exit_code(tmp_path: Path) -> None:
    answer = spes_p2p("doctor", "--initial-peers", NOBODY, "--output", str(tmp_path), "--host-maddrs", LOOPBACK)
    assert answer.exit_code == 1
    assert f"failure  network no initial peer can be reached: {NOBODY} refuses connections" in answer.output
    assert answer.output.endswith("this machine cannot train in the run yet: network\n")


def test_join_refuses_with_the_words_of_the_doctor(
    tmp_path: Path, organiser: Organiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_disk", lambda output: Disk("/full", 1000))
    address = ("--initial-peers", organiser.address, "--host-maddrs", LOOPBACK)
    disk = checks(spes_p2p("doctor", *address, "--json"))["disk"]
    assert disk["level"] == "failure"
    answer = organiser.join(tmp_path, "--data", str(organiser.data))
    refused(answer, f"disk: {disk['text']}", disk["fix"])


def test_the_folder_of_a_peer_counts_its_files_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(100_000))
    held = doctor.find_disk(tmp_path).held_bytes
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert doctor.find_disk(tmp_path).held_bytes == held >= 100_000
    assert doctor.find_disk(tmp_path / "not" / "there").path == str(tmp_path)


def test_a_folder_that_nothing_can_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for output in ("file", "file/peer"):
        found = checks(spes_p2p("doctor", "--output", str(tmp_path / output), "--json"))
        assert found["disk"]["level"] == found["peer"]["level"] == "failure"
        assert found["disk"]["text"] == f"{tmp_path / 'file'} cannot be written to"
    found = checks(spes_p2p("doctor", "--output", str(tmp_path / ("x" * 300)), "--json"))
    assert found["peer"]["level"] == "failure"
    assert "cannot be created" in found["peer"]["text"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.os, "access", lambda path, how: False)  # root may write everywhere
    answer = spes_p2p("doctor")
    assert answer.exit_code == 1
    assert f"failure  disk    {tmp_path} cannot be written to" in answer.output


def test_what_it_prints_can_be_typed_as_it_stands() -> None:
    fits = [Check("fit", "ok", "4 columns fit")]
    assert verdict(fits, "spes1abc").endswith(": spes-p2p join spes1abc")
    assert verdict(fits, "spes1abc", Path("anna")).endswith(": spes-p2p join spes1abc --output anna")
    own = [*fits, Check("data", "ok", OWN_DATA)]
    assert verdict(own, "spes1abc").endswith(": spes-p2p join spes1abc --data DIR")
