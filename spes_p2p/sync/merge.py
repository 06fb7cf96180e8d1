"""Merge warm-up: the early exchange of knowledge between similar experts (design section 3.3).

When and how strongly, which experts are neighbours, and the arithmetic on the state store. Who is a neighbour is
computed by the leader alone and fixed by the manifest, so it may use whatever arithmetic is fast. The merge itself is
done by every peer and must give the same bits everywhere; per value of an expert's three matrices, in IEEE fp32, each
operation rounded on its own (no fused multiply-add, no library sums):

    d = e_j1 - e_i                        j1, j2, .. jk: the neighbours in the order of the manifest
    d = d + (e_j2 - e_i)                  and so on for each further neighbour
    d = d * fp32(alpha / k)               alpha: the fp32-exact number of the manifest, divided in fp64, rounded once
    new e_i = d + e_i

All right-hand sides are values from before the merge. Subnormal numbers need the processor's usual mode: a process that
turned on flush-to-zero gets other bits, which its root shows. Needs only numpy; knows neither rounds nor peers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spes_p2p.errors import ConfigError, LocalProtocolError
from spes_p2p.state.hashes import HASH_THREADS
from spes_p2p.state.layout import BlockSource, Layout, Tile, Values

Neighbours = tuple[tuple[tuple[int, ...], ...], ...]
"""neighbours[layer][expert]: the experts whose values flow into this one, most similar first."""

_CHUNK = 2**16  # values worked on at a time: the operands stay in the processor's cache
_EXPERT = re.compile(r".*\blayers\.(\d+)\..*\bexperts\.\d+\.(gate|up|down)_proj\.weight")


def merge_alpha(base_alpha: float, decay_steps: int, step: int) -> float:
    """alpha = base * (1 - min(step / decay_steps, 1)), rounded to an fp32-exact number; 0 means that nothing is merged.

    The manifest carries it as a float64 that is exactly this fp32 value.
    """
    if decay_steps <= 0 or step >= decay_steps:
        return 0.0
    return float(np.float32(base_alpha * (1.0 - step / decay_steps)))


@dataclass(frozen=True)
class LayerSpan:
    """Where one layer's expert lies in each column block, in values: all of it, and its gate projection."""

    start: int
    stop: int
    gate_start: int
    gate_stop: int


def layer_spans(layout: Layout) -> tuple[LayerSpan, ...]:
    """The spans of the layers, the same in every column. Raises ConfigError where the columns are not alike."""
    spans = {_column_spans(layout, column) for column in range(layout.num_columns)}
    if len(spans) != 1:
        raise ConfigError(f"{len(spans)} different shapes of expert columns", fix="give all experts one shape")
    return spans.pop()


def nearest_experts(layout: Layout, source: BlockSource, top_k: int) -> Neighbours:
    """For each layer and expert, the k = min(top_k, E - 1) other experts whose gate projections point most alike.

    Cosine similarity of the flattened gate projections; ties go to the lower index. Holds a few hundred kilobytes of
    each column at a time. With one expert, or top_k 0, nobody has a neighbour and there is nothing to merge.
    """
    count = min(top_k, layout.num_columns - 1)
    return tuple(_ranked(cosines(layout, source, span), count) for span in layer_spans(layout))


def cosines(layout: Layout, source: BlockSource, span: LayerSpan) -> NDArray[np.float64]:
    """[E, E], of the flattened gate projections of one layer; 0 for an expert of zeros."""
    columns = [source.block(1 + expert) for expert in range(layout.num_columns)]
    products = np.zeros((len(columns), len(columns)))
    for part in _chunks(span.gate_start, span.gate_stop):
        gates_EV = np.stack([column[part] for column in columns]).astype(np.float64)
        products += gates_EV @ gates_EV.T
    norms = np.sqrt(np.diagonal(products))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: NDArray[np.float64] = products / np.outer(norms, norms)
    return np.nan_to_num(found, nan=0.0)


