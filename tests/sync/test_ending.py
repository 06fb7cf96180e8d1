"""Only the organiser ends a run; everybody who hears of it repeats it; the earliest end counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.records import ending_key
from spes_p2p.sync.ending import (
    LOOK_SECONDS,
    TTL_SECONDS,
    Ending,
    EndingWatch,
    SignedEnding,
    check_ending,
    keep_ending,
    load_ending,
    read_ending,
    sign_ending,
)
from spes_p2p.testing.virtual_time import run_virtual
from spes_p2p.wire import pack
from tests.sync.chains import ORGANISER, A, B, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun()
GOOD = sign_ending(RUN.info, 7, RUN.keys.signer(ORGANISER))
EARLIER = sign_ending(RUN.info, 5, RUN.keys.signer(ORGANISER))
OTHER_RUN = MadeRun(small_config("run.seed=9", peers=1)).info
check = RUN.keys.verify
FORGED = [
    sign_ending(RUN.info, 7, RUN.keys.signer(A)),
    replace(sign_ending(RUN.info, 7, RUN.keys.signer(A)), author=ORGANISER),
    replace(GOOD, ending=Ending(RUN.info.fingerprint, 8)),
    sign_ending(OTHER_RUN, 7, RUN.keys.signer(ORGANISER)),
]


@pytest.mark.parametrize("forged", FORGED)
def test_what_the_organiser_has_not_signed_is_refused(forged: SignedEnding) -> None:
    check_ending(GOOD, RUN.info, check)
    with pytest.raises(RemoteProtocolError):
        check_ending(forged, RUN.info, check)


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ending"
    assert load_ending(path, RUN.info, check) is None
    keep_ending(path, GOOD)
    assert load_ending(path, RUN.info, check) == GOOD
    assert load_ending(path, OTHER_RUN, check) is None
    path.write_bytes(b"damaged")
    assert load_ending(path, RUN.info, check) is None


def test_it_goes_from_one_to_the_other_and_outlives_who_said_it_first() -> None:
    async def main() -> None:
        network, told, failed = MemoryNetwork(), dict[str, list[int]](), list[BaseException]()
        watches = []

        def note(name: str, signed: SignedEnding) -> None:
            told[name].append(signed.ending.last_round)

        for name in (A, B):
            told[name] = []
            watches.append(
                EndingWatch(RUN.info, network.peer(name).directory, check, partial(note, name), failed.append)
            )
            await watches[-1].start()
        stranger = network.peer("stranger").directory
        await stranger.publish(ending_key(RUN.info.run_id), b"noise", TTL_SECONDS)
        await network.peer("liar").directory.publish(ending_key(RUN.info.run_id), pack(FORGED[0]), TTL_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert told == {A: [], B: []}
        await network.peer("organiser").directory.publish(ending_key(RUN.info.run_id), pack(GOOD), TTL_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        await network.peer("organiser").directory.publish(ending_key(RUN.info.run_id), pack(EARLIER), TTL_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert told == {A: [7, 5], B: [7, 5]}
        await asyncio.sleep(3 * TTL_SECONDS)
        assert await read_ending(stranger, RUN.info, check) == EARLIER
        assert failed == []
        for watch in watches:
            await watch.stop()

    run_virtual(main())


def test_one_that_was_kept_is_told_again_after_a_restart() -> None:
    async def main() -> None:
        network, told = MemoryNetwork(), list[SignedEnding]()
        watch = EndingWatch(RUN.info, network.peer(A).directory, check, told.append, lambda error: None, GOOD)
        await watch.look()
        assert told == [GOOD]
        assert await read_ending(network.peer(B).directory, RUN.info, check) == GOOD

    run_virtual(main())
