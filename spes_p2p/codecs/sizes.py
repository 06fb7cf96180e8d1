"""How many bytes values take on the wire, by codec. Plain arithmetic: who plans and who serves needs no torch for it.

Every size depends on the number of values alone, so that all peers know the length of a tile before they ask for it.
"""

from __future__ import annotations

from typing import Literal, get_args

Codec = Literal["fp32", "bf16", "int8", "int4", "topk"]
CODECS: tuple[Codec, ...] = get_args(Codec)
DenseCodec = Literal["fp32", "bf16", "int8", "int4"]
"""Those that leave no value out: for what is sent once, so that nothing can follow later."""

SCALE_BYTES = 2
"""One bf16 number a block."""
BLOCK_VALUES: dict[Codec, int] = {"int8": 128, "int4": 32, "topk": 4096}
"""Values that share a scale."""
TOPK_KEPT = 128
"""Entries of a whole block that `topk` sends."""
ENTRY_BYTES = 2
"""Of one such entry: 12 bits where it lies in its block, 4 bits what it is."""


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
    whole, rest = divmod(values, BLOCK_VALUES["topk"])
    return scales + ENTRY_BYTES * (whole * TOPK_KEPT + kept_of(rest))


def bytes_a_value(codec: Codec) -> float:
    """Of a large tile."""
    return encoded_bytes(codec, 2**20) / 2**20


def num_blocks(codec: Codec, values: int) -> int:
    """Blocks of a tile, the last of which may be shorter."""
    return -(-values // BLOCK_VALUES[codec])


def kept_of(values: int) -> int:
    """Entries that `topk` sends of a block of so many values, rounded up."""
    return -(-values * TOPK_KEPT // BLOCK_VALUES["topk"])
