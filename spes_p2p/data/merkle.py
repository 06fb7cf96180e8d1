"""Hash trees over the pieces of a shard: the Merkle tree of RFC 9162 section 2.1, with SHA-256.

Nodes are paired from the left, level by level, and a last one without a partner goes up as it is, which gives the tree
that the RFC defines from above. Leaves and inner nodes are hashed with different first bytes, so that neither can be
passed off as the other. Knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from spes_p2p.ids import HASH_BYTES, Hash

EMPTY_ROOT = Hash(hashlib.sha256().digest())


def leaf_hash(data: bytes | memoryview) -> bytes:
    """Of one piece."""
    digest = hashlib.sha256(b"\0")
    digest.update(data)
    return digest.digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Of two nodes that stand side by side."""
    return hashlib.sha256(b"\1" + left + right).digest()


def level_sizes(leaves: int) -> list[int]:
    """Nodes of each level, from the leaves up to the root; () where there is no leaf."""
    sizes = [leaves] if leaves else []
    while sizes and sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


def parents(nodes: bytes) -> bytes:
    """The level above an even number of joined nodes, or above all of a level."""
    found = []
    for at in range(0, len(nodes), 2 * HASH_BYTES):
        pair = nodes[at : at + 2 * HASH_BYTES]
        found.append(pair if len(pair) == HASH_BYTES else hashlib.sha256(b"\1" + pair).digest())
    return b"".join(found)


def siblings(index: int, leaves: int) -> Iterator[tuple[int, int]]:
    """(level, index) of the nodes that lead from leaf `index` to the root, from below."""
    level = 0
    while leaves > 1:
        if index ^ 1 < leaves:
            yield level, index ^ 1
        level, index, leaves = level + 1, index // 2, (leaves + 1) // 2


def proof_length(index: int, leaves: int) -> int:
    """Hashes in the proof of leaf `index`."""
    return sum(1 for _ in siblings(index, leaves))


def root_by(index: int, leaves: int, leaf: bytes, proof: Sequence[bytes]) -> bytes:
    """The root of the tree in which `leaf` (hashed) is leaf `index`, by a proof of `proof_length` hashes."""
    node, rest = leaf, iter(proof)
    while leaves > 1:
        if index ^ 1 < leaves:
            other = next(rest)
            node = node_hash(other, node) if index & 1 else node_hash(node, other)
        index, leaves = index // 2, (leaves + 1) // 2
    return node
