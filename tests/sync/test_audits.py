"""Reducers that hand out something else than the mean, and those who say so of reducers that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.consensus import actions as do
from spes_p2p.consensus.audits import Audits, drawn
from spes_p2p.consensus.manifest import Contribution, content_hash
from spes_p2p.consensus.messages import LOST, Accusation, Plan, Work
from spes_p2p.consensus.slices import plan_slices
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import TileData
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.audit import ANOTHER_WAY, Likeness
from spes_p2p.sync.interfaces import SliceWork
from spes_p2p.sync.reduce import OTHER_VALUES, WRONG_SIZE
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.simulation.pretend_peer import PretendWork
from tests.simulation.sim_state import FakeSealer
from tests.state.test_mending import flip
from tests.sync.swarm_cases import Recorder, check_agreement, commits, in_swarm, small_config
from tests.sync.test_clipping import alike

LIAR = PeerId("e")
SETTINGS = {
    "plain": (),
    "overlap": ("sync.overlap=true",),
    "turns": ("sync.expert_rounds=2",),
    "outer optimizer": ("sync.outer=nesterov",),
    "int8": ("sync.codec=int8",),
    "bf16 and turns": ("sync.expert_codec=bf16", "sync.expert_rounds=2"),
}
CLIP = ("sync.aggregate=clip", "sync.merge_alpha=0", "swarm.target_replicas=4", "swarm.experts_per_peer=3")


async def start(swarm: MemorySwarm) -> PretendPeer:
    """Five that train alike; the one that may lie."""
    await swarm.start_organiser()
    works = [PretendWork(alter=alike) for _ in range(5)]
    await asyncio.gather(*(swarm.add(name, work) for name, work in zip("abcde", works, strict=True)))
    return swarm.peers[LIAR]


def hands_out(liar: PretendPeer, lie: Callable[[Values], Values]) -> list[int]:
    """From now on it reports something else than the mean: the first tiles of what it has reported so.

    An encoded change is turned around.
    """
    candidate, layout, told = liar.driver._candidate, liar.store.layout, list[int]()
    write = candidate.write

    def altered(tile_id: int, data: TileData) -> TileData:
        if isinstance(data, np.ndarray):
            return lie(data)
        tile = layout.tiles[tile_id]
        codec = layout.codec_of(tile.block)
        return encode(codec, -decode(codec, data, tile.size))

    def written(first_tile: int, tiles: Iterable[TileData]) -> tuple[Hash, ...]:
        told.append(first_tile)
        return write(first_tile, [altered(first_tile + at, tile) for at, tile in enumerate(tiles)])

    vars(candidate)["write"] = written
    return told


def refusals(swarm: MemorySwarm) -> set[tuple[PeerId, PeerId | None]]:
    """(who says it, of whom)"""
    return {
        (life.name, notice.peer)
        for life in swarm.up
        for notice in life.notices
        if notice.kind == "refused" and "is not the mean" in notice.text
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_no_mean_is_found_by_who_trained_it_and_never_committed(folder: Path, setting: str) -> None:
    """Without a draw: it is unlike what everybody trained."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        liar = await start(swarm)
        await swarm.until_round(1)
        is_exact = {swarm.layout.codec_of(block.index) for block in swarm.layout.model_blocks} == {"fp32"}
        told = hands_out(liar, lambda values: values + np.copysign(np.float32(10), values))
        await swarm.until_round(8, "a")
        assert told
        assert refusals(swarm) == {(PeerId(name), LIAR) for name in "abcd"}
        if is_exact:
            recorder.check(commits(swarm, "a"))
        check_agreement(swarm)
        last = commits(swarm, "a")[-1].manifest
        assert last.banned == (LIAR,)
        assert {member.peer for member in last.members} == set("abcd")

    in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=0.0001", *SETTINGS[setting], peers=5))


