"""The in-memory network: the same promises as the real one, and every fault on demand, repeated by its seed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest

from spes_p2p.errors import LocalProtocolError, NetworkError, PeerClosed, PeerRefused, PeerSilent, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm import envelope
from spes_p2p.swarm.memory_backend import FakeKeys, MemoryNetwork, MemoryPeer
from spes_p2p.swarm.memory_links import LinkShape
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import peers_key
from spes_p2p.swarm.stream_server import StreamLimits
from tests.simulation.virtual_time import run_virtual, virtual

A, B = PeerId("anna"), PeerId("ben")
KEY = peers_key("run")
DATA = bytes(range(256)) * 8192  # 2 MiB


def whole(answer: tuple[bytes, memoryview]) -> tuple[bytes, bytes]:
    """What a fetch gave, to be compared."""
    return answer[0], bytes(answer[1])


class Echo:
    """Answers with what it got; refuses "no"; serves DATA, or as many bytes as the request says."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.serving = self.most_serving = 0
        self.pause_seconds = 0.0

    async def on_call(self, caller: PeerId, request: bytes) -> bytes:
        self.calls.append(request)
        await asyncio.sleep(self.pause_seconds)
        if request == b"no":
            raise RemoteProtocolError("not today")
        if request == b"bug":
            raise KeyError("a bug")
        return caller.encode() + b":" + request

    async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
        self.serving += 1
        self.most_serving = max(self.most_serving, self.serving)
        await asyncio.sleep(self.pause_seconds)
        self.serving -= 1
        if request == b"no":
            raise RemoteProtocolError("not today")
        return Blob(memoryview(DATA), b"head")


async def pair(network: MemoryNetwork) -> tuple[MemoryPeer, MemoryPeer, Echo]:
    echo = Echo()
    one, other = network.peer(A), network.peer(B)
    await other.transport.serve(echo)
    return one, other, echo


async def quietly(fetch: Awaitable[object]) -> None:
    with contextlib.suppress(NetworkError, RemoteProtocolError):
        await fetch


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_call_and_fetch() -> None:
    one, other, _ = await pair(MemoryNetwork())
    assert await one.transport.call(B, b"hello", 1.0) == b"anna:hello"
    assert whole(await one.transport.fetch(B, b"x", 1.0, 2**22)) == (b"head", DATA)
    assert one.transport.traffic.received == other.transport.traffic.sent == len(DATA) + len(b"anna:hello") + 1


@virtual
async def test_refusals_come_with_the_words_and_bugs_do_not_leak() -> None:
    one, _, _ = await pair(MemoryNetwork())
    with pytest.raises(RemoteProtocolError, match="ben refused: not today"):
        await one.transport.call(B, b"no", 1.0)
    with pytest.raises(RemoteProtocolError, match="ben refused: not today"):
        await one.transport.fetch(B, b"no", 1.0, 2**22)
    with pytest.raises(RemoteProtocolError, match="the handler failed"):
        await one.transport.call(B, b"bug", 1.0)
    with pytest.raises(LocalProtocolError):
        await one.transport.call(B, bytes(3 * 2**20), 1.0)


@virtual
async def test_a_blob_that_is_too_large_is_refused_before_it_is_sent() -> None:
    one, other, _ = await pair(MemoryNetwork())
    with pytest.raises(RemoteProtocolError, match="2097152 bytes"):
        await one.transport.fetch(B, b"x", 1.0, 1000)
    assert other.transport.traffic.sent == 0


@virtual
async def test_dead_frozen_and_silent_peers_are_told_apart() -> None:
    network = MemoryNetwork()
    one, _, echo = await pair(network)
    network.freeze(B)
    with pytest.raises(PeerSilent):
        await one.transport.call(B, b"late", 1.0)
    assert not await one.transport.check_refused(B)
    network.thaw(B)
    assert await one.transport.call(B, b"x", 1.0) == b"anna:x"
    assert echo.calls == [b"late", b"x"]  # what was sent to a frozen process arrives when it wakes
    network.kill(B)
    with pytest.raises(PeerRefused):
        await one.transport.call(B, b"x", 1.0)
    with pytest.raises(PeerRefused):
        await one.transport.fetch(B, b"x", 1.0, 2**22)
    assert await one.transport.check_refused(B)
    network.kill(B, silent=True)
    with pytest.raises(PeerSilent):
        await one.transport.call(B, b"x", 1.0)
    assert not await one.transport.check_refused(B)


