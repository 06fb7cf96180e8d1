"""What travels of a tile: its values with the fp32 codec, else its change against the committed values, encoded.

Plain fp32 on the host, each operation rounded on its own: what one peer decodes, all do. Knows no round.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import Codec
from spes_p2p.state.layout import Values


def encoded_change(codec: Codec, wanted: Values, before: Values, kept: Values | None) -> tuple[bytes, Values]:
    """wanted - before, with what was kept of earlier changes, in a codec that is not fp32; and what is not in there."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite must arrive as such, to be found
        change = np.subtract(wanted, before)
        if kept is not None:
            np.add(change, kept, out=change)
        data = encode(codec, change)
        return data, np.subtract(change, decode(codec, data, len(change)), out=change)


def changed_values(codec: Codec, data: bytes | memoryview, before: Values) -> Values:
    """before + what `data` stands for. Raises ValueError for data of another length."""
    change = decode(codec, data, len(before))
    with np.errstate(invalid="ignore", over="ignore"):
        values: Values = np.add(change, before, out=change)
    return values
