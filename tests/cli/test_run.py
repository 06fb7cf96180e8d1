"""An organiser's commands against a real bootstrap node over loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.cli import run
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.swarm.invite import Invite, encode
from tests.cli.conftest import LOOPBACK, spes_p2p
from tests.cli.test_errors import refused
from tests.cli.test_join import Serve, rounds, serving

__all__ = ["serving"]


def test_a_run_is_ended_by_its_organiser_alone(tmp_path: Path, serving: Serve, tokens: Path) -> None:
    with serving("scheduler.warmup_steps=0") as organiser:
        word = spes_p2p("invite", "--folder", str(organiser.folder)).output.strip()
        stranger = tmp_path / "stranger"
        assert organiser.join(stranger, "--data", str(tokens), "--until-round", "1").exit_code == 0
        refused(
            spes_p2p("run", "stop", word, "--yes", "-f", str(stranger)),
            "is the key of",
            "the organiser of run tiny is Qm",
            "--folder",
        )
        refused(spes_p2p("run", "decay", word, "--steps", "40", "-f", str(stranger)), "is the key of", "--folder")
        answer = spes_p2p("run", "decay", "--steps", "40", "-f", str(organiser.folder))
        assert answer.exit_code == 0, answer
        assert "falls over 40 steps from the next round on" in answer.output
        refused(spes_p2p("run", "decay", "--steps", "80", "-f", str(organiser.folder)), "over 40 steps", "run stop")
        answer = spes_p2p("run", "stop", "--yes", "-f", str(organiser.folder), "--after-round", "3")
        assert answer.exit_code == 0, answer
        assert "ends with round 3" in answer.output
        assert f"run tiny (folder {organiser.folder}): asking its nodes" in answer.errors
        ended = organiser.join(stranger, "--data", str(tokens))
        assert ended.exit_code == 0, ended
        assert [event.round for event in rounds(stranger)] == [1, 2, 3]
        assert "the organiser has ended the run: this peer saves and exits after round 3" in ended.output
        assert ended.output.rstrip().splitlines()[-1].startswith("The run is over. ")
        assert "tokens trained here, all counted" in ended.output
        assert "get its model with: spes-p2p export" in ended.output
        lines = [json.loads(line) for line in spes_p2p("run", "inspect", word, "--json").output.splitlines()]
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        assert [line["kind"] for line in lines] == ["genesis", *["quorum"] * 3]
        assert sorted(line["decay_steps"] for line in lines) == [0, 0, 0, 40]
        newest = spes_p2p("run", "inspect", "-f", str(stranger), "--last", "1").output.splitlines()
        assert newest[1].split()[:2] == ["3", "quorum"]
        assert newest[-1].strip() == "the organiser ended the run with this round"
        assert spes_p2p("status", word).output.startswith(
            "the run is over: its organiser ended it with round 3; get its"
        )
        while "round 3: step" not in "\n".join(organiser.said):
            pass
        looked = spes_p2p("doctor", word, "--host-maddrs", LOOPBACK)
        assert "failure  run     run tiny is over: its organiser ended it with round 3" in looked.output
        assert looked.exit_code == 1
        refused(organiser.join(tmp_path / "late", "--data", str(tokens)), "is over", "with round 3", "export", code=3)
    with serving("scheduler.warmup_steps=0") as again:
        assert any("the organiser ends the run with round 3" in line for line in again.said)
    refused(
        spes_p2p("run", "decay", "--steps", "9", "-f", str(organiser.folder)),
        f"no node of run tiny (folder {organiser.folder}) can be reached",
        "start its bootstrap node again",
    )


def test_who_is_banned_is_told_and_whom_the_organiser_vouches_for_votes(
    tmp_path: Path, serving: Serve, tokens: Path
) -> None:
    with serving("swarm.trusted=vouched") as organiser:
        stranger = tmp_path / "stranger"
        node = ("-f", str(organiser.folder))
        refused(spes_p2p("run", "vouch", "somebody", *node), "'somebody' is not the id of a peer", "status --ids")
        stranger.mkdir()
        identity = IdentityFile(stranger / "identity.key")
        peer = identity.signer.peer_id
        identity.release()
        refused(spes_p2p("run", "ban", peer, "-f", str(stranger)), "holds no invitation")
        answer = spes_p2p("run", "ban", peer, *node)
        assert answer.output == f"vouched for: nobody\nbanned: {peer}\nthe next round takes it up\n"
        refused(organiser.join(stranger, "--data", str(tokens)), "has banned this peer", f"ban --undo {peer}", code=3)
        word = spes_p2p("invite", "--folder", str(organiser.folder)).output.strip()
        looked = spes_p2p("doctor", word, "-o", str(stranger), "--host-maddrs", LOOPBACK).output
        assert "failure  run     the organiser of run tiny has banned this peer" in looked
        undone = spes_p2p("run", "ban", "--undo", peer, *node).output
        assert "banned: nobody" in undone
        assert "is still carried out once" in undone
        first, second = (spes_p2p("run", "vouch", peer, *node).output for _ in range(2))
        assert first == f"vouched for: {peer}\nbanned: nobody\nthe next round takes it up\n"
        assert second == first
        joined = organiser.join(stranger, "--data", str(tokens), "--until-round", "2")
        assert joined.exit_code == 0, joined
        assert "the organiser vouches for this peer: it is trusted now" in joined.output
        assert [event.round for event in rounds(stranger)] == [1, 2]


def test_init_writes_a_run_that_bootstrap_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--name", "mine", "--template", "tiny", "--data", str(tokens), "--peers", "1", "--experts-per-peer", "8")
    answer = spes_p2p("run", "init", *flags)
    assert answer.exit_code == 0, answer
    assert "mine.yaml: run mine; the organiser is Qm" in answer.output
    assert "spes-p2p bootstrap --config mine.yaml" in answer.output
    refused(spes_p2p("run", "init", *flags), "mine.yaml already exists")
    refused(spes_p2p("run", "inspect"), "holds no history of a run")
    assert spes_p2p("run", "stop").exit_code == 1


def test_init_asks_again_for_a_number_and_never_for_a_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["tiny", "mine", "", "many", "0", "2", "4", "0"])
    asked: list[str] = []

    def typed(question: str, default: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.prompt", typed)
    monkeypatch.setattr(run, "is_asked", lambda: True)
    answer = spes_p2p("run", "init")
    assert answer.exit_code == 0, answer
    assert answer.output.count("Please type a whole number, 1 or more.") == 2
    assert load_config(tmp_path / "mine.yaml").swarm.min_peers == 2
    answers, asked = iter(["tiny", "mine"]), []
    refused(spes_p2p("run", "init"), "mine.yaml already exists")
    assert len(asked) == 2


def test_init_leaves_out_turns_of_a_vocabulary_that_fills_no_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--template", "home", "--data", "", "--peers", "8", "--experts-per-peer", "2")
    for name, tokens, turns in (("many", 50280, 5), ("few", 258, 1)):
        answer = spes_p2p("run", "init", "--name", name, *flags, f"model.vocab_size={tokens}")
        assert answer.exit_code == 0, answer
        assert load_config(tmp_path / f"{name}.yaml").sync.vocabulary_rounds == turns
    few = ("model.vocab_size=258", "sync.vocabulary_rounds=5")
    refused(
        spes_p2p("run", "init", "--name", "none", *flags, *few), "no tile of 1,048,576 values", "vocabulary_rounds=1"
    )


def test_init_warns_of_routers_that_never_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--template", "tiny", "--data", "", "--peers", "4", "--experts-per-peer", "2", "model.norm_topk=true")
    for chosen, warns in ((1, True), (2, False)):
        answer = spes_p2p("run", "init", "--name", f"top-{chosen}", *flags, f"model.top_k={chosen}")
        assert answer.exit_code == 0, answer
        assert ("warning: model.top_k is 1 with model.norm_topk=true" in answer.output) is warns


def test_init_makes_a_run_for_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--template", "home", "--data", "", "--peers", "8", "--experts-per-peer", "2", "--strangers")
    answer = spes_p2p("run", "init", "--name", "open", *flags)
    assert answer.exit_code == 0, answer
    assert "it takes 4 trusted peers with 2 columns each to own all 8" in answer.output
    config = load_config(tmp_path / "open.yaml")
    assert (config.swarm.trusted, config.swarm.faults) == ("vouched", "crash")
    home = load_config(bundled_config("home"))
    assert config.sync == home.sync, "with its codec, its turns and its overlap"


def test_where_nobody_can_answer_run_stop_says_which_flag_answers(tmp_path: Path) -> None:
    other = PeerId("QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn")
    invite = Invite("tiny", b"f" * 16, other, (f"/ip4/203.0.113.7/tcp/31337/p2p/{other}",))
    (tmp_path / "invite.txt").write_text(encode(invite))
    refused(spes_p2p("run", "stop", "-f", str(tmp_path)), "nobody is there to answer", "--yes")
