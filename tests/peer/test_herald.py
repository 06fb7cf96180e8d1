"""What the organiser reads in the log of a bootstrap node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spes_p2p.consensus.manifest import Decay
from spes_p2p.consensus.membership import Member
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.peer.herald import (
    commit_lines,
    coverage,
    expected_coverage,
    genesis_lines,
    how_to_join,
    introduction,
    join_command,
    order_lines,
    router_warning,
)
from spes_p2p.sync.joining import waiting_text
from spes_p2p.sync.organiser_words import Words, decay
from spes_p2p.sync.organising.seat import vouch_fix
from tests.sync.chains import ORGANISER, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun()
GENESIS, FIRST = RUN.chain(2)
ANNA = PeerId("QmcUafVmoHSS8E9zV7UwhPHaR5gmUCrGRLMvXBYqNanna1")


def test_a_budget_that_does_not_cover_all_columns_is_warned_of_before_the_run() -> None:
    assert expected_coverage(small_config(peers=2)) is None
    warning = expected_coverage(small_config("swarm.experts_per_peer=1"))
    assert warning is not None
    assert warning.startswith("warning: 3 peers with 1 columns each cover 3 of 4 expert columns")


def test_a_router_that_never_learns_is_warned_of_before_the_run() -> None:
    """No error: some published models have it so."""
    blind = small_config("model.top_k=1", "model.norm_topk=true")
    warning = router_warning(blind)
    assert warning is not None
    assert warning.startswith("warning: model.top_k is 1 with model.norm_topk=true")
    assert warning in introduction(blind, RUN.info, None)
    assert warning not in introduction(blind, RUN.info, GENESIS)
    alone = ("model.num_experts=1", "swarm.experts_per_peer=1")
    for learns in (("model.norm_topk=false",), ("model.top_k=2",), alone):
        assert router_warning(small_config("model.top_k=1", "model.norm_topk=true", *learns)) is None


def test_the_beginning_of_a_run_names_what_it_waits_for() -> None:
    assert introduction(small_config(peers=2), RUN.info, None)[-1] == "it starts once 2 peers have joined"
    vouched = small_config("swarm.trusted=vouched", peers=2)
    assert introduction(vouched, RUN.info, None)[-1].endswith("and somebody who may vote is there: one that you vouch "
                                                              "for, or this node with --serve")  # fmt: skip
    of_mirror = introduction(vouched, RUN.info, None, is_mirror=True)[-1]
    assert of_mirror.endswith("is there: one that the organiser vouches for, or a node with --serve")
    assert "2 peers are here, but none may vote; the organiser must vouch for one" in waiting_text(vouched, 2)
    assert all("vote" not in waiting_text(config, 1) for config in (vouched, small_config(peers=2)))


def test_an_address_that_only_this_network_reaches_is_said_to_be_one() -> None:
    home, node = ("/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/192.168.0.7/tcp/1/p2p/Qm"), Path("club node")
    text = "\n".join(how_to_join("spes1abc", node, home))
    assert "spes-p2p invite --folder 'club node'" in text
    assert "this node's address is private" in text
    public = "\n".join(how_to_join("spes1abc", Path("bootstrap-node"), (*home, "/ip4/8.8.8.8/tcp/1/p2p/Qm")))
    assert "private" not in public
    assert "--folder" not in public


def test_who_has_to_bring_data_is_told_to_name_it() -> None:
    assert "  spes-p2p join spes1abc --data DIR" in how_to_join("spes1abc", Path("node"), (), brings_data=True)[0]
    local, leased = replace(RUN.info, dataset=NO_HASH), replace(RUN.info, dataset=sha256(b"some data"))
    assert join_command((), local).endswith(" --data DIR")
    assert "--data" not in join_command((), leased)


def test_whom_to_vouch_for_is_a_command_for_this_nodes_folder() -> None:
    assert "spes-p2p run vouch PEER)" in vouch_fix(Path("bootstrap-node"), [])
    assert f"spes-p2p run vouch {ANNA} --folder club)" in vouch_fix(Path("club"), [ANNA])


def test_coverage_names_what_nobody_owns() -> None:
    assert coverage(((ANNA,),) * 3) == "all 3 expert columns have an owner"
    assert coverage(((), (ANNA,), (), (), (ANNA,))) == "warning: 3 of 5 expert columns have no owner: 0,2-3"


def test_genesis_says_who_trains_what() -> None:
    assert genesis_lines(GENESIS.manifest) == [
        "the run starts with 1 peer",
        "  a trains columns 0-3",
        "all 4 expert columns have an owner",
    ]


def test_a_certificate_is_one_line() -> None:
    assert commit_lines(FIRST, GENESIS.manifest) == ["round 1: step 1, 1.0k tokens from 1 peer, 1.0k in total"]
    renewal = replace(FIRST, certificate=replace(FIRST.certificate, kind="renewal"))
    said = commit_lines(renewal, GENESIS.manifest)[0]  # also by a mirror, whose key it is not
    assert said.startswith("round 1 (a renewal, by the organiser's key): ")


def test_who_came_and_went_and_what_lost_its_owner_is_said() -> None:
    manifest = FIRST.manifest
    changed = replace(manifest, members=(Member(ANNA, 1, False, 0),), ownership=((), (ANNA,), (ANNA,), (ANNA,)))
    assert commit_lines(replace(FIRST, manifest=changed), GENESIS.manifest)[1:] == [
        "joined: Nanna1",
        "left: a",
        "warning: 1 of 4 expert columns have no owner: 0",
    ]
    quiet = replace(manifest, roster=())
    assert commit_lines(replace(FIRST, manifest=quiet), GENESIS.manifest) == ["round 1: step 1, 1.0k in total"]


def test_a_learning_rate_that_has_fallen_is_not_said_to_fall() -> None:
    words = decay(RUN.info, 200, RUN.sealer(ORGANISER))
    begun = replace(FIRST.manifest, decay=Decay(854, 200), step=1053)
    still = ["the organiser lets the learning rate fall over 200 steps"]
    assert order_lines(words, Words(), None) == order_lines(words, Words(), FIRST) == still
    assert order_lines(words, Words(), replace(FIRST, manifest=begun)) == still
    done = replace(FIRST, manifest=replace(begun, step=1054))
    assert order_lines(words, Words(), done) == ["the learning rate has fallen to its lowest (step 1,054)"]
    assert order_lines(words, words, done) == []