def test_who_hands_out_what_is_not_finite_is_banned(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        liar = await start(swarm)
        told = hands_out(liar, lambda values: values * np.float32(np.nan))
        await swarm.until_round(6, "a")
        assert told
        assert refusals(swarm) == {(PeerId(name), LIAR) for name in "abcd"}
        assert commits(swarm, "a")[-1].manifest.banned == (LIAR,)

    in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=0.0001", peers=5))


def test_a_small_lie_is_found_by_who_draws_its_slice(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        liar = await start(swarm)
        told = hands_out(liar, lambda values: values * np.float32(1.0 + 1e-6))
        await swarm.until_round(8, "a")
        assert told
        assert refusals(swarm) == {(PeerId(name), LIAR) for name in "abcd"}
        assert commits(swarm, "a")[-1].manifest.banned == (LIAR,)

    in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=1", peers=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reason", [LOST, WRONG_SIZE, OTHER_VALUES])
def test_who_names_all_others_lost_reduces_nothing(folder: Path, reason: str) -> None:
    """It hands out its own, right to the bit; nobody is banned for what may be a broken link."""

    async def play(swarm: MemorySwarm) -> None:
        liar = await start(swarm)
        await swarm.until_round(1)

        collector = liar.driver._executor._collector
        collect = collector._contribution

        async def lost(entry: Contribution, parent: Hash, values: SliceWork) -> str:
            return await collect(entry, parent, values) if entry.peer == LIAR else reason

        vars(collector)["_contribution"] = lost
        first = swarm.peers[PeerId("a")].round + 2
        await swarm.until_round(first + 6)
        said = {life.name for life in swarm.up for notice in life.notices if "leaves out many" in notice.text}
        assert said == set("abcd")
        for commit in commits(swarm, "a")[first:]:
            shared = [piece for piece in commit.manifest.slices if piece.block == 0]
            assert all(piece.reducer != LIAR and len(piece.contributors) > 3 for piece in shared)
        assert commits(swarm, "a")[-1].manifest.banned == ()

    in_swarm(folder, play, small_config(*CLIP, peers=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["int8", "fp32", "bf16"])
def test_nobody_honest_is_refused_in_many_rounds(folder: Path, codec: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await start(swarm)
        await swarm.until_round(12)
        assert refusals(swarm) == set()
        assert not any(life.driver.core.state.others.false_accusers for life in swarm.up)
        assert all(life.driver.core.fired["audit"] > 5 for life in swarm.up)
        check_agreement(swarm)

    in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=1", f"sync.codec={codec}", peers=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("where", ["its own values", "the committed state"])
def test_damage_at_one_who_audits_is_no_lie_of_others(folder: Path, where: str, codec: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        damaged = await start(swarm)
        await swarm.until_round(2)
        inputs, audit, done = damaged.disk.inputs, damaged.driver._executor.audit, list[int]()

        async def audited(action: do.Audit) -> None:
            piece = action.report.value.piece
            done.append(piece.block)
            if where == "its own values":
                for block in inputs.snapshot.blocks:
                    vars(inputs.snapshot)["arrays"][block] = np.array(inputs.snapshot.block(block)) * np.float32(1.01)
            else:
                for tile_id in piece.tile_ids:
                    flip(damaged.store.version(damaged.round), tile_id, 30)
            await audit(action)

        vars(damaged.driver._executor)["audit"] = audited
        await swarm.until_round(8, "a")
        assert refusals(swarm) == set()
        assert not any(life.driver.core.state.others.false_accusers for life in swarm.up)
        assert commits(swarm, "a")[-1].manifest.banned == ()
        assert len(done) > 3

    in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=1", f"sync.codec={codec}", peers=5))


def test_a_false_accusation_harms_its_author_alone(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        liar = await start(swarm)
        core, accused = liar.driver.core, set[PeerId]()
        while len(accused) < 4:
            await asyncio.sleep(0.01)
            state = core.state
            for report in state.round.reports.values():
                if report.author != LIAR and content_hash(report.value) not in state.round.accusations:
                    said = state.identity.sealer.seal(Accusation(state.rules.fingerprint, report))
                    state.round.accusations[content_hash(report.value)] = {LIAR: said}
                    state.others.evidence[report.author] = {LIAR: said}
                    state.own.has_news = True
                    accused.add(report.author)
        await swarm.until_round(core.tip.round + 3)
        assert refusals(swarm) == set()
        honest = [life.driver.core.state.others for life in swarm.up if life.name != LIAR]
        assert [others.false_accusers for others in honest] == [{LIAR}] * 4
        assert {piece.reducer for piece in commits(swarm)[-1].manifest.slices} >= set("abcd")

    in_swarm(folder, play, small_config(*CLIP, peers=5))


def test_who_sends_other_values_than_it_committed_to_is_left_out(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        liar = await start(swarm)
        await swarm.until_round(1)
        serve = liar.driver.answers.serving.inputs

        def other(parent: Hash, first_tile: int, count: int) -> Blob | None:
            blob = serve(parent, first_tile, count)
            if blob is None:
                return None
            return replace(blob, data=(np.frombuffer(blob.data, np.float32) * np.float32(1.001)).tobytes())

        liar.driver.answers.serving.inputs = other
        await swarm.until_round(4)
        assert refusals(swarm) == set()
        reasons = {
            notice.text.partition(": ")[2] for life in swarm.up for notice in life.notices if notice.peer == LIAR
        }
        assert OTHER_VALUES in reasons
        for commit in commits(swarm)[2:]:
            slices = [piece for piece in commit.manifest.slices if piece.reducer != LIAR]
            assert slices
            assert all(LIAR not in piece.contributors for piece in slices)
        recorder.check(commits(swarm))

    in_swarm(folder, play, small_config(*CLIP, peers=5))


@pytest.mark.parametrize("share", [0.0, 0.08, 0.5, 1.0])
def test_as_many_slices_are_drawn_as_the_run_says(folder: Path, share: float) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        state = swarm.peers[PeerId("a")].driver.core.state
        state.identity = replace(state.identity, rules=replace(state.rules, audited_share=share))
        peers = [PeerId(f"p{at:02d}") for at in range(10)]
        slices = plan_slices(peers, (), {}, (60,), 2)
        roster = tuple(Contribution(peer, 1, 1, 1) for peer in peers)
        found = 0
        for number in range(400):
            state.own.secret = number.to_bytes(4, "big")
            found += len(drawn(state, Plan(NO_HASH, NO_HASH, 0, peers[0], roster, slices)))
        assert found / 400 * len(peers) == pytest.approx(share * len(slices), rel=0.2)

    in_swarm(folder, play, small_config(peers=1))


@pytest.mark.parametrize(
    ("times", "ours", "is_doubted"),
    [(0.0, 100, False), (1.9, 100, False), (2.1, 100, True), (2.1, 50, False), (4.1, 50, True), (ANOTHER_WAY, 1, True)],
)
def test_what_goes_farther_than_we_trained_is_doubted(folder: Path, times: float, ours: int, is_doubted: bool) -> None:
    """The last of the contributors claims a thousand times as many tokens, which allows it nothing."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a"])
        core = swarm.peers[PeerId("a")].driver.core
        state, peers = core.state, tuple(PeerId(name) for name in "abcd")
        state.identity = replace(state.identity, rules=replace(state.rules, audited_share=0.08))
        roster = tuple(Contribution(peer, 100_000 if peer == "d" else 100, 1, 1) for peer in peers)
        piece = plan_slices(peers, (), {}, (2,), 2)[0]
        plan = Plan(NO_HASH, NO_HASH, 0, peers[0], roster, (piece,))
        state.round.plan, state.round.index_of = FakeSealer(peers[0]).seal(plan), {piece.key: 0}
        state.round.work = Work(tokens=ours)
        Audits(state, core._parts.proposals).staged(piece.key, times)
        assert state.round.doubted == ({0} if is_doubted else set())

    in_swarm(folder, play, small_config(peers=1))


def test_a_mean_is_like_what_it_is_made_of() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(1000).astype(np.float32)
    rows = base + 0.01 * rng.standard_normal((10, 1000)).astype(np.float32)
    mean = rows.mean(0, dtype=np.float32)
    way, ours = mean - base, rows[0] - base
    shorter = float(np.linalg.norm(way) / np.linalg.norm(ours))
    for other, times in ((mean, shorter), (base - way, ANOTHER_WAY), (base + 10 * ours, 10)):
        likeness = Likeness()
        for part in (slice(0, 400), slice(400, 1000)):
            likeness.add(other[part], rows[0][part], base[part])
        assert likeness.times_ours == pytest.approx(times, rel=1e-4)
    likeness = Likeness()
    assert likeness.times_ours == 0  # nothing of ours to compare with
    likeness.add(mean, base, base)
    assert likeness.times_ours == ANOTHER_WAY
