"""Bounds what one DHT node stores for others, answers them and accepts from them; hivemind takes all that is signed.

A reader gets all records of a key in one message, so the records under a key must stay small, whoever writes them.
There is always room for members of our run, whatever strangers have written; among strangers, the first ones stay.
Records come from their publishers alone, who renew them several times a minute: no node passes on what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, BinaryDHTValue, Subkey
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.swarm import envelope
from spes_p2p.swarm.calls import Weigh
from spes_p2p.swarm.hivemind_backend.directory import EnvelopeValidator, plain
from spes_p2p.swarm.records import bounds_of

MAX_KEY_BYTES = 12 * 2**20
"""Under one key, members included."""
MAX_KEYS = 64
"""More are begun for members alone; a run has four, one of them shared by all runs."""
MOST_RECORDS = 4096
"""Under one key in an answer of another node."""
MOST_ASKED_KEYS = 16
"""In one message; ours name one."""
MAX_ASKED_BYTES = 1024
FIND, STORE, PING = (f"DHTProtocol.rpc_{verb}" for verb in ("find", "store", "ping"))
IsOwnOrMember = Callable[[Subkey], bool]
"""Tells whether a publisher is this node itself or, as far as it knows, a member of its run."""


class BoundedStorage(DHTLocalStorage):
    """Takes checked envelopes (see EnvelopeValidator) while there is room under their key (`records.bounds_of`)."""

    def __init__(self, is_own_or_member: IsOwnOrMember) -> None:
        super().__init__()
        self._is_own_or_member = is_own_or_member

    def take_over(self, other: DHTLocalStorage) -> None:
        """Takes what `other` has."""
        for key, item in list(other.items()):
            if isinstance(item.value, DictionaryDHTValue):
                for subkey, kept in list(item.value.items()):
                    self.store_subkey(key, subkey, kept.value, kept.expiration_time)

    def store(self, key: DHTID, value: BinaryDHTValue, expiration_time: float, subkey: Subkey | None = None) -> bool:
        """False for what is under no subkey: none of ours is."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Subkey, value: BinaryDHTValue, expiration_time: float) -> bool:
        records = self._records(key)
        if not self._has_room(records, subkey, value) or not records.store(subkey, value, expiration_time):
            return False
        TimedStorage.store(self, key, records, records.latest_expiration_time)
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        """A copy of what is here: a search puts what others have into what it was given first.

        Members come first: a newcomer, who knows none, reads no more than so much.
        """
        found = super().get(key)
        if found is None:
            return None
        copy = DictionaryDHTValue()
        for subkey, kept in sorted(found.value.items(), key=lambda item: not self._is_own_or_member(item[0])):
            copy.store(subkey, kept.value, kept.expiration_time)
        return ValueWithExpiration(copy, found.expiration_time)

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]:
        """Nothing: hivemind would send all of it to whoever names a new id of a node."""
        return iter(())

    def bytes_under(self, key: DHTID) -> int:
        """What an answer to `key` has, about."""
        return sum(len(item.value) for _, item in self._records(key).items())

    def forget_later(self, key: DHTID, subkey: Subkey, expiration_time: float) -> None:
        """A record with an end that nobody takes must not stand in the way of the next one, that ends earlier."""
        records = self._records(key)
        kept = records.get(subkey)
        if kept is not None and kept.expiration_time >= expiration_time:
            del records[subkey]

    def _records(self, key: DHTID) -> DictionaryDHTValue:
        found = super().get(key)
        return DictionaryDHTValue() if found is None else found.value

    def _has_room(self, records: DictionaryDHTValue, subkey: Subkey, value: BinaryDHTValue) -> bool:
        if not records and len(self) >= MAX_KEYS and not self._is_own_or_member(subkey):
            return False
        sizes = {other: len(item.value) for other, item in records.items() if other != subkey}
        if sum(sizes.values()) + len(value) > MAX_KEY_BYTES:
            return False
        if self._is_own_or_member(subkey):
            return True
        of_strangers = sum(size for other, size in sizes.items() if not self._is_own_or_member(other))
        return of_strangers + len(value) <= _strangers_bytes(value)


class NoStorage(DHTLocalStorage):
    """Keeps nothing: others may push into a node's cache, and what is there would hide what is in its storage."""

    def store(self, key: DHTID, value: BinaryDHTValue, expiration_time: float, subkey: Subkey | None = None) -> bool:
        return False

    def store_subkey(self, key: DHTID, subkey: Subkey, value: BinaryDHTValue, expiration_time: float) -> bool:
        return False