@virtual
async def test_a_kill_in_the_middle_of_a_call_is_a_closed_one() -> None:
    network = MemoryNetwork()
    one, _, echo = await pair(network)
    echo.pause_seconds = 10.0
    asyncio.get_running_loop().call_later(1.0, network.kill, B)
    with pytest.raises(PeerClosed):
        await one.transport.call(B, b"x", 60.0)
    assert now() < 2.0


@virtual
async def test_a_restarted_peer_answers_again_and_its_old_self_cannot() -> None:
    network = MemoryNetwork()
    one, old, _ = await pair(network)
    new = network.restart(B)
    with pytest.raises(PeerClosed, match="does not serve requests yet"):
        await one.transport.call(B, b"x", 1.0)
    await new.transport.serve(Echo())
    assert await one.transport.call(B, b"x", 1.0) == b"anna:x"
    with pytest.raises(LocalProtocolError):
        await old.transport.call(A, b"x", 1.0)


@virtual
async def test_a_peer_that_serves_no_more_has_refused_nothing() -> None:
    class Leaving(Echo):
        async def on_call(self, caller: PeerId, request: bytes) -> bytes:
            raise PeerClosed("this peer is shutting down")

    one, two, _ = await pair(MemoryNetwork())
    await two.transport.serve(Leaving())
    with pytest.raises(PeerClosed, match="does not serve requests"):
        await one.transport.call(B, b"x", 1.0)


@virtual
async def test_partitions_silence_and_heal() -> None:
    network = MemoryNetwork()
    one, _, echo = await pair(network)
    network.partition(["anna"], ["ben"])
    with pytest.raises(PeerSilent):
        await one.transport.call(B, b"x", 2.0)
    assert now() == pytest.approx(2.0)
    assert not await one.transport.check_refused(B)
    network.heal()
    await one.transport.call(B, b"y", 1.0)
    assert echo.calls == [b"y"]


@virtual
async def test_a_cut_stream_is_resumed_where_it_ended() -> None:
    network = MemoryNetwork()
    one, _, _ = await pair(network)
    for place in (1_000_000, 500_000, 3):
        network.cut_stream("ben", after_bytes=place)
    assert whole(await one.transport.fetch(B, b"x", 1.0, 2**22)) == (b"head", DATA)
    assert one.transport.traffic.received == len(DATA)  # nothing was sent for twice
    network.cut_stream("ben", after_bytes=100, times=5)
    with pytest.raises(PeerClosed):
        await one.transport.fetch(B, b"x", 1.0, 2**22)


@virtual
async def test_a_stall_ends_a_stream_and_a_slow_one_goes_on() -> None:
    network = MemoryNetwork()
    network.set_link("ben", None, LinkShape(bytes_per_second=100_000))
    one, _, _ = await pair(network)
    await one.transport.fetch(B, b"x", 5.0, 2**22)
    assert 20 < now() < 25  # 2 MiB at 100 kB/s, with a time-out for each pause of 5 s only
    asyncio.get_running_loop().call_later(5.0, network.freeze, "ben")
    with pytest.raises(PeerSilent, match="sent no byte for 5 s"):
        await one.transport.fetch(B, b"x", 5.0, 2**22)


@virtual
async def test_streams_wait_in_line_and_say_so() -> None:
    network = MemoryNetwork()
    one, other, echo = await pair(network)
    other.transport._limits = StreamLimits(max_streams=2, max_streams_per_peer=2, max_waiting=2)
    await other.transport.serve(echo)
    echo.pause_seconds = 4.0
    fetches = [asyncio.create_task(one.transport.fetch(B, b"x", 5.0, 2**22)) for _ in range(5)]
    outcomes = await asyncio.gather(*fetches, return_exceptions=True)
    assert [isinstance(outcome, tuple) for outcome in outcomes].count(True) == 4
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert "too many streams" in str(refused)
    assert echo.most_serving == 2


