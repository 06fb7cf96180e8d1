"""Disks that are full, and crashes between the steps of a commit."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus import actions as do
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.messages import (
    QUORUM,
    RENEWAL,
    Commit,
)
from spes_p2p.errors import PeerClosed, StateError, StorageFull, TileDamaged
from spes_p2p.ids import PeerId
from spes_p2p.wire import pack, unpack
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.sync.swarm_cases import (
    Recorder,
    check_agreement,
    check_leases,
    commits,
    counts,
    in_swarm,
    small_config,
    until,
)


def peer(swarm: MemorySwarm, name: str) -> PretendPeer:
    return swarm.peers[PeerId(name)]


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def raising(owner: Any, method: str, error: type[BaseException], after: bool = False) -> Iterator[None]:
    """Lets a method of one object fail, before or after its work."""
    real: Callable[..., Any] = getattr(owner, method)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        raise error(f"{method}: no room")

    setattr(owner, method, fail)
    try:
        yield
    finally:
        delattr(owner, method)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["stage", "votes", "chain", "publish"])
def test_a_full_disk_is_said_once_and_training_goes_on(folder: Path, where: str) -> None:
    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        full = peer(swarm, "b")
        target: tuple[Any, str] = {
            "stage": (full.store, "stage"),
            "votes": (full.votes, "write"),
            "chain": (full.chain, "append"),
            "publish": (full.driver._candidate, "publish"),
        }[where]
        with raising(*target, StorageFull):
            await swarm.until_round(20, "ac")
            said = ["no room" in notice.text for notice in full.notices if notice.kind == "disk"]
            if where in ("stage", "chain"):  # with the others it may still fetch what was committed
                assert full.round < 6
                await until(lambda: not full.driver.core.state.own.intent.can_vote)  # now and then it tries again
                assert said == [True]
            assert said[::2] == [True] * len(said[::2])
            assert not any(said[1::2])
            assert all(commit.certificate.kind == QUORUM for commit in commits(swarm, "a")[1:])
            assert "b" in {member.peer for member in commits(swarm, "a")[-1].manifest.members}
        await until(counts(swarm, "b"))
        reached = full.round
        await until(lambda: any(content.manifest.round > reached for content in full.votes.record.contents))
        await until(lambda: "space again" in [notice.text for notice in full.notices if notice.kind == "disk"][-1])
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_who_has_no_room_for_long_is_waited_for_no_longer_than_who_is_gone(folder: Path) -> None:
    """Of two a majority is both. Whoever tries its disk again and again is not counted on before it has written."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b"])
        await swarm.until_round(2)
        other, full = peer(swarm, "a"), peer(swarm, "b")
        with raising(full.store, "stage", StorageFull):
            await until(lambda: other.round > full.round + 2, 300.0)
            assert [notice.kind for notice in full.notices].count("disk") == 1
        await until(counts(swarm, "b"), 300.0)
        assert full.driver.core.status().intent.can_vote
        check_agreement(swarm)

    in_swarm(folder, play, small_config("run.seed=6", peers=2))  # the one that is full does not lead first


async def full_with_the_leader_gone(
    swarm: MemorySwarm, monkeypatch: pytest.MonkeyPatch, full_name: str, has_room: bool
) -> tuple[str, str]:
    """A peer's disk is full, the leader goes, and then there is room again, for a state where it `has_room`, else for
    votes alone: nobody proposes, so there is nothing to write. How the two that are left went on, and who has gone.
    """

    def leader() -> PeerId:
        return peer(swarm, full_name).driver.core.state.electorate.leader(0)

    def is_alike() -> bool:
        return {life.round for life in swarm.up} == {peer(swarm, full_name).round} != {0} and leader() != full_name

    await until(is_alike, 300.0)
    gone, full = swarm.peers[leader()], peer(swarm, full_name)
    [other] = [life for life in swarm.up if life not in (gone, full)]
    stood, said = full.round, len(full.notices)
    monkeypatch.setattr(full.driver, "has_room", lambda: False)
    with raising(full.votes, "write", StorageFull):
        await gone.kill()
        await until(lambda: any(notice.kind == "disk" for notice in full.notices[said:]))
        await until(lambda: not other.driver.core.state.liveness.hears_quorum)
    assert full.round == other.round == stood
    await until(lambda: not full.driver._dispatcher.is_full)  # it has looked once, in vain
    monkeypatch.setattr(full.driver, "has_room", lambda: has_room)
    await until(lambda: other.round > stood, 300.0)
    return other.chain.commit(stood + 1).certificate.kind, gone.name


