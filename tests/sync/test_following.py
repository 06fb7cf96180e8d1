"""Whom a node without a state asks for headers: anybody can say that it is further."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import cast

from spes_p2p.consensus.forks import Standing, choose
from spes_p2p.consensus.messages import Ballots, Commit, Intent, Status, Work
from spes_p2p.errors import PeerSilent
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.ports import LoopClock
from spes_p2p.sync.catch_up import CatchUp
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organising.following import LONGEST_PAUSES, MOST_REMEMBERED, TRIES, Following
from spes_p2p.sync.tasks import Tasks
from spes_p2p.testing.virtual_time import run_virtual
from tests.sync.chains import A as MEMBER
from tests.sync.chains import MadeRun

RUN = MadeRun()
STRANGER = PeerId("stranger")
PAUSE_SECONDS = 10.0


class Silent:
    """Asked for headers, nobody gives any: each takes five seconds for that."""

    def __init__(self) -> None:
        self.asked: list[PeerId] = []
        self.given_up: list[PeerId] = []

    async def headers(self, tip_round: int, holder: PeerId, round: int) -> Commit:
        self.asked.append(holder)
        try:
            await asyncio.sleep(5.0)
        except asyncio.CancelledError:
            self.given_up.append(holder)
            raise
        raise PeerSilent(f"{holder} gave nothing")


def claim(peer: PeerId) -> Status:
    head = sha256(b"nowhere")
    return Status(RUN.info.fingerprint, peer, 1, 1, 10**9, head, Work(), Intent(joining=True), Ballots())


def following(folder: Path, headers: Silent) -> tuple[Following, Tasks]:
    chain = Chain(folder)
    chain.append(RUN.chain(1)[0])
    tasks = Tasks(lambda error: None)
    way = partial(choose, standing=Standing(may_take=True, final_rounds=20))
    made = Following(
        chain, cast(CatchUp, headers), tasks, lambda: None, lambda text: None, LoopClock(), PAUSE_SECONDS, way
    )
    return made, tasks


def test_a_member_is_asked_in_the_place_of_a_stranger(tmp_path: Path) -> None:
    async def main() -> None:
        headers = Silent()
        follow, tasks = following(tmp_path, headers)
        follow.hear(claim(STRANGER))
        await asyncio.sleep(1.0)
        follow.hear(claim(MEMBER))
        follow.hear(claim(PeerId("another stranger")))
        await asyncio.sleep(1.0)
        follow.hear(claim(STRANGER))
        assert (headers.asked, headers.given_up) == ([STRANGER, MEMBER], [STRANGER])
        await tasks.stop()

    run_virtual(main(), 100.0)


def test_strangers_are_believed_less_and_less_and_members_as_before(tmp_path: Path) -> None:
    async def main() -> None:
        headers = Silent()
        follow, tasks = following(tmp_path, headers)
        for peer, pauses in ((MEMBER, [1, 1, 1, 1]), (STRANGER, [1, 2, 4, 8])):
            for tries, pause in enumerate(pauses, start=1):
                follow.hear(claim(peer))
                await asyncio.sleep(5.5 + pause * PAUSE_SECONDS - 1.0)
                assert follow.doubts(peer)
                await asyncio.sleep(1.0)
                assert not follow.doubts(peer)
                assert follow.is_hollow(peer) == (peer == STRANGER and tries >= TRIES)
        for _ in range(8):
            follow.hear(claim(STRANGER))
            await asyncio.sleep(5.5 + LONGEST_PAUSES * PAUSE_SECONDS)
            assert not follow.doubts(STRANGER)
        await tasks.stop()

    run_virtual(main(), 1e6)


def test_of_thousands_of_strangers_few_are_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        follow, tasks = following(tmp_path, Silent())
        for number in range(2 * MOST_REMEMBERED):
            follow.hear(claim(PeerId(f"stranger {number}")))
            await asyncio.sleep(5.5)
        assert len(follow._in_vain) == MOST_REMEMBERED
        assert len(follow._paused) <= MOST_REMEMBERED
        await tasks.stop()

    run_virtual(main(), 1e6)