@virtual
async def test_strangers_leave_places_to_members_however_many_they_are() -> None:
    network = MemoryNetwork()
    member, server, echo = await pair(network)
    await server.transport.serve(echo, lambda peer: peer == A)
    echo.pause_seconds = 1000.0
    crowd = [network.peer(f"stranger {number}") for number in range(20)]
    for stranger in crowd:
        for patient in (False, True):
            for _ in range(20):
                stranger.spawn(quietly(stranger.transport.fetch(B, b"x", 5.0, 2**22, patient)))
    await asyncio.sleep(3.0)
    assert echo.serving == server.transport._limits.max_strangers
    began = now()
    with pytest.raises(RemoteProtocolError, match="too many streams are waiting"):
        await crowd[-1].transport.fetch(B, b"x", 5.0, 2**22)  # it has as many as the others by now
    assert now() - began < 0.2  # at once
    echo.pause_seconds = 0.0
    for patient in (False, True):
        assert whole(await member.transport.fetch(B, b"x", 5.0, 2**22, patient)) == (b"head", DATA)
    assert now() - began < 1.0
    for peer in (*crowd, server):
        peer.stop()


@pytest.mark.parametrize("are_members", [False, True])
@virtual
async def test_slow_readers_give_their_places_up_to_who_waits_and_still_get_everything(are_members: bool) -> None:
    network = MemoryNetwork()
    other, server, echo = await pair(network)
    await server.transport.serve(echo, lambda peer: are_members or peer == A)
    slow = [network.peer(f"slow {number}") for number in range(4)]
    for peer in slow:
        network.set_link(B, peer.peer_id, LinkShape(bytes_per_second=60_000.0))
    slow_fetches = [
        asyncio.create_task(peer.transport.fetch(B, b"x", 60.0, 2**22, patient))
        for peer in slow
        for patient in [False] * 4 + [True] * 4
    ]
    await asyncio.sleep(1.0)
    newcomer = other if are_members else network.peer("newcomer")
    for patient in (False, True):
        began = now()
        assert whole(await newcomer.transport.fetch(B, b"x", 5.0, 2**22, patient)) == (b"head", DATA)
        assert now() - began < 120.0  # each of the slow ones needs 280 s
    assert {whole(answer) for answer in await asyncio.gather(*slow_fetches)} == {(b"head", DATA)}
    assert server.transport._server is not None
    assert server.transport._server.lost > 0
    assert sum(peer.transport.traffic.received for peer in slow) == len(slow_fetches) * len(DATA)


@virtual
async def test_streams_that_are_cut_for_others_end_one_after_the_other() -> None:
    """All at the end would be too late for each: askers give up what takes too long."""
    network = MemoryNetwork()
    echo, server = Echo(), network.peer(B, StreamLimits(upload_bytes_per_second=64 * 2.0**10))
    await server.transport.serve(echo, lambda peer: False)
    done = dict.fromkeys((network.peer(f"newcomer {number}") for number in range(4)), 0)

    async def fetch(peer: MemoryPeer) -> None:
        await peer.transport.fetch(B, b"x", 60.0, 2**22, patient=True)
        done[peer] += 1

    for peer in done:
        for _ in range(8):
            peer.spawn(fetch(peer))
    await asyncio.sleep(512.0)  # half of what all of it takes
    assert server.transport._server is not None
    assert server.transport._server.lost > 0
    assert all(count > 1 for count in done.values())
    for peer in (*done, server):
        peer.stop()


