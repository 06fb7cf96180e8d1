"""What a DHT node keeps and reads, whoever writes: hivemind's own storage and search, without a network."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.dht.node import _SearchState
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.swarm import envelope
from spes_p2p.swarm.hivemind_backend import storage as storage_module
from spes_p2p.swarm.hivemind_backend.directory import EnvelopeValidator, HivemindDirectory
from spes_p2p.swarm.hivemind_backend.storage import MAX_KEYS, MOST_RECORDS, BoundedSerializer, bound
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.swarm.records import bounds_of, peers_key
from tests.simulation.virtual_time import virtual

ME, MEMBER = PeerId("me"), PeerId("member")
KEY = peers_key("tiny")
BOUNDS = bounds_of(KEY)
assert BOUNDS is not None
LARGE = bytes(BOUNDS.record_bytes)
FITTING = BOUNDS.strangers_bytes // BOUNDS.record_bytes - 1
"""Strangers with the largest records of whom all surely find room."""
MANY = [PeerId(f"stranger-{number}") for number in range(3 * FITTING)]


class Node:
    """The DHT's own protocol, bounded, with nobody to talk to."""

    def __init__(self) -> None:
        self.keys = FakeKeys()
        self.validator = EnvelopeValidator(self.keys)
        self.protocol = protocol = DHTProtocol(_initialized_with_create=True)
        protocol.storage, protocol.cache = DHTLocalStorage(), DHTLocalStorage()
        protocol.bucket_size, protocol.routing_table = 20, RoutingTable(DHTID(0), 20, 5)
        protocol.record_validator, protocol.node_info = self.validator, dht_pb2.NodeInfo()
        bound(protocol, self.validator, lambda peer: peer in (ME, MEMBER))

    def sealed(self, publisher: PeerId, value: bytes, end: float, key: str = KEY) -> bytes:
        return MSGPackSerializer.dumps(envelope.seal(self.keys.signer(publisher), key, value, end))

    async def store(
        self, publisher: PeerId, value: bytes = b"v", key: str = KEY, in_cache: bool = False, seconds: float = 60.0
    ) -> bool:
        """Asks as another node does."""
        end = time.time() + seconds
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(source=key).to_bytes()], subkeys=[MSGPackSerializer.dumps(publisher)],
            values=[self.sealed(publisher, value, end, key)], expiration_time=[end], in_cache=[in_cache],
        )  # fmt: skip
        answer = await self.protocol.rpc_store(request, None)
        return all(answer.store_ok)

    def kept(self, key: str = KEY) -> dict[PeerId, int]:
        found = self.protocol.storage.get(DHTID.generate(source=key))
        return {} if found is None else {peer: len(item.value) for peer, item in found.value.items()}

    def records(self, publishers: list[PeerId], value: bytes, end: float, key: str = KEY) -> DictionaryDHTValue:
        found = DictionaryDHTValue()
        with found.freeze():
            for publisher in publishers:
                found.store(publisher, self.sealed(publisher, value, end, key), end)
        return found


@pytest.fixture
def node() -> Node:
    return Node()


@virtual
async def test_strangers_fill_a_key_so_far_and_members_find_room_all_the_same(node: Node) -> None:
    took = [peer for peer in MANY if await node.store(peer, LARGE)]
    assert FITTING <= len(took) < FITTING + 2
    assert sum(node.kept().values()) <= BOUNDS.strangers_bytes  # type: ignore[union-attr]
    assert await node.store(MEMBER, LARGE)
    assert await node.store(ME, LARGE)
    assert await node.store(took[0], LARGE, seconds=120.0)  # who came first stays
    assert not await node.store(MANY[-1], LARGE)
    assert set(node.kept()) == {*took, MEMBER, ME}
    assert set(list(node.kept())[:2]) == {MEMBER, ME}  # for readers who know nobody


@virtual
async def test_strangers_begin_so_many_keys_and_members_begin_theirs_all_the_same(node: Node) -> None:
    took = [number for number in range(2 * MAX_KEYS) if await node.store(MANY[0], key=peers_key(f"run-{number}"))]
    assert len(took) == MAX_KEYS
    assert await node.store(MEMBER)
    assert await node.store(MANY[1])


@virtual
async def test_what_strangers_push_into_the_cache_hides_nothing(node: Node) -> None:
    await node.store(MEMBER)
    assert not await node.store(MANY[0], in_cache=True, seconds=3600.0)
    found = await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[DHTID.generate(source=KEY).to_bytes()]), None)
    assert set(dict(MSGPackSerializer.loads(found.results[0].value).items())) == {MEMBER}