def merge_columns(
    layout: Layout,
    source: BlockSource,
    neighbours: Neighbours,
    alpha: float,
    write: Callable[[int, Values], object],
) -> None:
    """Merges every expert with its neighbours and hands each new tile to `write(tile id, values)`, on a few threads.

    `source` gives the values from before the merge and must not change meanwhile; `alpha` is fp32-exact.
    Raises LocalProtocolError where `neighbours` does not fit the layout (check those of others with
    `check_neighbours` first).
    """
    check_neighbours(layout, neighbours)
    if float(np.float32(alpha)) != alpha:
        raise LocalProtocolError(f"merge alpha {alpha!r} is not exact in fp32", fix="take it from merge_alpha()")
    spans = layer_spans(layout)
    columns = [source.block(1 + expert) for expert in range(layout.num_columns)]

    def merge_tile(tile: Tile) -> None:
        write(tile.id, _merged_tile(tile, columns, spans, neighbours, alpha))

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for _ in pool.map(merge_tile, _across_columns(layout)):
            pass  # raises what a tile raised


def _across_columns(layout: Layout) -> Iterator[Tile]:
    """The tiles of all columns, those that lie at the same place one after the other: they read the same pages."""
    columns = range(1, 1 + layout.num_columns)
    return (tile for alike in zip(*(layout.tiles_of(column) for column in columns)) for tile in alike)


def check_neighbours(layout: Layout, neighbours: Neighbours) -> None:
    """Raises LocalProtocolError unless there are as many others, each once, for every expert of every layer."""
    experts, layers = layout.num_columns, len(layer_spans(layout))
    shape_fits = len(neighbours) == layers and all(len(of_layer) == experts for of_layer in neighbours)
    if not shape_fits:
        raise LocalProtocolError(f"merge neighbours do not cover {layers} layers of {experts} experts")
    for layer, of_layer in enumerate(neighbours):
        for expert, others in enumerate(of_layer):
            if not others or len(set(others)) < len(others) or not set(others) <= set(range(experts)) - {expert}:
                raise LocalProtocolError(f"layer {layer}: expert {expert} of {experts} has the neighbours {others}")


def merge_values(own: Values, others: Sequence[Values], alpha: float) -> Values:
    """The formula of the module docstring on arrays of one shape; the operands are left as they are."""
    merged = np.subtract(others[0], own)
    for other in others[1:]:
        np.add(merged, np.subtract(other, own), out=merged)
    np.multiply(merged, np.float32(alpha / len(others)), out=merged)
    np.add(merged, own, out=merged)
    return merged


def _merged_tile(
    tile: Tile,
    columns: Sequence[Values],
    spans: Sequence[LayerSpan],
    neighbours: Neighbours,
    alpha: float,
) -> Values:
    merged, expert = np.empty(tile.size, np.float32), tile.block - 1
    for layer, span in enumerate(spans):
        for part in _chunks(max(tile.start, span.start), min(tile.stop, span.stop)):
            others = [columns[other][part] for other in neighbours[layer][expert]]
            merged[part.start - tile.start : part.stop - tile.start] = merge_values(
                columns[expert][part], others, alpha
            )
    return merged


def _chunks(start: int, stop: int) -> Iterator[slice]:
    return (slice(at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK))


def _ranked(cosines_EE: NDArray[np.float64], count: int) -> tuple[tuple[int, ...], ...]:
    np.fill_diagonal(cosines_EE, -np.inf)
    order = np.argsort(-cosines_EE, axis=1, kind="stable")
    return tuple(tuple(row) for row in order[:, :count].tolist())


def _column_spans(layout: Layout, column: int) -> tuple[LayerSpan, ...]:
    matrices: dict[int, dict[str, tuple[int, int]]] = {}
    for placed in layout.blocks[1 + column].tensors:
        match = _EXPERT.fullmatch(placed.tensor.name)
        if match is None:
            raise ConfigError(f"{placed.tensor.name} is in an expert column but is no matrix of an expert")
        matrices.setdefault(int(match[1]), {})[match[2]] = (placed.offset, placed.offset + placed.tensor.size)
    return tuple(_span(list(of_layer.values()), of_layer["gate"]) for _, of_layer in sorted(matrices.items()))


def _span(matrices: list[tuple[int, int]], gate: tuple[int, int]) -> LayerSpan:
    start, stop = min(matrices)[0], max(matrices)[1]
    if stop - start != sum(end - begin for begin, end in matrices):
        raise ConfigError("the matrices of an expert do not lie side by side in its column", fix="order them by layer")
    return LayerSpan(start, stop, *gate)
