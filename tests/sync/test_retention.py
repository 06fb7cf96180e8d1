"""Who fetches a state gets it whole although the run goes on, and comes up to date by what the rounds handed out."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import LinkTooSlow, StorageFull
from spes_p2p.exchange import retention
from spes_p2p.exchange.patience import Patience
from spes_p2p.exchange.requests import HashesRequest, Request, TilesRequest, WiresRequest
from spes_p2p.exchange.retention import Retention
from spes_p2p.exchange.transfers import IN_FLIGHT_BYTES, Transfers
from spes_p2p.ids import Hash, PeerId
from spes_p2p.state.initial import InitialState
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.catch_up import CatchUp
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import check_agreement, commits, counts, in_swarm, small_config, until

A, B, C, D = (PeerId(name) for name in "abcd")
HURRIED = ("sync.steps_per_round=30", "model.vocab_size=8192", "model.embedding_rows=8192", "sync.tile_values=4096")
"""Rounds of three seconds, and enough values that messages are few bytes beside them."""


def stage_round(store: StateStore, round: int) -> None:
    staging = store.stage(round, round - 1)
    staging.write_state(0, InitialState(store.layout, round, 0.02).block(0)[: store.layout.tiles[0].size])
    staging.finish()
    staging.publish()


@pytest.fixture
def swarm_store(folder: Path) -> StateStore:
    """Ten rounds of a small run, all on disk."""
    from spes_p2p.interop.hf import state_layout

    store = StateStore(folder / "state", state_layout(small_config("sync.codec=int4")))
    store.create_initial(InitialState(store.layout, 0, 0.02))
    for round in range(1, 10):
        stage_round(store, round)
    return store


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tiles_of(store: StateStore, round: int, tile: int = 0) -> Request:
    return TilesRequest((store.version(round).tile_hashes[tile],))


def state_of(round: int) -> Request:
    return HashesRequest(Hash(b""), round)


def test_a_lease_outlives_the_longest_that_a_request_for_tiles_may_take() -> None:
    """It is renewed when a request's turn has come."""
    patience = Patience(lambda: Transfers.LEAST_SECONDS, lambda: 0.0)
    in_line = being_sent = patience.seconds(A, IN_FLIGHT_BYTES)
    assert in_line + being_sent < retention.IDLE_SECONDS


def test_a_lease_holds_a_state_and_what_was_handed_out_since(swarm_store: StateStore) -> None:
    leases = Retention(swarm_store, Time())
    assert leases.needed(9) == (frozenset(), frozenset())
    leases.asked(A, state_of(3))
    assert leases.needed(9) == (frozenset({3}), frozenset(range(4, 9)))
    leases.asked(A, tiles_of(swarm_store, 3))
    leases.asked(A, tiles_of(swarm_store, 9, tile=5))  # the same in all of them
    assert leases.needed(9)[0] == {3}
    leases.asked(A, WiresRequest(4, 0))  # it has the state
    assert leases.needed(9) == (frozenset(), frozenset(range(1, 9))), "nothing is said of its state"
    leases.asked(A, WiresRequest(8, 5))
    assert leases.needed(9) == (frozenset(), frozenset({6, 7, 8}))


def test_who_asks_for_tiles_alone_has_a_lease_too(swarm_store: StateStore) -> None:
    leases = Retention(swarm_store, Time())
    leases.asked(A, tiles_of(swarm_store, 4))
    assert leases.needed(9)[0] == {4}
    leases.asked(A, tiles_of(swarm_store, 6))
    assert leases.needed(9)[0] == {6}
    leases.asked(B, TilesRequest((Hash(b"x" * 32),)))
    assert leases.needed(9)[0] == {6}


