"""How many bytes values take on the wire, by codec. Plain arithmetic: who plans and who serves needs no torch for it.

Every size depends on the number of values alone, so that all peers know the length of a tile before they ask for it.
"""

from __future__ import annotations

from typing import Literal, get_args

Codec = Literal["fp32", "bf16", "int8", "int4", "ternary", "topk", "topk2"]
CODECS: tuple[Codec, ...] = get_args(Codec)
DenseCodec = Literal["fp32", "bf16", "int8", "int4"]
"""Those that come close to every value: for what is sent once, so that nothing can follow later."""
SPARSE_CODECS: tuple[Codec, ...] = ("topk", "topk2")
"""Those that leave most values out."""

SCALE_BYTES = 2
"""One bf16 number a block, two with `topk2`."""
BLOCK_VALUES: dict[Codec, int] = {"int8": 128, "int4": 32, "ternary": 128, "topk": 4096, "topk2": 4096}
"""Values that share a scale."""
DIGITS = 5
"""Values in a byte of `ternary`: 3^5 = 243."""
TOPK_KEPT = 128
"""Entries of a whole block that `topk` sends."""
TOPK2_KEPT = 64
"""The same for `topk2`."""
ENTRY_BYTES = 2
"""Of one entry of `topk`: 12 bits where it lies in its block, 4 bits what it is."""
ENTRY_BITS = 14
"""Of one of `topk2`: 12 bits where, 2 bits what."""


def encoded_bytes(codec: Codec, values: int) -> int:
    """Bytes of one tile of `values` values."""
    if codec == "fp32":
        return 4 * values
    if codec == "bf16":
        return 2 * values
    scales = SCALE_BYTES * num_blocks(codec, values)
    if codec == "int8":
        return scales + values
    if codec == "int4":
        return scales + -(-values // 2)
    if codec == "ternary":
        return scales + -(-values // DIGITS)
    whole, rest = divmod(values, BLOCK_VALUES[codec])
    if codec == "topk":
        return scales + ENTRY_BYTES * (whole * TOPK_KEPT + kept_of(rest))
    return 2 * scales + whole * packed_bytes(TOPK2_KEPT) + packed_bytes(kept_of(rest, TOPK2_KEPT))


def bytes_a_value(codec: Codec) -> float:
    """Of a large tile."""
    return encoded_bytes(codec, 2**20) / 2**20


def num_blocks(codec: Codec, values: int) -> int:
    """Blocks of a tile, the last of which may be shorter."""
    return -(-values // BLOCK_VALUES[codec])


def kept_of(values: int, of_whole: int = TOPK_KEPT) -> int:
    """Entries that are sent of a block of so many values, rounded up, if `of_whole` are of a whole one."""
    return -(-values * of_whole // BLOCK_VALUES["topk"])


def packed_bytes(entries: int) -> int:
    """Of the entries of one block of `topk2`."""
    return -(-entries * ENTRY_BITS // 8)
