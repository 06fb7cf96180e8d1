"""Attackers do what their names say, and a run with liars is measured against one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import Work
from spes_p2p.data.leases import count
from spes_p2p.data.loader import open_dataset
from spes_p2p.ids import PeerId
from spes_p2p.sync.catch_up import CatchUp
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.surroundings import Applied
from tests.peer.real import SMALL, make_tokens
from tests.simulation.attackers.trial import ATTACKS, Cast, Trial, run_trial
from tests.simulation.pretend_peer import PretendPeer


@pytest.mark.parametrize("name", ["claimed-flip", "names-lost"])
def test_what_turns_the_run_around_is_the_opposite_of_honest_training(name: str) -> None:
    base, change = np.random.default_rng(0).standard_normal((2, 4096), np.float32)
    made = ATTACKS[name]().values(base + change, base)
    assert made - base == pytest.approx(-change, abs=1e-5)


def test_claims_go_as_far_as_the_rules_let_them() -> None:
    claimed = ATTACKS["claimed-work"]().work(Work(ready=True, tokens=800, steps=10, sequences=20), most_steps=80)
    assert (claimed.steps, claimed.tokens, claimed.sequences) == (80, 6400, 160)


def test_who_names_honest_peers_lost_takes_liars() -> None:
    attack, liars = ATTACKS["names-lost"](), {PeerId("liar")}
    assert [attack.takes(PeerId(name), liars) for name in ("liar", "honest")] == [True, False]


class Seen:
    """What a run with a liar showed on the way."""

    def __init__(self) -> None:
        self.tips: list[Manifest] = []
        self.asked_for_chain = 0
        self.checked = 0


def trial_with(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, rounds: int = 3
) -> tuple[Trial, Seen]:
    """A run of three honest peers and a liar."""
    data, seen = make_tokens(folder / "corpus", 4_000), Seen()
    common = ("swarm.experts_per_peer=8", "swarm.target_replicas=4", "sync.steps_per_round=2", "sync.merge_alpha=0")
    chosen = (*SMALL, *common, "swarm.faults=byzantine", f"data.path={data}", *overrides)
    config = load_config(bundled_config("tiny"), chosen)
    applied, check, chain = PretendPeer.applied, EnvelopeChecker.check, CatchUp.headers

    def told(self: PretendPeer, event: Applied) -> None:
        seen.tips.append(event.commit.manifest)
        applied(self, event)

    def checked(self: EnvelopeChecker, peer: PeerId, *rest: Any) -> bool:
        seen.checked += " makes " in peer
        return check(self, peer, *rest)

    async def headers(self: CatchUp, *rest: Any, **named: Any) -> Any:
        seen.asked_for_chain += 1
        return await chain(self, *rest, **named)

    monkeypatch.setattr(PretendPeer, "applied", told)
    monkeypatch.setattr(EnvelopeChecker, "check", checked)
    monkeypatch.setattr(CatchUp, "headers", headers)
    return run_trial(config, folder / "run", open_dataset(config), ATTACKS[name](), Cast(rounds, 4, 1)), seen


@pytest.mark.timeout(300)
def test_an_endless_chain_is_asked_for_and_moves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, seen = trial_with("endless-chain", tmp_path, monkeypatch)
    assert trial.rounds >= 3
    assert seen.asked_for_chain > 0
    assert trial.longest_stall_deadlines < 10
    assert all(manifest.roster for manifest in seen.tips[3:])


@pytest.mark.timeout(300)
def test_a_flood_of_signatures_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, seen = trial_with("signature-flood", tmp_path, monkeypatch)
    assert trial.rounds >= 3
    assert seen.checked > 0
    assert trial.longest_stall_deadlines < 10


@pytest.mark.timeout(300)
def test_fifty_keys_come_in_and_get_no_vote_where_electors_are_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, seen = trial_with("stranger-keys", tmp_path, monkeypatch, "swarm.trusted=vouched", rounds=8)
    assert trial.rounds >= 5
    strangers = [m for tip in seen.tips for m in tip.members if " key " in m.peer]
    assert strangers
    assert not any(member.elector for member in strangers)


@pytest.mark.timeout(300)
def test_claims_are_bounded_by_what_was_leased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, seen = trial_with("claimed-work", tmp_path, monkeypatch, rounds=4)
    assert trial.rounds >= 4
    by_round = {tip.round: tip for tip in seen.tips}
    claims = [(by_round[round - 1], entry) for round, tip in by_round.items() if round > 1 for entry in tip.roster]
    assert all(entry.sequences <= count(parent.leases.of(entry.peer)) for parent, entry in claims)
    used = [max(e.sequences for _, e in claims if (e.peer == "peer-001") is is_liar) for is_liar in (False, True)]
    assert used[1] > used[0], "it claims as much as its lease allows"


@pytest.mark.sampled(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["takes-columns", "two-votes"])
def test_a_part_of_a_liars_consensus_lies_and_the_run_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, seen = trial_with(name, tmp_path, monkeypatch, rounds=5)
    assert trial.rounds >= 5
    assert not any(owners == (PeerId("peer-001"),) for tip in seen.tips for owners in tip.ownership)
    assert trial.longest_stall_deadlines < 10


@pytest.mark.timeout(300)
def test_nobody_waits_for_keys_that_join_as_trainers_and_hand_nothing_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("swarm.trusted=vouched", "sync.steps_per_round=8")
    trial, seen = trial_with("idle-keys", tmp_path, monkeypatch, *settings, rounds=5)
    assert trial.rounds >= 5
    assert sum(" key " in member.peer for member in seen.tips[-1].members) > 10
    assert trial.longest_stall_deadlines < 0.3, "as long as a round takes; two heartbeats more would make it 0.5"


@pytest.mark.timeout(300)
def test_a_reducer_that_names_honest_peers_lost_leaves_them_out_and_nobody_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, seen = trial_with("names-lost", tmp_path, monkeypatch)
    liar = PeerId("peer-001")
    made = [piece for tip in seen.tips for piece in tip.slices if piece.reducer == liar and len(tip.roster) == 4]
    assert made
    assert {piece.contributors for piece in made} == {(liar,)}
    assert not trial.dropped


@pytest.mark.timeout(300)
def test_a_run_with_a_liar_is_measured_against_one_without(tmp_path: Path) -> None:
    """NaN does nothing to the loss; a turned sign with more claimed than trained does, unless it is a stranger's."""
    data = make_tokens(tmp_path / "corpus", 4_000)
    overrides = ("swarm.experts_per_peer=8", "swarm.target_replicas=4", "sync.steps_per_round=4", "sync.merge_alpha=0")
    config = load_config(bundled_config("tiny"), (*SMALL, *overrides, f"data.path={data}", "optimizer.lr=0.01"))

    def loss(name: str, trusted: Literal["all", "vouched"] = "all") -> float:
        attack, folder = ATTACKS[name]() if name else None, tmp_path / f"{name} {trusted}"
        own = config.model_copy(update={"swarm": config.swarm.model_copy(update={"trusted": trusted})})
        trial = run_trial(own, folder, open_dataset(own), attack, Cast(3, 4, 1))
        assert trial.rounds >= 3
        assert not trial.dropped
        assert trial.longest_stall_deadlines < 10
        return trial.loss

    clean = loss("")
    assert abs(loss("nan") / clean - 1) < 0.01  # the others have other leases
    assert loss("claimed-flip") > 1.01 * clean
    assert loss("claimed-flip", "vouched") < 1.01 * clean