def trim(
    validator: EnvelopeValidator, is_own_or_member: IsOwnOrMember, key: bytes, records: DictionaryDHTValue
) -> bool:
    """Removes bad records from `records`, which another node sent together, and those of strangers beyond our bounds.

    Replaces hivemind's own check, which refuses all records if one is bad, such as one that has just expired. Records
    beyond the bounds are not checked at all: that would cost us more than it costs to send them.
    """
    strangers = taken = 0
    with records.freeze():
        for subkey, (value, expiration_time) in sorted(records.items(), key=lambda item: not is_own_or_member(item[0])):
            taken += len(value)
            if not is_own_or_member(subkey):
                strangers += len(value)
            too_much = taken > MAX_KEY_BYTES or (strangers and strangers > _strangers_bytes(value))
            record = DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expiration_time)
            if too_much or not validator.validate(record):
                del records[subkey]
    return True


class BoundedSerializer(MSGPackSerializer):
    """Unpacks what another node sent: text or bytes, or the records of a key. Small bytes never become many objects."""

    @classmethod
    def loads(cls, buf: bytes) -> str | bytes | DictionaryDHTValue:
        """Raises RemoteProtocolError."""
        try:
            packed = msgpack.unpackb(buf, raw=False, max_array_len=0, max_map_len=0, max_ext_len=len(buf))
            return packed if isinstance(packed, str | bytes) else _records_of(packed)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise RemoteProtocolError(f"neither text, bytes nor the records of a key: {error}") from error


def _records_of(packed: object) -> DictionaryDHTValue:
    """Written as hivemind does. Raises ValueError, TypeError, UnpackException."""
    if not isinstance(packed, msgpack.ExtType) or packed.code != MSGPackSerializer._ext_types[DictionaryDHTValue]:
        raise ValueError(f"{type(packed).__name__} where records were expected")
    parts = msgpack.Unpacker(raw=False, max_buffer_size=len(packed.data), max_array_len=0, max_map_len=0, max_ext_len=0)
    parts.feed(packed.data)
    if parts.read_array_header() != 3:
        raise ValueError("records are not three parts")
    parts.skip()  # how many there may be
    records = DictionaryDHTValue()
    with records.freeze():
        records.latest_expiration_time = float(parts.unpack())
        if (count := parts.read_array_header()) > MOST_RECORDS:
            raise ValueError(f"{count} records, but at most {MOST_RECORDS} are allowed")
        for _ in range(count):
            if parts.read_array_header() != 3:
                raise ValueError("a record is not three parts")
            records.store(parts.unpack(), parts.unpack(), float(parts.unpack()))
    return records


def weighing(storage: BoundedStorage | None = None) -> dict[str, Weigh]:
    """What messages to a DHT node cost by the handler's name; `storage`: its own, once it is bounded."""
    return {
        PING: _weigh_small,
        FIND: lambda request: _weigh_find(request, storage),
        STORE: _weigh_store,
    }


def _weigh_small(request: bytes) -> float:
    if len(request) > MAX_ASKED_BYTES:
        raise RemoteProtocolError(f"a message to the DHT has {len(request)} bytes, of at most {MAX_ASKED_BYTES}")
    return 0.0


def _weigh_find(request: bytes, storage: BoundedStorage | None) -> float:
    _weigh_small(request)
    keys = dht_pb2.FindRequest.FromString(request).keys
    cost = _weigh_keys(len(keys))
    size = 0 if storage is None else sum(storage.bytes_under(DHTID.from_bytes(key)) for key in keys)
    if size > MAX_KEY_BYTES:
        raise RemoteProtocolError("there is too much under these keys for one message: ask for fewer")
    return cost


def _weigh_store(request: bytes) -> float:
    asked = dht_pb2.StoreRequest.FromString(request)
    cost = _weigh_keys(len(asked.keys))
    if DHTProtocol.IS_DICTIONARY in asked.subkeys:
        raise RemoteProtocolError("records are taken one by one")
    return cost


def _weigh_keys(count: int) -> float:
    if count > MOST_ASKED_KEYS:
        raise RemoteProtocolError(f"a message names {count} keys, but at most {MOST_ASKED_KEYS} are allowed")
    return max(count - 1.0, 0.0)


def bound(protocol: DHTProtocol, validator: EnvelopeValidator, is_own_or_member: IsOwnOrMember) -> BoundedStorage:
    """From now on, the node of `protocol` keeps and takes no more than is allowed here. Its storage."""
    storage = BoundedStorage(is_own_or_member)
    storage.take_over(protocol.storage)
    protocol.storage, protocol.cache, protocol.serializer = storage, NoStorage(), BoundedSerializer
    protocol._validate_dictionary = lambda key, records: trim(validator, is_own_or_member, key, records)
    return storage


def _strangers_bytes(value: bytes) -> int:
    """Under the key that the envelope names; the validator checks that it is this one."""
    try:
        bounds = bounds_of(envelope.key_of(plain(value, bytes)))
    except RemoteProtocolError:
        return 0
    return bounds.strangers_bytes if bounds is not None else 0
