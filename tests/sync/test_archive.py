"""A run outlives the moment in which all of its peers are gone: the bootstrap node keeps the newest state."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest

from spes_p2p.config.schema import Config
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import QUORUM, RENEWAL, Ballots, Commit, Intent, Status, Work
from spes_p2p.consensus.renewing import MOST_ROUNDS_BACK
from spes_p2p.errors import NetworkError, PeerSilent, RemoteProtocolError, StorageFull
from spes_p2p.exchange.transfers import FewStreams
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.state.store import Staging, StateStore
from spes_p2p.swarm.memory_backend import MemoryTransport
from spes_p2p.sync.catch_up import CatchUp, Fetched
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organising.seat import drop_damaged
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.sync.starting import zeros
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER as ORGANISER_ID
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer, PretendWork
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import check_agreement, check_leases, commits, in_swarm, small_config, until

T = TypeVar("T")


def with_archive(
    folder: Path, play: Callable[[MemorySwarm], Awaitable[T]], config: Config | None = None, archive: bool = True
) -> T:
    return in_swarm(folder, play, config or small_config("swarm.heartbeat_seconds=0.2"), archive=archive)


async def evening(swarm: MemorySwarm, rounds: int = 3) -> Commit:
    """Three peers train, the archive has what they have, and then all are gone at once. The newest commit."""
    await swarm.start(["a", "b", "c"])
    await swarm.until_round(rounds)
    await until(lambda: is_archived(swarm))
    newest = commits(swarm)[-1]
    for name in "abc":
        await swarm.peers[PeerId(name)].kill()
    return newest


async def behind(swarm: MemorySwarm) -> Commit:
    """An evening on which the archive could not get the last rounds. The newest commit, which it knows."""
    await swarm.start(["a", "b", "c"])
    await swarm.until_round(3)
    await until(lambda: is_archived(swarm))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catching_up(swarm), "state", never)
        await swarm.until_round(swarm.up[0].round + 2)
        await until(lambda: knows_newest(swarm))
        for name in "abc":
            await swarm.peers[PeerId(name)].kill()
        newest = swarm.organiser.chain.newest
        assert newest is not None
    return newest


def catching_up(swarm: MemorySwarm) -> CatchUp:
    """What fetches for the archive."""
    assert swarm.seat.driver is not None
    return swarm.seat.driver._catching_up


async def never(*given: object, **named: object) -> NoReturn:
    raise PeerSilent("no tile comes")


async def left_with_a_certificate(swarm: MemorySwarm) -> PretendPeer:
    """Of three peers `c` alone is left: it and the node know a commit, and its state went down with the others."""
    await swarm.start("abc", PretendWork(step_seconds=0.8))
    await swarm.until_round(2)
    await until(lambda: is_archived(swarm))
    last = swarm.peers[PeerId("c")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catching_up(swarm), "state", never)
        patch.setattr(last.driver._fetchers.urgent, "tiles", never)
        async with asyncio.timeout(60.0):
            while last.driver.core.state.round.decided is None or swarm.organiser.chain.length <= last.round + 1:
                await asyncio.sleep(0.01)
        for name in "ab":
            await swarm.peers[PeerId(name)].kill()
    return last


def knows_newest(swarm: MemorySwarm) -> bool:
    """Whether the node has a certificate of the newest manifest."""
    newest = swarm.organiser.chain.newest
    return newest is not None and newest.manifest == commits(swarm)[-1].manifest


def is_archived(swarm: MemorySwarm) -> bool:
    """Whether the archive has the state on which all stand."""
    archived = swarm.seat.kept
    return archived is not None and all(archived == peer.driver.core.tip for peer in swarm.up)


def test_the_archive_keeps_the_newest_state_and_nothing_else(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        for round in range(1, 6):
            await swarm.until_round(round)
            await until(lambda: is_archived(swarm))
        newest = swarm.seat.kept
        assert newest is not None
        await swarm.kill_organiser()
        store = StateStore(folder / "organiser" / "state", swarm.layout)
        assert store.rounds() == (0, newest.round - 1, newest.round)
        store.version(newest.round).verify()
        assert store.version(newest.round).root == newest.state_root
        store.close()
        await swarm.start_organiser()

    with_archive(folder, play)


def test_new_peers_go_on_in_the_morning(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await asyncio.sleep(20.0)
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(newest.manifest.round + 4, ["d", "e"])
        chain = commits(swarm, "d")
        assert chain[newest.manifest.round].manifest == newest.manifest
        first = chain[newest.manifest.round + 1]
        assert first.certificate.kind == RENEWAL
        assert first.manifest.state_root == newest.manifest.state_root
        assert {member.peer for member in electors(first.manifest.members)} <= {"d", "e"}
        assert {member.peer for member in chain[-1].manifest.members} == {"d", "e"}
        assert {commit.certificate.kind for commit in chain[newest.manifest.round + 2 :]} == {QUORUM}
        assert {entry.peer for entry in chain[-1].manifest.roster} == {"d", "e"}
        check_agreement(swarm)
        check_leases(swarm)

    with_archive(folder, play)


def test_one_newcomer_goes_on_alone_after_a_second_wait(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await swarm.add("d")
        await swarm.until_round(newest.manifest.round + 2, ["d"])
        assert [member.peer for member in commits(swarm, "d")[-1].manifest.members] == ["d"]
        late = await swarm.add("e")
        await until(late.driver.core.state.is_member)
        check_agreement(swarm)

    with_archive(folder, play)


def test_a_former_peer_with_a_lost_disk_is_as_good_as_a_new_one(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        swarm.lose_disk("a")
        await swarm.add("a")
        await swarm.until_round(newest.manifest.round + 2, ["a"])
        assert commits(swarm, "a")[newest.manifest.round + 1].certificate.kind == RENEWAL

    with_archive(folder, play)


def test_electors_that_come_back_need_no_organiser(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await swarm.add("d")
        for name in "ab":
            await swarm.add(name)
        await swarm.until_round(newest.manifest.round + 4)
        kinds = {commit.certificate.kind for commit in commits(swarm, "d")[newest.manifest.round :]}
        assert RENEWAL not in kinds
        assert {member.peer for member in commits(swarm)[-1].manifest.members} >= {"a", "b", "d"}
        check_agreement(swarm)

    with_archive(folder, play)


def test_an_elector_that_comes_back_later_joins_what_goes_on(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(newest.manifest.round + 3, ["d", "e"])
        back = await swarm.add("a")
        await until(back.driver.core.state.is_member)
        await until(lambda: back.round > newest.manifest.round + 3)
        check_agreement(swarm)

    with_archive(folder, play)


def test_the_archive_goes_on_after_a_restart(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await swarm.kill_organiser()
        await asyncio.sleep(10.0)
        await swarm.start_organiser()
        await until(lambda: swarm.seat.kept == newest.manifest)
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(newest.manifest.round + 2, ["d", "e"])
        await until(lambda: is_archived(swarm))
        check_agreement(swarm)

    with_archive(folder, play)


def test_a_copy_of_its_folder_brings_the_run_back_when_all_machines_are_gone(folder: Path) -> None:
    """As docs/bootstrap-node.md has rclone make it, while the run goes on."""

    async def play(swarm: MemorySwarm) -> None:
        own, copy, leave_out = folder / ORGANISER_ID, folder / "bucket", shutil.ignore_patterns("staging-*", "lock")
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await until(lambda: is_archived(swarm))
        for part in ("state", "chain"):
            shutil.copytree(own / part, copy / part, ignore=leave_out)
        copied = commits(swarm)[-1].manifest
        await swarm.until_round(copied.round + 2)
        for name in "abc":
            await swarm.peers[PeerId(name)].kill()
        await swarm.kill_organiser()
        shutil.rmtree(own)
        copy.rename(own)
        await swarm.start_organiser()
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(copied.round + 3, ["d", "e"])
        chain = commits(swarm, "d")
        assert chain[copied.round].manifest == copied
        assert chain[copied.round + 1].certificate.kind == RENEWAL

    with_archive(folder, play)


def test_what_is_damaged_in_the_archive_is_not_given_to_anybody(folder: Path) -> None:
    """The state before it is here still."""

    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        await swarm.kill_organiser()
        block = folder / "organiser" / "state" / f"round-{newest.manifest.round:08d}" / "block-00000.f32"
        block.write_bytes(bytes([block.read_bytes()[0] ^ 1]) + block.read_bytes()[1:])
        await swarm.start_organiser()
        await swarm.add("d")
        await swarm.until_round(newest.manifest.round + 2, ["d"])
        assert any("archive: " in text and "block-00000" in text for text in swarm.organiser_said)
        chain = commits(swarm, "d")
        renewed = chain[newest.manifest.round + 1].manifest
        assert renewed.state_root == chain[newest.manifest.round - 1].manifest.state_root
        check_agreement(swarm)

    with_archive(folder, play)


def test_an_archive_that_begins_with_another_first_state_gets_the_newest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one of a mirror that comes late: zeros stand in where a run began with given values."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        monkeypatch.setattr(swarm, "_start", zeros)
        mirror = await swarm.add_mirror("m", [])
        await until(lambda: bool(swarm.server_failures) or mirror.seat.kept is not None)
        assert not swarm.server_failures
        assert mirror.seat.kept is not None
        assert mirror.seat.kept.round >= 2

    with_archive(folder, play)


def test_of_what_an_archive_has_at_its_start_what_is_whole_and_committed_stays(tmp_path: Path) -> None:
    """And the first, whatever it is: there must be one."""
    made, said = MadeRun(), list[str]()
    store, chain = StateStore(tmp_path / "state", made.layout), Chain(tmp_path / "chain")

    def made_state(round: int) -> Hash:
        return store.create_initial(lambda tile: np.full(tile.size, round, np.float32), round).root

    made_state(0)
    chain.append(made.genesis(sha256(b"another first state")))
    for round in range(1, 4):
        root = made_state(round)
        root = sha256(b"of another history") if round == 3 else root
        before = chain.commit(round - 1).manifest
        chain.append(made.certified(made.child(before, root, sha256(b"wire"))))
    block = store.version(2).block_path(0)
    block.write_bytes(b"damaged" + block.read_bytes()[7:])
    drop_damaged(store, chain, said.append)
    assert store.rounds() == (0, 1)
    assert [text for text in said if "block-00000" in text] == said[:1]
    store.close()


def test_a_round_whose_state_nobody_has_is_left_and_its_tokens_are_told(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await behind(swarm)
        kept = swarm.seat.kept
        assert kept is not None
        await swarm.add("d")
        await swarm.until_round(newest.manifest.round + 2, ["d"])
        renewed = commits(swarm, "d")[kept.round + 1]
        assert renewed.certificate.kind == RENEWAL
        assert renewed.manifest.state_root == kept.state_root
        lost = newest.manifest.tokens - kept.tokens
        assert any(f"{lost:,} tokens are left" in text for text in swarm.organiser_said)
        check_agreement(swarm)

    with_archive(folder, play)


def test_a_former_peer_that_comes_back_in_time_saves_the_lost_round(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await behind(swarm)
        await swarm.add("d")
        await swarm.add("a")
        await swarm.until_round(newest.manifest.round + 3)
        chain = commits(swarm, "d")
        assert chain[newest.manifest.round].manifest == newest.manifest
        assert chain[newest.manifest.round + 1].certificate.kind == RENEWAL  # it alone is no quorum
        check_agreement(swarm)

    with_archive(folder, play)


async def claim_to_be_further(swarm: MemorySwarm, round: int) -> None:
    """Says so to the organiser for ever, each time under another key."""
    for number in itertools.count():
        await asyncio.sleep(0.5)
        if swarm.seat.driver is None:
            continue
        name, own = PeerId(f"key {number}"), swarm.seat.driver.core.state.own
        head, intent = sha256(name.encode()), Intent(joining=True)
        said = Status(swarm.info.fingerprint, name, 1, 1, round, head, Work(), intent, Ballots(), life=1)
        peer = swarm.network.peer(name)
        envelope = Envelope(name, (KeySealer(peer.signer).seal(said),), answers=own.life)
        with contextlib.suppress(NetworkError, RemoteProtocolError):
            await peer.transport.call(ORGANISER_ID, pack(envelope), 1.0)


def test_fresh_keys_that_claim_to_be_further_put_a_renewal_off_for_a_while_only(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await evening(swarm)
        liars = asyncio.create_task(claim_to_be_further(swarm, newest.manifest.round + 5))
        late = await swarm.add("d")
        await until(lambda: late.round > newest.manifest.round, 100.0)
        liars.cancel()
        check_agreement(swarm)

    with_archive(folder, play)


def test_without_an_archive_the_newest_state_is_waited_for(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(MOST_ROUNDS_BACK + 3)
        await until(lambda: swarm.organiser.chain.length > MOST_ROUNDS_BACK + 3)
        for name in "abc":
            await swarm.peers[PeerId(name)].kill()
        newest = swarm.organiser.chain.length - 1
        late = await swarm.add("d")
        text = "nobody who is heard has the state of round"
        await until(lambda: any(text in said for said in swarm.organiser_said), 400.0)
        assert swarm.organiser.chain.length == newest + 1
        assert late.driver.core.state.others.told_round > MOST_ROUNDS_BACK > late.round == 0
        assert len(swarm.organiser_said) == len(set(swarm.organiser_said))
        await swarm.add("a")
        await swarm.until_round(newest + 2, ["a", "d"])

    with_archive(folder, play, archive=False)


def test_who_has_the_state_goes_on_without_an_archive(folder: Path) -> None:
    """The only one left was a member without a vote."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        late = await swarm.add("late")
        await until(late.driver.core.state.is_member)
        for name in "abc":
            await swarm.peers[PeerId(name)].kill()
        assert not late.driver.core.state.is_elector()
        stood = late.round
        await swarm.until_round(stood + 3, ["late"])
        assert commits(swarm, "late")[stood + 1].certificate.kind == RENEWAL
        check_agreement(swarm)

    with_archive(folder, play, archive=False)


