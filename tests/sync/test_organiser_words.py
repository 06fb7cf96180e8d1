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
from spes_p2p.consensus.messages import Choice, DecayOrder
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm.hivemind_backend import RsaSigner
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.records import bounds_of, words_key
from spes_p2p.sync.organiser_words import (
    LOOK_SECONDS,
    MAX_BYTES,
    MOST_CHOICES,
    TTL_SECONDS,
    WORDS_FILE,
    Ending,
    OrganiserWatch,
    Words,
    checked,
    choice,
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
PARENT, ONE, TWO = sha256(b"parent"), sha256(b"one"), sha256(b"two")
GOOD, EARLIER = ending(RUN.info, 7, SEALER), ending(RUN.info, 5, SEALER)
FIRST, LATER = choice(RUN.info, PARENT, ONE, 10, SEALER), choice(RUN.info, PARENT, TWO, 11, SEALER)
SLOW, FAST = decay(RUN.info, 50, SEALER), decay(RUN.info, 20, SEALER)
ALL = together([GOOD, FIRST, LATER, SLOW])
OTHER_RUN = MadeRun(small_config("run.seed=9", peers=1)).info
check = RUN.keys.verify
MANY = Words(choices=tuple(choice(RUN.info, sha256(bytes([at])), ONE, at, SEALER).choices[0] for at in range(9)))


def posing(words: Words) -> Words:
    """As if the organiser had said it."""
    said = words.ending and replace(words.ending, author=ORGANISER)
    return Words(said, tuple(replace(signed, author=ORGANISER) for signed in words.choices))


def altered(words: Words) -> Words:
    """Another content under the same signature."""
    (signed,) = words.choices
    return Words(choices=(replace(signed, value=Choice(RUN.info.fingerprint, PARENT, TWO, 10)),))


FORGED = [
    ending(RUN.info, 7, OTHERS),
    posing(ending(RUN.info, 7, OTHERS)),
    Words(GOOD.ending and replace(GOOD.ending, value=Ending(RUN.info.fingerprint, 8))),
    ending(OTHER_RUN, 7, SEALER),
    choice(RUN.info, PARENT, ONE, 10, OTHERS),
    posing(choice(RUN.info, PARENT, ONE, 10, OTHERS)),
    altered(FIRST),
    choice(OTHER_RUN, PARENT, ONE, 10, SEALER),
    Words(GOOD.ending, choice(OTHER_RUN, PARENT, ONE, 10, SEALER).choices),
    decay(RUN.info, 50, OTHERS),
    decay(OTHER_RUN, 50, SEALER),
    Words(decay=SLOW.decay and replace(SLOW.decay, value=DecayOrder(RUN.info.fingerprint, 51))),
    MANY,
]


@pytest.mark.parametrize("forged", FORGED)
def test_what_the_organiser_has_not_signed_is_refused(forged: Words) -> None:
    assert checked(pack(ALL), RUN.info, check) == ALL
    with pytest.raises(RemoteProtocolError):
        checked(pack(forged), RUN.info, check)


def test_the_earliest_end_the_newest_choice_and_the_shortest_decay_count_in_any_order() -> None:
    for order in permutations([GOOD, EARLIER, FIRST, LATER, SLOW, FAST]):
        words = together(order)
        assert (words.last_round, words.children) == (5, {PARENT: TWO})
        assert words.decay == FAST.decay
        assert words.has(FIRST)


def test_only_so_many_choices_are_kept_and_the_newest_stay() -> None:
    words = Words().merged(MANY)
    assert len(words.choices) == MOST_CHOICES
    assert list(words.children) == [sha256(bytes([at])) for at in range(1, 9)]
    key, signature = b"k" * 300, b"s" * 256  # as RSA keys of 2048 bits have them
    long = [replace(signed, public_key=key, signature=signature, author=PeerId("Q" * 46)) for signed in words.choices]
    assert GOOD.ending is not None
    end = replace(GOOD.ending, public_key=key, signature=signature, author=PeerId("Q" * 46))
    assert SLOW.decay is not None
    fall = replace(SLOW.decay, public_key=key, signature=signature, author=PeerId("Q" * 46))
    assert len(pack(Words(end, tuple(long), fall))) < MAX_BYTES


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
        told = dict[str, list[tuple[int | None, dict[Hash, Hash]]]]()
        watches = []

        def note(name: str, words: Words) -> None:
            told[name].append((words.last_round, words.children))

        for name in (A, B):
            told[name] = []
            directory = network.peer(name).directory
            path = tmp_path / f"{name}-{WORDS_FILE}"
            watches.append(OrganiserWatch(RUN.info, directory, check, partial(note, name), failed.append, path))
            await watches[-1].start()
        key = words_key(RUN.info.run_id)
        stranger = network.peer("stranger").directory
        await stranger.publish(key, b"noise", TTL_SECONDS)
        for at, forged in enumerate(FORGED[:-1]):
            await network.peer(f"liar{at}").directory.publish(key, pack(forged), TTL_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert told == {A: [], B: []}
        organiser = network.peer("organiser").directory
        for words in (GOOD, EARLIER, LATER, FIRST):
            await organiser.publish(key, pack(words), TTL_SECONDS)
            await asyncio.sleep(2 * LOOK_SECONDS)
        expected = [(7, {}), (5, {}), (5, {PARENT: TWO})]
        assert told == {A: expected, B: expected}
        await asyncio.sleep(3 * TTL_SECONDS)
        said = await read_words(stranger, RUN.info, check)
        assert set(said) == {A, B}
        assert together(said.values()).children == {PARENT: TWO}
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
            *(choice(RUN.info, sha256(bytes([at])), ONE, at, sealer) for at in range(MOST_CHOICES)),
        ]
    )
    bounds = bounds_of(words_key(RUN.info.run_id))
    assert bounds is not None
    assert len(longest.choices) == MOST_CHOICES
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