@pytest.mark.parametrize("are_members", [False, True])
@virtual
async def test_a_few_askers_that_fill_the_line_keep_nobody_out(are_members: bool) -> None:
    network = MemoryNetwork()
    newcomer, server, echo = await pair(network)
    await server.transport.serve(echo, lambda peer: are_members)
    echo.pause_seconds = 10.0
    greedy = [network.peer(f"greedy {number}") for number in range(5 if are_members else 3)]
    refusals: list[str] = []

    async def insist(peer: MemoryPeer) -> None:
        while True:
            try:
                await peer.transport.fetch(B, b"x", 60.0, 2**22)
            except (NetworkError, RemoteProtocolError) as error:  # also where it waited and made room for another
                refusals.append(str(error))
            await asyncio.sleep(5.0)

    for peer in greedy:
        for _ in range(server.transport._limits.max_open_per_peer):
            peer.spawn(insist(peer))
    await asyncio.sleep(15.0)
    began = now()
    answers = await asyncio.gather(*(newcomer.transport.fetch(B, b"x", 60.0, 2**22) for _ in range(4)))
    assert {whole(answer) for answer in answers} == {(b"head", DATA)}
    assert now() - began < 60.0
    assert refusals
    assert all("too many streams are waiting" in text for text in refusals)
    for peer in greedy:
        peer.stop()


@virtual
async def test_who_reads_slowly_keeps_its_place_while_nobody_else_wants_it() -> None:
    network = MemoryNetwork()
    network.set_link(B, None, LinkShape(bytes_per_second=60_000.0))
    one, server, _ = await pair(network)
    fetches = [one.transport.fetch(B, b"x", 60.0, 2**22) for _ in range(12)]
    assert {whole(answer) for answer in await asyncio.gather(*fetches)} == {(b"head", DATA)}
    assert server.transport._server is not None
    assert server.transport._server.lost == 0


@virtual
async def test_a_stranger_that_reads_slowly_makes_no_uplink_look_slow() -> None:
    network = MemoryNetwork()
    network.set_link(B, A, LinkShape(bytes_per_second=4 * 2.0**20))
    network.set_link(B, "stranger", LinkShape(bytes_per_second=10_000.0))
    member, server, echo = await pair(network)
    await server.transport.serve(echo, lambda peer: peer == A)
    stranger = network.peer("stranger")
    stranger.spawn(quietly(stranger.transport.fetch(B, b"x", 60.0, 2**22)))
    for _ in range(10):
        await asyncio.sleep(10.0)
        await member.transport.fetch(B, b"x", 5.0, 2**22)
    assert server.transport.traffic.meter.rate() == pytest.approx(4 * 2**20, rel=0.2)
    stranger.stop()


@virtual
async def test_one_asker_has_so_many_streams_open_and_the_others_are_served() -> None:
    network = MemoryNetwork()
    greedy, server, echo = await pair(network)
    other = network.peer("other")
    echo.pause_seconds = 1.0
    fetches = [asyncio.create_task(greedy.transport.fetch(B, b"x", 5.0, 2**22)) for _ in range(100)]
    await asyncio.sleep(0.5)
    refused = [fetch for fetch in fetches if fetch.done()]
    assert len(refused) == 100 - server.transport._limits.max_open_per_peer
    assert all("too many streams" in str(fetch.exception()) for fetch in refused)
    began = now()
    assert whole(await other.transport.fetch(B, b"x", 5.0, 2**22)) == (b"head", DATA)
    assert now() - began < 1.5
    answers = await asyncio.gather(*fetches, return_exceptions=True)
    assert sum(isinstance(answer, tuple) for answer in answers) == server.transport._limits.max_open_per_peer


@virtual
async def test_streams_that_ask_for_nothing_count_too_and_a_flood_of_them_is_closed_unread() -> None:
    network = MemoryNetwork()
    silent, server, _ = await pair(network)
    most = server.transport._limits.max_open_per_peer
    streams = [await silent.transport._open_stream(B) for _ in range(2 * most)]
    with pytest.raises(PeerClosed):
        await silent.transport.fetch(B, b"x", 5.0, 2**22)
    for stream in streams[most:]:
        stream.close()
    await asyncio.sleep(0.1)
    with pytest.raises(RemoteProtocolError, match="too many streams"):
        await silent.transport.fetch(B, b"x", 5.0, 2**22)
    await asyncio.sleep(server.transport._limits.stall_seconds)  # they are given up
    assert whole(await silent.transport.fetch(B, b"x", 5.0, 2**22)) == (b"head", DATA)
    await asyncio.sleep(1.0)  # until it is closed on their side
    assert not server.transport._server._open  # type: ignore[union-attr]