@pytest.mark.parametrize("has_room", [True, False])
def test_who_has_room_again_is_counted_on_before_it_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """Else the two that are left go on only when they may do so without a quorum. So they do where there is room for
    votes alone."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        kind, _ = await full_with_the_leader_gone(swarm, monkeypatch, "b", has_room)
        assert kind == (QUORUM if has_room else RENEWAL)
        check_agreement(swarm)

    in_swarm(folder, play)


def test_who_is_full_again_after_a_commit_is_counted_on_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit has shown that what was promised before it was true."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        for _ in range(2):
            kind, gone = await full_with_the_leader_gone(swarm, monkeypatch, "b", has_room=True)
            assert kind == QUORUM
            await swarm.add(gone)
            await until(counts(swarm, gone), 300.0)
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_leader_whose_state_cannot_be_read_does_not_lead_for_ever(folder: Path) -> None:
    """What it fetches again and again, to build from it in vain, is no progress."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start("abc")
        await swarm.until_round(2)
        other, broken = peer(swarm, "a"), peer(swarm, "b")
        with raising(broken.driver._candidate, "compute", TileDamaged):
            await until(lambda: other.round > 12)
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_disk_that_fails_otherwise_ends_the_peer_without_another_word(folder: Path) -> None:
    """A vote that may not be on disk must never be heard."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        broken = peer(swarm, "b")
        with raising(broken.votes, "write", OSError):
            await until(lambda: bool(broken.failures))
            sent = broken.net.transport.traffic.sent
            await swarm.until_round(peer(swarm, "a").round + 3, "ac")
            assert broken.net.transport.traffic.sent - sent < 10_000  # refusals alone
        assert isinstance(broken.failures.pop(), OSError)
        assert not broken.failures
        await broken.kill()
        await swarm.add("b")
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


def begin_to_forget(broken: PretendPeer) -> list[do.Action]:
    """What follows where others have heard votes that its record lacks, with a vote to be written before it."""
    core = broken.driver.core
    core._parts.voting.forget_record(core.state.own.incarnation)
    forgetting, core.state.out = core.state.out, []
    return [do.Persist(broken.votes.record), *forgetting]


def test_a_new_incarnation_begins_although_the_vote_before_it_found_no_room(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        full = peer(swarm, "b")
        before = full.votes.incarnation
        with raising(full.votes, "write", StorageFull):
            full.driver._dispatcher.carry_out(begin_to_forget(full))
        assert full.driver.core.state.own.incarnation == full.votes.incarnation > before
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize(("part", "method", "error"), [("votes", "forget", OSError)])
def test_a_disk_that_fails_where_a_message_is_heard_ends_the_peer_too(
    folder: Path, part: str, method: str, error: type[Exception]
) -> None:
    """Else it hears nobody any more and goes on to say that it lives: the others would wait for it for ever."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        broken, other = peer(swarm, "b"), peer(swarm, "a")
        core, answers = broken.driver.core, broken.driver.answers
        message = pack(other.driver.core._parts.gossip.answer(broken.name))
        with raising(getattr(broken, part), method, error):
            core.state.out = begin_to_forget(broken)[1:]
            with pytest.raises(PeerClosed, match="shutting down"):
                await answers.on_call(other.name, message)
        assert isinstance(broken.failures.pop(), error)
        await broken.kill()
        await swarm.add("b")
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_disk_that_fills_in_the_middle_of_a_write(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        full = peer(swarm, "b")
        stage, staged = full.store.stage, []

        def small(*args: Any, **kwargs: Any) -> Any:
            staging = stage(*args, **kwargs)
            staged.append(staging)
            real, left = staging.areas.wire.write, [3]

            def write(*tile: Any) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise StorageFull("no room for one more tile")
                real(*tile)

            staging.areas.wire.write = write  # type: ignore[method-assign, assignment]
            return staging

        full.store.stage = small  # type: ignore[method-assign]
        await swarm.until_round(5, "ac")
        assert staged
        assert [notice.kind for notice in full.notices] == ["disk"]
        full.store.stage = stage  # type: ignore[method-assign]
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


async def crash_in(swarm: MemorySwarm, names: str, steps: str, after: bool) -> None:
    """Lets these peers die in the same step of their next commit, and start again on their disks."""
    for name in names:
        life = peer(swarm, name)
        owner, method = {"chain": (life.chain, "append"), "publish": (life.driver._candidate, "publish")}[steps]
        life.crash = raising(owner, method, Crash, after)  # type: ignore[attr-defined]
        life.crash.__enter__()  # type: ignore[attr-defined]
    while not all(peer(swarm, name).failures for name in names):
        await asyncio.sleep(0.001)
    for name in names:
        life = peer(swarm, name)
        assert isinstance(life.failures.pop(), Crash)
        await life.kill()
    await asyncio.gather(*(swarm.add(name) for name in names))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", ["b", "abc"])
@pytest.mark.parametrize(("step", "after"), [("chain", False), ("chain", True), ("publish", True)])
def test_a_crash_between_certificate_and_state(folder: Path, names: str, step: str, after: bool) -> None:
    """Before the certificate, after it (before the state), and after both: the commit stands, for one and for all."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        newest = max(life.round for life in swarm.up)
        await crash_in(swarm, names, step, after)
        assert all(peer(swarm, name).round == newest + (step == "publish" or after) for name in names)
        await swarm.until_round(newest + 4)
        assert all(commit.certificate.kind == QUORUM for commit in commits(swarm)[1:])
        assert all(life.driver.core.state.own.incarnation <= 3 for life in swarm.up)
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play)


def test_a_state_without_its_certificate_is_none(folder: Path) -> None:
    """As if the state had been published first and the crash had come before the certificate."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        life = peer(swarm, "b")
        newest = life.round
        await life.kill()
        (folder / "b" / "chain" / f"{newest:08d}.commit").unlink()
        await swarm.add("b")
        await swarm.until_round(newest + 3)
        check_agreement(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("what", ["state", "chain", "votes"])
def test_a_disk_that_lost_a_part(folder: Path, what: str) -> None:
    """What is missing is fetched; who cannot stand by its votes votes no more in that incarnation."""

    async def play(swarm: MemorySwarm) -> None:
        recorder = Recorder(swarm)
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        life = peer(swarm, "b")
        await life.kill()
        shutil.rmtree(folder / "b" / what)
        await swarm.add("b")
        assert peer(swarm, "b").driver.core.state.own.incarnation > life.driver.core.state.own.incarnation
        await until(counts(swarm, "b"))
        recorder.check(commits(swarm))
        check_agreement(swarm)
        check_leases(swarm)

    in_swarm(folder, play, small_config("sync.merge_interval=5"))


@pytest.mark.parametrize("voted", ["for it", "on top of it"])
def test_a_damaged_round_is_fetched_again(folder: Path, voted: str) -> None:
    """Only what is damaged; so it can stand by what it has signed for, or voted on, and is who it was."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        life = peer(swarm, "b")
        await until(lambda: (life.votes.record.parent == life.driver.core.tip_hash) == (voted == "on top of it"))
        await life.kill()
        (folder / "b" / "state" / f"round-{life.round:08d}" / "block-00002.f32").write_bytes(b"cut short")
        await swarm.add("b")
        assert any("block-00002" in text for text in peer(swarm, "b").said)
        assert peer(swarm, "b").driver.core.state.own.incarnation == life.driver.core.state.own.incarnation
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)])
def test_a_damaged_certificate_is_taken_from_others_at_the_start(folder: Path, damaged: tuple[int, ...]) -> None:
    """The newest, the one before it, and both."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        life = peer(swarm, "b")
        await life.kill()
        paths = [folder / "b" / "chain" / f"{life.round - before:08d}.commit" for before in damaged]
        whole = [path.read_bytes() for path in paths]
        for path in paths:
            path.write_bytes(b"damaged")
        await asyncio.gather(*(peer(swarm, name).kill() for name in "ac"), swarm.kill_organiser())
        with pytest.raises(StateError, match=r"commit is damaged"):
            await swarm.add("b")
        await swarm.start_organiser()
        await asyncio.gather(swarm.add("a"), swarm.add("c"))
        await swarm.add("b")
        again = peer(swarm, "b")
        assert again.driver.core.state.own.incarnation == life.driver.core.state.own.incarnation
        for path, before in zip(paths, whole, strict=True):
            assert f"the certificate of round {int(path.stem)} was damaged" in "".join(again.said)
            assert unpack(Commit, path.read_bytes()).manifest == unpack(Commit, before).manifest
        await until(counts(swarm, "b"))
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_damaged_state_that_nobody_answers_for_is_not_left_for_an_older_one(folder: Path) -> None:
    """It may be the run's newest: only where others are on another history is it worth nothing."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        life = peer(swarm, "b")
        await asyncio.gather(*(peer(swarm, name).kill() for name in "abc"), swarm.kill_organiser())
        with open(life.store.version(life.round).block_path(0), "r+b") as file:
            file.write(b"damaged")
        with pytest.raises(TileDamaged, match="tile 0 "):
            await swarm.add("b")
        await swarm.start_organiser()

    in_swarm(folder, play)


def test_what_an_elector_signed_for_outlives_later_writes(folder: Path) -> None:
    """A slice that arrives after the vote goes elsewhere; the state that was accepted stays whole."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        life = peer(swarm, "b")
        while not life.votes.record.contents or life.votes.record.parent != life.driver.core.tip_hash:
            await asyncio.sleep(0.001)
        manifest = life.votes.record.contents[0].manifest
        bench = life.driver._candidate
        bench.open()
        bench.write(0, [b"\1" * 4 * swarm.layout.tiles[0].size])
        assert bench.finished(manifest.state_root) is not None
        bench.compute(None)
        bench.open()
        bench.write(0, [b"\2" * 4 * swarm.layout.tiles[0].size])
        assert bench.finished(manifest.state_root) is not None
        await swarm.until_round(4)
        check_agreement(swarm)

    in_swarm(folder, play)


def test_a_state_that_training_takes_up_in_the_moment_of_a_commit_stays(folder: Path) -> None:
    """Before the commit it was pending behind another one, and nobody's; after a catch-up nothing else keeps it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        a = peer(swarm, "a")
        held, taken = a.round, False
        real = a.applied

        def applied(event: Any) -> None:
            nonlocal taken
            taken = event.commit.manifest.round >= held + 3
            real(event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a, "rounds_in_use", lambda: frozenset({held}) if taken or a.round < held + 2 else frozenset())
            patch.setattr(a, "applied", applied)
            await swarm.until_round(held + 3)
            await until(lambda: held + 1 not in a.store.rounds())
            assert held in a.store.rounds()

    in_swarm(folder, play)


def test_a_full_disk_costs_no_state_that_is_just_being_committed(folder: Path) -> None:
    """What is dropped to make room is chosen by the tip; a commit may be under way in another thread."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        a = peer(swarm, "a")
        real, seen = a.driver._committer._applied, list[bool]()

        async def applied(commit: Commit, first: Manifest) -> None:
            """The state is published; the state machine stands on the one before."""
            if not seen:
                a.driver._dispatcher.disk_is_full(StorageFull("no room"))
                await asyncio.sleep(0.1)
                seen.append(commit.manifest.round in a.store.rounds())
            await real(commit, first)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a.driver._committer, "_applied", applied)
            await until(lambda: bool(seen))
        assert seen == [True]
        await swarm.until_round(a.round + 3)
        assert not a.failures

    in_swarm(folder, play)


def test_nothing_is_encoded_against_the_state_of_another_history(folder: Path) -> None:
    """The other history's state is in the place of ours a moment before the state machine stands on it."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        a = peer(swarm, "a")
        head, ours = a.driver.core.tip_hash, a.store.version(a.round)
        assert a.driver._context.committed(head) is ours
        staging = a.store.stage(ours.round, None, "theirs", ours)
        staging.write_state(0, bytes(4 * ours.layout.tiles[0].size))
        staging.finish()
        staging.publish()
        assert a.driver._context.committed(head) is None

    in_swarm(folder, play)
