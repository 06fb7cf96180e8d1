"""What travels of a tile: its values with the fp32 codec, else its change against the committed values, encoded.
And what becomes of it in the state of who gets it.

Plain fp32 on the host, each operation rounded on its own: what one peer decodes, all do. Knows no round. Codecs are
imported where they are used, since they load torch, which who only looks at a run does not need.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.codecs.sizes import Codec
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Hash
from spes_p2p.state.layout import Values
from spes_p2p.state.staging import Staging, TileData
from spes_p2p.state.version import DTYPE
from spes_p2p.sync.outer import Nesterov


class UnfitTile(RemoteProtocolError):
    """A round hands out a tile that no mean of training gives: its bytes are those that its reducer has signed for."""


def encoded_change(codec: Codec, wanted: Values, before: Values, kept: Values | None) -> tuple[bytes, Values]:
    """wanted - before, with what was kept of earlier changes, in a codec that is not fp32; and what is not in there."""
    from spes_p2p.codecs.lossy import decode, encode

    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite must arrive as such, to be found
        change = np.subtract(wanted, before)
        if kept is not None:
            np.add(change, kept, out=change)
        data = encode(codec, change)
        return data, np.subtract(change, decode(codec, data, len(change)), out=change)


def changed_values(codec: Codec, data: bytes | memoryview, before: Values) -> Values:
    """before + what `data` stands for. Raises ValueError for data of another length."""
    from spes_p2p.codecs.lossy import decode

    change = decode(codec, data, len(before))
    with np.errstate(invalid="ignore", over="ignore"):
        values: Values = np.add(change, before, out=change)
    return values


def stage_tile(
    staging: Staging,
    outer: Nesterov | None,
    tile_id: int,
    data: TileData,
    tile_hash: Hash | None = None,
    *,
    is_foreign: bool = False,
) -> Hash:
    """Stages what a round handed out of a tile, with its new values and momentum where they are not just that.

    `tile_hash`: as for `Staging.write_tile`, whose result is given
    back. `is_foreign`: another peer made it; raises UnfitTile where it stands for values that are not finite, which
    follows from the bytes and the committed state alone: all honest peers say the same of the same tile.
    """
    layout = staging.layout
    codec = layout.codec_of(layout.tiles[tile_id].block)
    if codec == "fp32" and outer is None:  # needs nothing committed, which may be damaged
        if is_foreign:
            _check_finite(tile_id, data if isinstance(data, np.ndarray) else np.frombuffer(data, DTYPE))
        return staging.write_tile(tile_id, data, tile_hash)
    values, momentum = _made_of(staging, outer, tile_id, data)
    if is_foreign:
        _check_finite(tile_id, values)
        if momentum is not None:
            _check_finite(tile_id, momentum)
    return staging.write_tile(tile_id, data, tile_hash, values, momentum)


def _check_finite(tile_id: int, values: Values) -> None:
    if not np.isfinite(values).all():
        raise UnfitTile(f"tile {tile_id} was handed out with values that are not finite")


def _made_of(staging: Staging, outer: Nesterov | None, tile_id: int, data: TileData) -> tuple[Values, Values | None]:
    """The values that a wire tile stands for, after the outer optimizer's step, and its momentum."""
    layout = staging.layout
    block = layout.tiles[tile_id].block
    codec = layout.codec_of(block)
    before = np.frombuffer(staging.areas.parent_tile(tile_id), DTYPE)
    if codec == "fp32":
        values: Values = data if isinstance(data, np.ndarray) else np.frombuffer(data, DTYPE)
    elif isinstance(data, np.ndarray):
        raise LocalProtocolError(f"tile {tile_id} was staged as values, but travels as {codec}")
    else:
        values = changed_values(codec, data, before)
    if outer is None:
        return values, None
    velocity = np.frombuffer(staging.areas.parent_tile(layout.momentum_tile(tile_id)), DTYPE)
    return outer.step(values, before, velocity)
