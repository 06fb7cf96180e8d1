"""Bounds what one DHT node stores for others and accepts from them; hivemind itself takes everything that is signed.

A reader gets all records of a key in one message, so the records under a key must stay small, whoever writes them.
There is always room for members of our run, whatever strangers have written; among strangers, the first ones stay.
"""

from __future__ import annotations

from collections.abc import Callable

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, BinaryDHTValue, Subkey
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.swarm import envelope
from spes_p2p.swarm.hivemind_backend.directory import EnvelopeValidator, plain
from spes_p2p.swarm.records import bounds_of

MAX_KEY_BYTES = 12 * 2**20
"""Under one key, members included."""
MAX_KEYS = 64
"""More are begun for members alone; a run has four, one of them shared by all runs."""
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


def bound(protocol: DHTProtocol, validator: EnvelopeValidator, is_own_or_member: IsOwnOrMember) -> None:
    """From now on, the node of `protocol` keeps and takes no more than is allowed here."""
    storage = BoundedStorage(is_own_or_member)
    storage.take_over(protocol.storage)
    protocol.storage, protocol.cache = storage, NoStorage()
    protocol._validate_dictionary = lambda key, records: trim(validator, is_own_or_member, key, records)


def _strangers_bytes(value: bytes) -> int:
    """Under the key that the envelope names; the validator checks that it is this one."""
    try:
        bounds = bounds_of(envelope.key_of(plain(value, bytes)))
    except RemoteProtocolError:
        return 0
    return bounds.strangers_bytes if bounds is not None else 0
