"""Audits of who trained: newcomers come to count by what they do; who fakes work, or lies as an auditor, does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import FAILED, HALF, PASSED, PROBATION, WITHHELD
from spes_p2p.consensus.probation import auditors_of
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.layout import BlockSource, Values
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.surroundings import Text
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm, PretendPeer
from tests.simulation.pretend_peer import PretendWork
from tests.sync.around import Surroundings
from tests.sync.swarm_cases import check_agreement, check_leases, commits, in_swarm, small_config
from tests.sync.test_clipping import alike
from tests.sync.test_vouching import Organising, until, voters

FOUNDERS = "abcdefg"
NEWCOMER, FAKER = PeerId("n"), PeerId("f2")
OFTEN = 5.0
"""Times all training: two are audited in each round."""
CLIP = ("sync.aggregate=clip", "sync.merge_alpha=0", "swarm.faults=byzantine", "swarm.experts_per_peer=3")
SETTINGS = {
    "plain": (),
    "overlap": ("sync.overlap=true",),
    "turns": ("sync.expert_rounds=2",),
    "int8": ("sync.codec=int8",),
}


MARK = np.float32(0.25)
"""Of a change that nobody trained; clipping lets it in."""


def fake(round: int, block: int, values: Values) -> Values:
    return alike(round, block, values) + MARK


@dataclass
class Judge:
    """Knows a fake by its mark; `lies`: says the opposite."""

    lies: bool = False

    def finding(self, base: BlockSource, theirs: Values, own: Values, text: Text) -> str | None:
        assert min(map(len, (text.theirs, text.own, text.fresh)))
        before = base.block(0)
        assert not np.array_equal(own, before)
        is_fake = bool(np.mean((theirs - before)[theirs != before]) > MARK / 2)
        return FAILED if is_fake is not self.lies else PASSED


async def start(swarm: MemorySwarm, liars: str = "") -> None:
    """Founders of a run with many audits. `liars` sign the opposite of what they find."""
    vars(swarm.run)["rules"] = replace(swarm.run.rules, audited_work=OFTEN)
    await swarm.start_organiser()
    await asyncio.gather(*(add(swarm, name, name in liars) for name in FOUNDERS))


async def add(swarm: MemorySwarm, name: str, lies: bool = False, is_fake: bool = False) -> PretendPeer:
    peer = await swarm.add(name, PretendWork(alter=fake if is_fake else alike))
    peer.disk.work_judge = Judge(lies)
    return peer


def manifests(swarm: MemorySwarm) -> list[Manifest]:
    return [commit.manifest for commit in commits(swarm, "a")]


def found(swarm: MemorySwarm) -> dict[PeerId, set[str]]:
    """What audits found of whom."""
    findings: dict[PeerId, set[str]] = {}
    for manifest in manifests(swarm):
        for audited in manifest.audited:
            findings.setdefault(audited.peer, set()).add(audited.finding)
    return findings


def standing(manifest: Manifest, name: str = NEWCOMER) -> int | None:
    return next((member.probation for member in manifest.members if member.peer == name), None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_newcomer_counts_once_it_has_passed_audits(folder: Path, setting: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(1, "a")
        await add(swarm, NEWCOMER)
        while standing(manifests(swarm)[-1]) != 0:
            await swarm.until_round(len(manifests(swarm)), "a")
        await swarm.until_round(len(manifests(swarm)) + 3, "a")
        told = manifests(swarm)
        stands = [now for manifest in told if (now := standing(manifest)) is not None]
        assert list(dict.fromkeys(stands)) == [PROBATION, 2, HALF, 0]
        for parent, child in pairwise(told):
            contributes = any(NEWCOMER in piece.contributors for piece in child.slices)
            owns = any(NEWCOMER in owners for owners in child.ownership)
            if (standing(parent) or 0) > HALF:
                assert not contributes
            if (standing(child) or 0) > HALF:
                assert not owns
        waiting = [child for parent, child in pairwise(told) if (standing(parent) or 0) > HALF]
        assert any(entry.peer == NEWCOMER for child in waiting for entry in child.roster), "its tokens count"
        assert any(NEWCOMER in piece.contributors for piece in told[-1].slices)
        assert {finding for findings in found(swarm).values() for finding in findings} == {PASSED}
        check_agreement(swarm)
        check_leases(swarm, "a")

    in_swarm(folder, play, small_config(*CLIP, *SETTINGS[setting], peers=len(FOUNDERS)))


def test_who_is_on_probation_goes_on_from_what_was_committed(folder: Path) -> None:
    """What it trained goes into nothing, and is not carried on."""

    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(1, "a")
        peer = await add(swarm, NEWCOMER)
        peer.disk.work_judge = None
        for name in FOUNDERS:
            swarm.peers[PeerId(name)].disk.work_judge = None  # nobody can judge: it stays as it is
        await swarm.until_round(peer.round + 4)
        chain = manifests(swarm)
        assert standing(chain[-1]) == PROBATION
        seen = 0
        for round, handed in peer.handed_in.items():
            if any(entry.peer == NEWCOMER for entry in chain[round].roster):
                assert (
                    np.array_equal(handed.started[0], peer.store.version(round).block(0)) or round < chain[-1].round - 1
                )
                seen += 1
        assert seen

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))


def test_a_newcomer_that_fakes_its_work_is_banned_and_nobody_else_fails(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(1, "a")
        await add(swarm, NEWCOMER, is_fake=True)
        await until_banned(swarm, NEWCOMER)
        findings = found(swarm)
        assert findings.pop(NEWCOMER) == {FAILED}
        assert all(findings == {PASSED} for findings in findings.values())
        assert {member.peer for member in manifests(swarm)[-1].members} == set(FOUNDERS)

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))


async def until_banned(swarm: MemorySwarm, name: str, rounds: int = 40) -> None:
    while name not in manifests(swarm)[-1].banned:
        assert len(manifests(swarm)) < rounds
        await swarm.until_round(len(manifests(swarm)), "a")


def test_a_founder_that_fakes_its_work_loses_its_weight_and_is_banned(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(3, "a")
        swarm.peers[PeerId("g")].work.alter = fake
        await until_banned(swarm, "g")
        told = manifests(swarm)
        assert list(dict.fromkeys(standing(manifest, "g") for manifest in told)) == [0, 3, 6, None]
        assert all(standing(manifest, name) == 0 for manifest in told for name in "abcdef")
        weightless = [child for parent, child in pairwise(told) if standing(parent, "g")]
        assert weightless
        assert not any("g" in piece.contributors for child in weightless for piece in child.slices)

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))


def test_auditors_that_lie_fail_nobody_honest_and_pass_no_liar(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm, liars="fg")
        await swarm.until_round(1, "a")
        await add(swarm, NEWCOMER, is_fake=True)
        await add(swarm, "o")
        await until_banned(swarm, NEWCOMER)
        findings = found(swarm)
        assert findings.pop(NEWCOMER) == {FAILED}
        assert all(findings == {PASSED} for findings in findings.values())
        assert all(standing(manifest, name) == 0 for manifest in manifests(swarm) for name in FOUNDERS)
        while standing(manifests(swarm)[-1], "o"):
            assert len(manifests(swarm)) < 40
            await swarm.until_round(len(manifests(swarm)), "a")

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))


def shows_nothing(peer: PretendPeer) -> None:
    """To who asks after the certificate; reducers get what they ask for."""
    serve, core = peer.driver.answers.serving.inputs, peer.driver.core

    def shown(parent: Hash, first_tile: int, count: int) -> Blob | None:
        return serve(parent, first_tile, count) if parent == core.tip_hash else None

    peer.driver.answers.serving.inputs = shown


def shows_other_values(peer: PretendPeer) -> None:
    serve, core = peer.driver.answers.serving.inputs, peer.driver.core

    def shown(parent: Hash, first_tile: int, count: int) -> Blob | None:
        blob = serve(parent, first_tile, count)
        if blob is None or parent == core.tip_hash:
            return blob
        return replace(blob, data=(np.frombuffer(blob.data, np.float32) + np.float32(0.1)).tobytes())

    peer.driver.answers.serving.inputs = shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [shows_nothing, shows_other_values])
def test_who_shows_auditors_nothing_counts_less_and_is_not_banned(
    folder: Path, how: Callable[[PretendPeer], None]
) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(2, "a")
        how(swarm.peers[PeerId("g")])
        await swarm.until_round(16, "a")
        assert found(swarm)[PeerId("g")] <= {PASSED, WITHHELD}
        assert standing(manifests(swarm)[-1], "g") == PROBATION
        assert manifests(swarm)[-1].banned == ()
        assert all(findings == {PASSED} for peer, findings in found(swarm).items() if peer != "g")

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))


def test_vouching_gives_a_vote_and_no_weight_and_audits_the_other_way_round(folder: Path) -> None:
    """Electors vouch for an honest newcomer and for one that fakes its work; the first one goes and comes back."""

    async def play(swarm: MemorySwarm) -> None:
        vars(swarm.run)["rules"] = replace(swarm.run.rules, audited_work=OFTEN)
        around, desk = Surroundings(swarm), Organising(swarm)
        await swarm.start_organiser()
        await around.add(ORGANISER)
        starts = [asyncio.create_task(add(swarm, name)) for name in FOUNDERS]
        await until(lambda: any("somebody is here who may vote" in said for said in swarm.organiser_said))
        await desk.says(vouched=FOUNDERS)
        await asyncio.gather(*starts)
        await swarm.until_round(1, "a")
        await add(swarm, NEWCOMER)
        await add(swarm, FAKER, is_fake=True)
        for name in FOUNDERS[:5]:
            driver = swarm.peers[PeerId(name)].driver
            driver.wish(replace(driver.core.state.own.intent, vouches=(FAKER, NEWCOMER)))
        await until_banned(swarm, FAKER)
        while standing(manifests(swarm)[-1]) != 0:
            await swarm.until_round(len(manifests(swarm)), "a")
        told = manifests(swarm)
        assert any(NEWCOMER in voters(one) and (standing(one) or 0) > HALF for one in told), "it votes at once"
        for parent, child in pairwise(told):
            waits = {member.peer for member in parent.members if member.probation > HALF}
            assert not any(waits & set(piece.contributors) for piece in child.slices)
            assert not any(waits & set(auditors_of(parent, entry.peer)) for entry in parent.roster)
        assert (told[-1].vouched, told[-1].banned) == ((NEWCOMER,), (FAKER,))
        assert {member.peer for member in told[-1].members} == {*FOUNDERS, NEWCOMER}
        await swarm.peers[NEWCOMER].leave()
        await until(lambda: standing(manifests(swarm)[-1]) is None)
        left = len(manifests(swarm))
        await add(swarm, NEWCOMER)
        await until(lambda: standing(manifests(swarm)[-1]) is not None)
        account = swarm.peers[PeerId("a")].chain.ledger(left - 1).of(NEWCOMER)
        assert (account.passed >= 3, account.failed) == (True, 0)
        back = next(now for one in manifests(swarm)[left:] if (now := standing(one)) is not None)
        assert back == (PROBATION if account.withheld else HALF), "it may be gone when its last round is looked at"
        await around.stop()

    in_swarm(folder, play, small_config(*CLIP, "swarm.electors=vouched", peers=len(FOUNDERS)))


def test_where_fewer_than_three_could_audit_newcomers_count_at_once(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        vars(swarm.run)["rules"] = replace(swarm.run.rules, audited_work=OFTEN)
        await swarm.start(["a", "b"])
        await swarm.until_round(1, "a")
        await add(swarm, NEWCOMER)
        await swarm.until_round(5, "a")
        assert standing(manifests(swarm)[-1]) == 0
        assert any(NEWCOMER in piece.contributors for piece in manifests(swarm)[-1].slices)

    in_swarm(folder, play, small_config(*CLIP, peers=2))


def test_who_asks_for_other_work_than_the_tip_counts_gets_nothing(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(3, "a")
        core = swarm.peers[PeerId("a")].driver.core
        entry = next(entry for entry in core.tip.roster if entry.peer == "a")
        assert core.has_counted(core.tip.parent, entry)
        assert not core.has_counted(core.tip_hash, entry)
        assert not core.has_counted(core.tip.parent, replace(entry, tokens=entry.tokens + 1))
        assert not core.has_counted(core.tip.parent, next(other for other in core.tip.roster if other.peer == "b"))

    in_swarm(folder, play, small_config(*CLIP, peers=len(FOUNDERS)))
