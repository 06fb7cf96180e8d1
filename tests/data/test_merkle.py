"""The hash trees are those of RFC 9162, and a proof proves one leaf at one place."""

from __future__ import annotations

import hashlib

import pytest

from spes_p2p.data.merkle import EMPTY_ROOT, leaf_hash, level_sizes, parents, proof_length, root_by, siblings
from spes_p2p.ids import HASH_BYTES


def defined_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 9162, section 2.1.1, as it stands there."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\1" + defined_root(leaves[:k]) + defined_root(leaves[k:])).digest()


def levels(leaves: list[bytes]) -> list[bytes]:
    found = [b"".join(map(leaf_hash, leaves))]
    while len(found[-1]) > HASH_BYTES:
        found.append(parents(found[-1]))
    return found


def proof(found: list[bytes], index: int, count: int) -> list[bytes]:
    return [found[level][at * HASH_BYTES :][:HASH_BYTES] for level, at in siblings(index, count)]


@pytest.mark.parametrize("count", range(1, 35))
def test_every_leaf_leads_to_the_root_of_the_rfc(count: int) -> None:
    leaves = [b"leaf %d" % at for at in range(count)]
    found = levels(leaves)
    assert [len(level) // HASH_BYTES for level in found] == level_sizes(count)
    for index, leaf in enumerate(leaves):
        path = proof(found, index, count)
        assert len(path) == proof_length(index, count)
        assert root_by(index, count, leaf_hash(leaf), path) == defined_root(leaves)
        for other in range(count):
            if other != index and proof_length(other, count) == len(path):
                assert root_by(other, count, leaf_hash(leaf), path) != defined_root(leaves)


def test_nothing_has_a_root_too() -> None:
    assert defined_root([]) == EMPTY_ROOT
    assert level_sizes(0) == []


def test_a_node_is_no_leaf() -> None:
    found = levels([b"a", b"b", b"c", b"d"])
    assert leaf_hash(found[0][: 2 * HASH_BYTES]) != found[1][:HASH_BYTES]