def test_leases_are_bounded_in_time_and_disk(swarm_store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    leases = Retention(swarm_store, time)
    for at, peer in enumerate((A, B, C, D)):
        time.now = float(at)
        leases.asked(peer, state_of(6 - at))
    assert leases.needed(9)[0] == {6, 5}, "the first that came"
    time.now = retention.IDLE_SECONDS + 1.5
    assert leases.needed(9)[0] == {4, 3}
    while time.now < retention.LONGEST_SECONDS + 3.0:
        leases.asked(D, tiles_of(swarm_store, 3))
        assert leases.needed(9)[0]
        time.now += retention.IDLE_SECONDS
    assert not leases.needed(9)[0]
    leases.asked(A, state_of(3))
    leases.clear()
    assert not leases.needed(9)[0]
    leases.asked(A, state_of(3))
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert not leases.needed(9)[0]


def test_going_to_and_fro_renews_no_lease_for_ever(swarm_store: StateStore) -> None:
    time = Time()
    leases = Retention(swarm_store, time)
    while time.now < retention.LONGEST_SECONDS + 3.0:
        for request in (state_of(3), WiresRequest(4, 3), state_of(9), state_of(3)):
            leases.asked(A, request)
        assert leases.needed(9)[0] == ({3} if time.now <= retention.LONGEST_SECONDS else frozenset())
        time.now += retention.IDLE_SECONDS
    assert not leases.needed(9)[0]


def test_who_has_followed_for_days_may_ask_again_for_a_round(swarm_store: StateStore) -> None:
    time = Time()
    leases = Retention(swarm_store, time)
    for base in range(1, 7):
        for _ in range(40):
            leases.asked(A, WiresRequest(base + 1, base))
            assert leases.needed(9)[1] == {*range(base + 1, 9)}
            time.now += retention.IDLE_SECONDS
    assert time.now > retention.LONGEST_SECONDS
    leases.asked(A, WiresRequest(9, 8))
    leases.asked(A, WiresRequest(7, 6))
    assert leases.needed(9)[1] == {7, 8}


def test_strangers_can_take_only_so_many_leases(swarm_store: StateStore) -> None:
    leases = Retention(swarm_store, Time())
    for number in range(1000):
        leases.asked(PeerId(f"p{number}"), state_of(9))
    assert len(leases._leases) == retention.MOST_LEASES


def slow(swarm: MemorySwarm, name: str, rounds: float) -> None:
    """A link on which the whole state takes so many rounds (of three seconds and a bit)."""
    rate = 4 * swarm.layout.num_values / (3.3 * rounds)
    swarm.network.peer(name, StreamLimits(download_bytes_per_second=rate))


def note_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over how many rounds each catching up went that did not fetch a state."""
    replayed: list[int] = []
    replay = CatchUp._replay

    async def noted(self: CatchUp, steps: list[Any], *rest: Any) -> Any:
        staging = await replay(self, steps, *rest)
        replayed.append(len(steps))
        return staging

    monkeypatch.setattr(CatchUp, "_replay", noted)
    return replayed


def test_a_joiner_that_needs_rounds_for_the_state_comes_in_by_what_they_hand_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With int4 a round is an eighth of the state: it can keep up, once it is there."""
    replayed = note_replays(monkeypatch)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(4)
        slow(swarm, "d", rounds=4.0)
        await asyncio.wait_for(swarm.add("d"), 300.0)
        await until(counts(swarm, "d"), 300.0)
        check_agreement(swarm)
        assert replayed
        assert max(replayed) > 2, "it was further behind than donors usually keep"
        for name in "abc":
            store = swarm.peers[PeerId(name)].store
            assert len(store.rounds()) <= 2 + retention.MOST_STATES

    in_swarm(folder, play, small_config(*HURRIED, "sync.codec=int4", "sync.expert_codec=int4"))


def test_a_link_that_can_never_follow_is_refused_in_one_sentence(folder: Path) -> None:
    """With fp32 every round hands out as much as the state."""

    async def play(swarm: MemorySwarm) -> str:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        slow(swarm, "d", rounds=4.0)
        newcomer = await swarm.add("d")
        await until(lambda: bool(newcomer.failures), 300.0)
        (error,) = newcomer.failures
        newcomer.failures.clear()
        assert isinstance(error, LinkTooSlow)
        assert "--max-download" in error.fix
        check_agreement(swarm)
        return str(error)

    words = in_swarm(folder, play, small_config(*HURRIED))
    rate, size, needed = re.fullmatch(
        r"this link is too slow for the run: it received (\S+) Mbit/s, but a round hands out (\S+) MB every \S+ s, "
        r"which needs (\S+) Mbit/s",
        words,
    ).groups()  # type: ignore[union-attr]
    assert 0.5 < float(size) < 0.6
    assert 3 < float(needed) / float(rate) < 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "outer",
    [
        ("none",),
        ("none", "sync.codec=ternary"),
        ("nesterov",),
        ("nesterov", "sync.steps_per_round=[[14,3],[18,1],[0,2]]"),
    ],
)
def test_what_rounds_with_a_merge_hand_out_gives_their_states(
    folder: Path, monkeypatch: pytest.MonkeyPatch, outer: tuple[str, ...]
) -> None:
    """A peer that was away goes through the rounds since, and stands on the very state."""
    replayed = note_replays(monkeypatch)

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c", "d"])
        await swarm.until_round(3)
        await swarm.peers[D].kill()
        keep_all(swarm)
        await swarm.until_round(swarm.up[0].round + 4)
        assert any(commit.manifest.merge is not None for commit in commits(swarm)[4:])
        again = await swarm.add("d")
        behind = again.round
        await until(lambda: again.round > behind)
        assert {notice.kind for notice in again.notices} <= {"own"}, again.notices  # what it trained on its old state
        assert replayed
        await until(counts(swarm, "d"), 100.0)
        check_agreement(swarm)

    merging = ("sync.merge_interval=10", "sync.merge_alpha=0.05")
    kind, *more = outer
    in_swarm(folder, play, small_config("sync.codec=int4", f"sync.outer={kind}", *more, *merging, peers=4))


def keep_all(swarm: MemorySwarm) -> None:
    """As if somebody had a lease on the newest state of everybody."""
    for peer in swarm.up:
        peer.driver._history.retention.asked(PeerId("z"), state_of(peer.store.rounds()[-1]))


def test_a_full_disk_ends_all_leases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        keep_all(swarm)
        held = swarm.peers[A].store.rounds()[-1]
        await swarm.until_round(held + 3)
        assert held in swarm.peers[A].store.rounds()
        swarm.peers[A].driver._dispatcher.disk_is_full(StorageFull("no room"))
        await until(lambda: held not in swarm.peers[A].store.rounds(), 1.0)
        assert held in swarm.peers[B].store.rounds()

    in_swarm(folder, play)