@virtual
async def test_a_search_puts_nothing_into_the_storage(node: Node) -> None:
    await node.store(MEMBER)
    key = DHTID.generate(source=KEY)
    search = _SearchState(key, float("inf"), future=asyncio.get_running_loop().create_future())
    search.add_candidate(node.protocol.storage.get(key), DHTID(1))
    end = time.time() + 60.0
    search.add_candidate(ValueWithExpiration(node.records(MANY, b"v", end), end), DHTID(2))
    assert set(node.kept()) == {MEMBER}


def test_one_record_that_ended_on_its_way_spoils_no_answer_and_too_many_are_not_looked_at(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, now = DHTID.generate(source=KEY).to_bytes(), time.time()
    answer = node.records([MEMBER, MANY[0]], b"v", now + 60.0)
    with answer.freeze():
        answer.store(MANY[1], node.sealed(MANY[1], b"v", now - 0.1), now - 0.1)
    assert node.protocol._validate_dictionary(key, answer)
    assert {peer for peer, _ in answer.items()} == {MEMBER, MANY[0]}

    looked_at = []

    def validate(record: DHTRecord) -> bool:
        looked_at.append(record)
        return True

    monkeypatch.setattr(node.validator, "validate", validate)
    flood = node.records([*MANY, MEMBER], LARGE, now + 60.0)
    assert node.protocol._validate_dictionary(key, flood)
    assert MEMBER in {peer for peer, _ in flood.items()}
    assert len(looked_at) <= FITTING + 2


@virtual
async def test_members_that_are_too_many_are_bounded_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_KEY_BYTES", 2 * len(LARGE))
    assert await node.store(MEMBER, LARGE)
    assert not await node.store(ME, LARGE)


@virtual
async def test_a_reader_takes_members_and_whom_it_knew_before_others(node: Node) -> None:
    end = time.time() + 60.0
    publishers = [MANY[0]]

    async def get(key: str, latest: bool) -> ValueWithExpiration[Any]:
        values = {
            peer: ValueWithExpiration(envelope.seal(node.keys.signer(peer), KEY, LARGE, end), end)
            for peer in publishers
        }
        return ValueWithExpiration(values, end)

    daemon: Any = SimpleNamespace(require=lambda: None)
    directory = HivemindDirectory(
        SimpleNamespace(get=get), node.keys.signer(ME), node.keys, node.validator, daemon,
        lambda peer: asyncio.sleep(0), lambda peer: peer == MEMBER,
    )  # fmt: skip
    assert set(await directory.read(KEY)) == {MANY[0]}
    publishers[:] = [*reversed(MANY), MEMBER]
    read = set(await directory.read(KEY))
    assert {MANY[0], MEMBER} <= read
    assert FITTING <= len(read) < FITTING + 3
    assert set(await directory.read(KEY)) == read
    assert directory.dropped > FITTING


@virtual
async def test_what_a_node_keeps_is_not_sent_to_new_ids(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await node.store(MEMBER)
    monkeypatch.setattr(node.protocol, "call_store", lambda *arguments, **options: pytest.fail("it was sent"))
    node.protocol.node_id, node.protocol.num_replicas = DHTID.generate(source=KEY), 5
    for _ in range(10):
        await node.protocol.update_routing_table(DHTID.generate(), PeerID(os.urandom(34)))


def test_records_are_unpacked_as_hivemind_packs_them(node: Node) -> None:
    records = node.records([MEMBER, *MANY[:3]], b"value", 1e10)
    unpacked = BoundedSerializer.loads(MSGPackSerializer.dumps(records))
    assert isinstance(unpacked, DictionaryDHTValue)
    assert dict(unpacked.items()) == dict(records.items())
    assert unpacked.latest_expiration_time == 1e10
    assert BoundedSerializer.loads(MSGPackSerializer.dumps("name")) == "name"
    assert BoundedSerializer.loads(MSGPackSerializer.dumps(b"value")) == b"value"


def _packed(inner: object, code: int = 0x50) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(inner)))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"a": 1}),
        b"\x91" * 100_000,
        _packed([None, 1.0, []], code=0x40),
        _packed([None, 1.0]),
        _packed([None, 1.0, [["a", [b"nested"], 1.0]]]),
        _packed([None, 1.0, [["a", b"", "soon"]]]),
        _packed([None, 1.0, [["a", b"", 1.0]] * (MOST_RECORDS + 1)]),
        _packed([None, 1.0, [["a", b"", 1.0]]])[:-3],
    ],
)
def test_what_another_node_sent_unpacks_to_records_or_to_nothing(bad: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        BoundedSerializer.loads(bad)
