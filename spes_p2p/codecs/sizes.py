"""How many bytes values take on the wire, by codec. Plain arithmetic: who plans and who serves needs no torch for it.

Every size depends on the number of values alone, so that all peers know the length of a tile before they ask for it.
"""

from __future__ import annotations

from typing import Literal, get_args

Codec = Literal["fp32", "bf16", "int8", "int4", "ternary"]
CODECS: tuple[Codec, ...] = get_args(Codec)

SCALE_BYTES = 2
"""One bf16 number a block."""
BLOCK_VALUES: dict[Codec, int] = {"int8": 128, "int4": 32, "ternary": 128}
"""Values that share a scale."""
DIGITS = 5
"""Values in a byte of `ternary`: 3^5 = 243."""


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
    return scales + -(-values // DIGITS)


def bytes_a_value(codec: Codec) -> float:
    """Of a large tile."""
    return encoded_bytes(codec, 2**20) / 2**20


def num_blocks(codec: Codec, values: int) -> int:
    """Blocks of a tile, the last of which may be shorter."""
    return -(-values // BLOCK_VALUES[codec])
