"""Only the organiser's words count; everybody who hears of them repeats them; which counts is no accident."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from spes_p2p.consensus.membership import MAX_BANNED, MAX_VOUCHED
from spes_p2p.consensus.messages import DecayOrder
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.hivemind_backend import RsaSigner
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.records import bounds_of, words_key
from spes_p2p.sync.organiser_words import (
    LOOK_SECONDS,
    TTL_SECONDS,
    WORDS_FILE,
    Ending,
    OrganiserWatch,
    Words,
    checked,
    decay,
    ending,
    load_orders,
    read_words,
    roll,
    together,
)
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import ORGANISER, A, B, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun()
SEALER, OTHERS = KeySealer(RUN.keys.signer(ORGANISER)), KeySealer(RUN.keys.signer(A))
GOOD, EARLIER = ending(RUN.info, 7, SEALER), ending(RUN.info, 5, SEALER)
SLOW, FAST = decay(RUN.info, 50, SEALER), decay(RUN.info, 20, SEALER)
ALL = together([GOOD, SLOW])
OTHER_RUN = MadeRun(small_config("run.seed=9", peers=1)).info
check = RUN.keys.verify


def posing(words: Words) -> Words:
    """As if the organiser had said it."""
    said = words.ending and replace(words.ending, author=ORGANISER)
    return Words(said)


FORGED = [
    ending(RUN.info, 7, OTHERS),
    posing(ending(RUN.info, 7, OTHERS)),
    Words(GOOD.ending and replace(GOOD.ending, value=Ending(RUN.info.fingerprint, 8))),
    ending(OTHER_RUN, 7, SEALER),
    decay(RUN.info, 50, OTHERS),
    decay(OTHER_RUN, 50, SEALER),
    Words(decay=SLOW.decay and replace(SLOW.decay, value=DecayOrder(RUN.info.fingerprint, 51))),
]


@pytest.mark.parametrize("forged", FORGED)
def test_what_the_organiser_has_not_signed_is_refused(forged: Words) -> None:
    assert checked(pack(ALL), RUN.info, check) == ALL
    with pytest.raises(RemoteProtocolError):
        checked(pack(forged), RUN.info, check)


def test_the_earliest_end_and_the_shortest_decay_count_in_any_order() -> None:
    for order in permutations([GOOD, EARLIER, SLOW, FAST]):
        words = together(order)
        assert words.last_round == 5
        assert words.decay == FAST.decay
        assert words.has(GOOD)


def test_they_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "words"
    assert load_orders(path, RUN.info, check) == Words()
    path.write_bytes(pack(ALL))
    assert load_orders(path, RUN.info, check) == ALL
    assert load_orders(path, OTHER_RUN, check) == Words()
    path.write_bytes(b"damaged")
    assert load_orders(path, RUN.info, check) == Words()


def test_they_go_from_one_to_the_other_and_outlive_who_said_them_first(tmp_path: Path) -> None:
    async def main() -> None:
        network, failed = MemoryNetwork(), list[BaseException]()
        told = dict[str, list[int | None]]()
        watches = []

        def note(name: str, words: Words) -> None:
            told[name].append(words.last_round)

        for name in (A, B):
            told[name] = []
            directory = network.peer(name).directory
            path = tmp_path / f"{name}-{WORDS_FILE}"
            watches.append(OrganiserWatch(RUN.info, directory, check, partial(note, name), failed.append, path))
            await watches[-1].start()
        key = words_key(RUN.info.run_id)
        stranger = network.peer("stranger").directory
        await stranger.publish(key, b"noise", TTL_SECONDS)
        for at, forged in enumerate(FORGED):
            await network.peer(f"liar{at}").directory.publish(key, pack(forged), TTL_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert told == {A: [], B: []}
        organiser = network.peer("organiser").directory
        for words in (GOOD, EARLIER, GOOD):
            await organiser.publish(key, pack(words), TTL_SECONDS)
            await asyncio.sleep(2 * LOOK_SECONDS)
        assert told == {A: [7, 5], B: [7, 5]}
        await asyncio.sleep(3 * TTL_SECONDS)
        said = await read_words(stranger, RUN.info, check)
        assert set(said) == {A, B}
        assert together(said.values()).last_round == 5
        assert failed == []
        for watch in watches:
            await watch.stop()

    run_virtual(main())


def test_who_begins_knows_what_was_said_before_its_first_step(tmp_path: Path) -> None:
    async def main() -> None:
        network, told = MemoryNetwork(), list[Words]()
        await network.peer("organiser").directory.publish(words_key(RUN.info.run_id), pack(GOOD), TTL_SECONDS)
        directory = network.peer(A).directory
        watch = OrganiserWatch(RUN.info, directory, check, told.append, lambda error: None, tmp_path / WORDS_FILE)
        await watch.start()
        assert told == [GOOD]
        await watch.stop()

    run_virtual(main())


def test_the_longest_words_have_room_in_the_directory() -> None:
    sealer = KeySealer(RsaSigner(rsa.generate_private_key(65537, 2048)))
    names = [PeerId(f"Qm{number:044}") for number in range(MAX_VOUCHED + MAX_BANNED)]
    longest = together(
        [
            ending(RUN.info, 7, sealer),
            decay(RUN.info, 50, sealer),
            roll(RUN.info, Words(), sealer, vouched=names[:MAX_VOUCHED], banned=names[MAX_VOUCHED:]),
        ]
    )
    bounds = bounds_of(words_key(RUN.info.run_id))
    assert bounds is not None
    assert 8 * 2**10 < len(pack(longest)) <= bounds.record_bytes


def test_what_was_heard_is_told_again_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        network, told = MemoryNetwork(), list[Words]()
        for _ in range(2):
            directory = network.peer(A).directory
            watch = OrganiserWatch(RUN.info, directory, check, told.append, lambda error: None, tmp_path / WORDS_FILE)
            if not told:
                await network.peer("organiser").directory.publish(words_key(RUN.info.run_id), pack(ALL), TTL_SECONDS)
                await watch.look()
        assert told == [ALL, ALL]
        await asyncio.sleep(2 * TTL_SECONDS)
        await watch.look()
        assert set(await read_words(network.peer(B).directory, RUN.info, check)) == {A}

    run_virtual(main())