def test_who_is_left_with_a_certificate_alone_goes_on_from_the_state_that_is_there(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        last = await left_with_a_certificate(swarm)
        known = last.driver.core.state.round.decided
        assert known is not None
        await until(lambda: last.round > known.manifest.round + 1, 3000.0)
        assert commits(swarm)[known.manifest.round].certificate.kind == RENEWAL
        assert not [notice for notice in last.notices if notice.kind in ("lost", "fork")]

    with_archive(folder, play)


def test_an_archive_that_fails_unexpectedly_tries_again_and_says_it_once(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        await until(lambda: is_archived(swarm))

        real = CatchUp.state

        async def fail(self: CatchUp, *given: Any) -> Fetched:
            if self._store is not swarm._organiser_store:
                return await real(self, *given)
            raise OSError(5, "Input/output error")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CatchUp, "state", fail)
            await swarm.until_round(swarm.up[0].round + 5)
        assert sum("Input/output error" in text for text in swarm.organiser_said) == 1
        await until(lambda: is_archived(swarm))

    with_archive(folder, play)


def test_a_full_disk_pauses_the_archive_with_one_warning(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(1)
        await until(lambda: is_archived(swarm))
        real = StateStore.stage

        def full(store: StateStore, *of: Any, **how: Any) -> Staging:
            if store.directory == folder / "organiser" / "state":
                raise StorageFull("no room", fix="free space")
            return real(store, *of, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateStore, "stage", full)
            await swarm.until_round(swarm.up[0].round + 6)
        assert [text for text in swarm.organiser_said if "no newer state is taken" in text] == [
            text for text in swarm.organiser_said if "no room" in text
        ]
        assert len([text for text in swarm.organiser_said if "no room" in text]) == 1
        await until(lambda: is_archived(swarm))
        assert sum("there is disk space again" in text for text in swarm.organiser_said) == 1

    with_archive(folder, play)


def test_the_archive_fetches_one_state_at_a_time_in_shares(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        under_way = most = 0
        asked: dict[str, int] = {}
        real = MemoryTransport.fetch

        async def counted(self: MemoryTransport, peer: PeerId, *rest: Any) -> tuple[bytes, memoryview]:
            nonlocal under_way, most
            if self.peer_id != ORGANISER_ID:
                return await real(self, peer, *rest)
            under_way += 1
            most, asked[peer] = max(most, under_way), asked.get(peer, 0) + 1
            try:
                return await real(self, peer, *rest)
            finally:
                under_way -= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryTransport, "fetch", counted)
            await swarm.start(["a", "b", "c"])
            await swarm.until_round(6)
            await until(lambda: is_archived(swarm))
        assert most <= FewStreams.PARALLEL + 1  # and one for headers
        assert set(asked) == {"a", "b", "c"}

    with_archive(folder, play)


def test_an_archive_of_one_machine_serves_a_newcomer_while_the_run_goes_on(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await until(lambda: is_archived(swarm))
        late = await swarm.add("late")
        await until(late.driver.core.state.is_member)
        check_agreement(swarm)
        assert {commit.certificate.kind for commit in commits(swarm)[1:]} == {QUORUM}

    with_archive(folder, play)


@pytest.mark.parametrize("archive", [True, False])
def test_who_looks_on_is_no_member_and_no_round_waits_for_it(folder: Path, archive: bool) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        before = swarm.clock.now()
        await swarm.until_round(6)
        usual = swarm.clock.now() - before
        swarm.network.kill(ORGANISER_ID, silent=True)
        await swarm.organiser.stop()
        before, round = swarm.clock.now(), swarm.up[0].round
        await swarm.until_round(round + 3)
        assert swarm.clock.now() - before < 1.5 * usual
        named = {member.peer for commit in commits(swarm) for member in commit.manifest.members}
        assert named == {"a", "b", "c"}
        assert {commit.certificate.kind for commit in commits(swarm)[1:]} == {QUORUM}

    with_archive(folder, play, archive=archive)


def test_certificates_come_while_an_older_state_is_on_its_way(folder: Path) -> None:
    """Else a run whose peers go meanwhile would be renewed on top of a manifest that is none of the newest."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await until(lambda: is_archived(swarm))
        fetching = catching_up(swarm)
        real, asked, go_on = fetching.state, asyncio.Event(), asyncio.Event()

        async def slow(*given: Any) -> Fetched:
            asked.set()
            await go_on.wait()
            return await real(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fetching, "state", slow)
            await asked.wait()
            stood = swarm.seat.kept
            await swarm.until_round(swarm.up[0].round + 4)
            await until(lambda: knows_newest(swarm))
            assert swarm.seat.kept == stood
            go_on.set()
        await until(lambda: is_archived(swarm))

    with_archive(folder, play)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("later", ["archive", "certificates"])
def test_a_member_that_only_looks_on_after_a_restart_stands_by_no_vote(folder: Path, later: str) -> None:
    """`--serve` was left out: the others go on without it as without any member that is gone."""

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await swarm.kill_organiser()
        swarm.serve, swarm.archive = False, later == "archive"
        await swarm.start_organiser()
        await until(lambda: ORGANISER_ID not in {member.peer for member in commits(swarm)[-1].manifest.members})
        await swarm.until_round(swarm.up[0].round + 3)
        assert swarm.seat.driver is not None
        assert not swarm.seat.driver.core.state.is_member()
        await until(lambda: knows_newest(swarm))
        assert (swarm.seat.kept is not None) == swarm.archive
        check_agreement(swarm)

    config = small_config("swarm.heartbeat_seconds=0.2")
    in_swarm(folder, play, config, serve=True)