@virtual
async def test_who_asks_is_told_while_the_blob_is_made() -> None:
    """Reading and encoding take longer than a silence may, but not for ever."""
    network = MemoryNetwork()
    one, other, echo = await pair(network)
    echo.pause_seconds = 12.0
    assert whole(await one.transport.fetch(B, b"x", 2.0, 2**22)) == (b"head", DATA)
    other.transport._limits = StreamLimits(stall_seconds=5.0)
    await other.transport.serve(echo)
    with pytest.raises(RemoteProtocolError, match="could not be made in time"):
        await one.transport.fetch(B, b"x", 2.0, 2**22)


def test_losses_and_copies_are_drawn_from_the_seed() -> None:
    async def tries(seed: int) -> list[bytes | str]:
        network = MemoryNetwork(seed, LinkShape(loss=0.2, duplication=0.3))
        one, _, echo = await pair(network)
        outcomes: list[bytes | str] = []
        for index in range(60):
            try:
                outcomes.append(await one.transport.call(B, b"%d" % index, 1.0))
            except PeerSilent as error:
                outcomes.append(str(error))
        answered = sum(isinstance(outcome, bytes) for outcome in outcomes)
        assert answered < 60
        assert answered < len(echo.calls)  # some were carried out twice, or without the caller learning of it
        return [*outcomes, *echo.calls]

    first, again, other = (run_virtual(tries(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_signatures_bind_peer_key_and_data() -> None:
    keys = FakeKeys()
    signer, forger = keys.signer(A), FakeKeys(b"another secret").signer(A)
    signature = signer.sign(b"data")
    assert keys.verify(A, signer.public_key, b"data", signature)
    assert not keys.verify(A, signer.public_key, b"other", signature)
    assert not keys.verify(B, signer.public_key, b"data", signature)
    assert not keys.verify(A, forger.public_key, b"data", forger.sign(b"data"))
    assert not keys.verify(A, signer.public_key, b"data", b"")


@virtual
async def test_the_directory_keeps_one_record_a_peer_until_it_expires() -> None:
    network = MemoryNetwork()
    one, other, _ = await pair(network)
    await one.directory.publish(KEY, b"old", 3600.0)
    await one.directory.publish(KEY, b"new", 60.0)
    await other.directory.publish(KEY, b"ben's", 60.0)
    assert await other.directory.read(KEY) == {A: b"new", B: b"ben's"}
    network.kill(A)
    assert await other.directory.read(KEY) == {A: b"new", B: b"ben's"}
    await asyncio.sleep(100)
    assert await other.directory.read(KEY) == {A: b"new"}  # a shorter life does not undo a longer one
    with pytest.raises(LocalProtocolError):
        await other.directory.publish(KEY, b"x", 1e9)
    with pytest.raises(LocalProtocolError):
        await other.directory.publish(KEY, bytes(2**20), 60.0)


@virtual
async def test_forged_and_misplaced_records_are_dropped_and_counted() -> None:
    network = MemoryNetwork()
    one, other, _ = await pair(network)
    forged = envelope.seal(FakeKeys(b"another secret").signer(B), KEY, b"forged", 100.0)
    misplaced = envelope.seal(other.signer, peers_key("another"), b"misplaced", 100.0)
    endless = envelope.seal(other.signer, KEY, b"endless", 1e9)
    for data in (forged, misplaced, endless, b"junk"):
        one.directory.plant(KEY, B, data)
        assert await one.directory.read(KEY) == {}
        other.directory.store(KEY, B, data, 100.0)
    assert (one.directory.dropped, other.directory.dropped) == (4, 4)


@virtual
async def test_each_side_of_a_partition_sees_its_own_records_and_healing_merges_them() -> None:
    network = MemoryNetwork()
    one, other, _ = await pair(network)
    await other.directory.publish(KEY, b"before", 600.0)
    network.partition(["anna"], ["ben"])
    await other.directory.publish(KEY, b"after", 600.0)
    assert await one.directory.read(KEY) == {B: b"before"}
    network.heal()
    assert await one.directory.read(KEY) == {B: b"after"}
