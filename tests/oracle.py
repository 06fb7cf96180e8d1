"""An independent computation of what a round must give: the algorithm's items 2, 3 and 6, in plain numpy and float64.

Written from the formulas and the byte order of the protocol alone; it shares no code with the package. Everything is a
dict of tensors under Hugging Face names. `round_result` computes one round, `check_dumps` holds the folders that
`join --dump-rounds` writes against it.

    shared <- sum_p w_p x_p / sum_p w_p over a slice's contributors; a column: the same over its owners among them
    step   <- step + (2 a + b) // (2 b), a = sum_p w_p n_p, b = sum_p w_p
    outer optimizer, where there is one, on what the slices cover: d = mean - before, v <- momentum v + d,
              x <- before + lr (d + momentum v); else x <- mean
    merge, when floor(step / interval) grew and alpha = base * (1 - min(step / decay, 1)) > 0:
    e_i    <- e_i + alpha * mean_{j in T(i)} (e_j - e_i), T(i): the k others whose gate projections have the highest
              cosine similarity, layer by layer, all right-hand sides from before the merge
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors.numpy import load_file

from spes_p2p.sync.trusted_mean import LARGEST_PULL

Tensors = Mapping[str, NDArray[Any]]
TOLERANCE = 1e-6
"""Of the largest value of a tensor."""
MOMENTUM = "outer_momentum."
"""Before the name of a tensor: v of it."""
_EXPERT = re.compile(r"(.*\blayers\.)(\d+)(\..*\bexperts\.)(\d+)(\.)(gate|up|down)(_proj\.weight)")


@dataclass(frozen=True)
class Contributor:
    """One roster entry: its weight in tokens, its inner steps, and its values going into the round."""

    peer: str
    weight: int
    steps: int
    before: Tensors


@dataclass(frozen=True)
class SliceOf:
    """Tiles [first_tile, first_tile + tiles) of a block (0: shared, 1 + e: column e), and whose values went in."""

    block: int
    first_tile: int
    tiles: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: SGD with Nesterov momentum."""

    lr: float
    momentum: float


# ---- the order of bytes ----


def block_of(name: str) -> int:
    """0 for a shared tensor, 1 + e for one of expert e."""
    match = _EXPERT.fullmatch(name)
    return 1 + int(match[4]) if match else 0


def in_order(names: Iterable[str]) -> list[str]:
    """Shared tensors by their names with numbers as numbers, then columns, each by layer, then gate, up, down."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[Any, ...]:
    match = _EXPERT.fullmatch(name)
    if match:
        return (1 + int(match[4]), int(match[2]), ("gate", "up", "down").index(match[6]))
    return (0, [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")])


def root_of(state: Tensors, tile_values: int) -> str:
    """The name of a state: SHA-256 over the BLAKE3 hash of each tile; tiles are cut inside blocks, momentum last."""
    joined = hashlib.sha256()
    blocks: dict[tuple[bool, int], list[NDArray[Any]]] = {}
    for prefix in ("", MOMENTUM):
        names = [name.removeprefix(MOMENTUM) for name in state if name.startswith(MOMENTUM) is bool(prefix)]
        for name in in_order(names):
            values = np.asarray(state[prefix + name], "<f4").reshape(-1)
            blocks.setdefault((bool(prefix), block_of(name)), []).append(values)
    for parts in (blocks[key] for key in sorted(blocks)):
        values = np.concatenate(parts)
        for start in range(0, len(values), tile_values):
            joined.update(blake3(values[start : start + tile_values].tobytes()).digest())
    return joined.hexdigest()


# ---- the formulas ----


def capped(peers: Sequence[Contributor], trusted: Collection[str]) -> list[Contributor]:
    """Strangers weigh no more than the (lower) median of the trusted."""
    known = [peer for peer in peers if peer.peer in trusted]
    middle = (len(known) - 1) // 2
    weight, steps = (sorted(each)[middle] for each in ([p.weight for p in known], [p.steps for p in known]))
    return [
        p if p.peer in trusted else replace(p, weight=min(p.weight, weight), steps=min(p.steps, steps)) for p in peers
    ]


def next_step(step: int, peers: Sequence[Contributor]) -> int:
    """The weighted mean of inner steps, rounded half up in integers, on top of `step`."""
    a = sum(peer.weight * peer.steps for peer in peers)
    b = sum(peer.weight for peer in peers)
    return step + (2 * a + b) // (2 * b) if b else step


def alpha_of(step_before: int, step_after: int, interval: int, base: float, decay_steps: int) -> float:
    """How strongly a round merges; 0 where it does not."""
    if step_after // interval <= step_before // interval:
        return 0.0
    return base * (1 - min(step_after / decay_steps, 1))


def round_result(
    peers: Sequence[Contributor],
    slices: Sequence[SliceOf],
    committed: Tensors,
    alpha: float,
    top_k: int,
    tile_values: int | None = None,
    outer: Outer | None = None,
    trusted: Collection[str] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """The state after a round. `committed` is the state before; a tensor may be missing there if the round brings it.

    `tile_values` is only needed where slices of one block have different contributors, or where some are not `trusted`.
    With `outer` `committed` holds the momentum of every tensor too.
    """
    after = {name: np.array(value, np.float64) for name, value in committed.items()}
    for block in sorted({piece.block for piece in slices}):
        pieces = [piece for piece in slices if piece.block == block]
        means = _block_result(peers, pieces, committed, tile_values, trusted)
        after.update(means if outer is None else outer_step(means, committed, outer))
    return merged(after, alpha, top_k) if alpha > 0 else after


def outer_step(means: Tensors, committed: Tensors, outer: Outer) -> dict[str, NDArray[np.float64]]:
    """New values and new momentum of the tensors that a round averaged."""
    after: dict[str, NDArray[np.float64]] = {}
    for name, mean in means.items():
        before = np.asarray(committed[name], np.float64)
        gradient = before - mean  # as in torch.optim.SGD: the step goes against it
        buffer = -outer.momentum * np.asarray(committed[MOMENTUM + name], np.float64) + gradient
        after[name] = before - outer.lr * (gradient + outer.momentum * buffer)
        after[MOMENTUM + name] = -buffer
    return after


def _block_result(
    peers: Sequence[Contributor], pieces: Sequence[SliceOf], committed: Tensors, tile_values: int | None,
    trusted: Collection[str] | None,
) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    block, everybody = pieces[0].block, set().union(*(piece.contributors for piece in pieces))
    some = next(peer for peer in peers if peer.peer in everybody)
    names = [name for name in in_order(some.before) if block_of(name) == block]
    shapes = [some.before[name].shape for name in names]
    flat = {p.peer: _flat(p.before, names) for p in peers if p.peer in everybody}
    weights = {peer.peer: peer.weight for peer in peers}
    size = len(flat[some.peer])
    known = all(name in committed for name in names)
    result = _flat(committed, names) if known else np.full(size, np.nan)
    is_whole = tile_values is None or sum(piece.tiles for piece in pieces) * tile_values >= size
    if trusted is None and is_whole and len({piece.contributors for piece in pieces}) == 1:
        result[:] = mean_of(flat, weights, pieces[0].contributors, slice(0, size))
    else:
        assert tile_values is not None, f"slices of block {block} have different contributors: the tile size is needed"
        start = (
            min(piece.first_tile for piece in pieces) if block else 0
        )  # of the shared block a round may bring a part
        for piece in pieces:
            at = (piece.first_tile - start) * tile_values
            part = slice(at, min(at + piece.tiles * tile_values, size))
            names_here = piece.contributors
            if trusted is None or set(names_here) <= set(trusted):
                result[part] = mean_of(flat, weights, names_here, part)
            else:
                changes = {name: flat[name][part] - result[part] for name in names_here}
                result[part] = result[part] + trusted_mean(changes, weights, trusted)
    return _tensors(result, names, shapes)


def mean_of(
    flat: Mapping[str, NDArray[np.float64]], weights: Mapping[str, int], who: Iterable[str], part: slice
) -> NDArray[np.float64]:
    names = list(who)
    return np.sum([weights[name] * flat[name][part] for name in names], axis=0) / sum(weights[name] for name in names)


def trusted_mean(
    changes: Mapping[str, NDArray[np.float64]], weights: Mapping[str, int], trusted: Collection[str]
) -> NDArray[np.float64]:
    """The formulas of docs/trust.md, one after the other."""
    roots, others = ([name for name in changes if (name in trusted) is is_in] for is_in in (True, False))
    heard = sum(weights[name] for name in roots)

    def root_of(names: Sequence[str]) -> NDArray[np.float64]:
        return np.sum([weights[n] * changes[n] for n in names], axis=0) / sum(weights[n] for n in names)

    def cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        return float(one @ other) / lengths if lengths else 0.0

    root = root_of(roots)
    usual = 0.5
    if len(roots) > 1:
        usual = float(np.median([cosine(changes[n], root_of([m for m in roots if m != n])) for n in roots]))
    counted = {n: min(1.0, max(0.0, cosine(changes[n], root)) / max(usual, 0.001)) for n in others}
    length = float(np.median([np.linalg.norm(changes[n]) for n in roots]))
    total = sum(weights[n] * counted[n] for n in others)
    if not total:
        return root
    short = {n: changes[n] * min(1.0, length / max(float(np.linalg.norm(changes[n])), 1e-300)) for n in others}
    theirs = np.sum([weights[n] * counted[n] * short[n] for n in others], axis=0) / total
    pull = total / (heard + total) * (theirs - root)
    shares = {n: weights[n] / heard for n in roots}
    own = sum(share**2 for share in shares.values())
    for at in range(0, len(pull), 64):
        part = slice(at, at + 64)
        spread = np.linalg.norm(root[part]) / 2
        if len(roots) > 1:
            squares = sum(share * np.sum((changes[n][part] - root[part]) ** 2) for n, share in shares.items())
            spread = np.sqrt(squares / (1 - own))
        pull[part] *= min(1.0, LARGEST_PULL * np.sqrt(own) * spread / max(float(np.linalg.norm(pull[part])), 1e-300))
    return root + pull


def _flat(tensors: Tensors, names: Sequence[str]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in names])


def _tensors(
    flat: NDArray[np.float64], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> dict[str, NDArray[np.float64]]:
    found, at = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        size = int(np.prod(shape))
        found[name] = flat[at : at + size].reshape(shape)
        at += size
    return found


def merged(state: Tensors, alpha: float, top_k: int) -> dict[str, NDArray[np.float64]]:
    """The state after similar experts of each layer moved towards each other."""
    after = {name: np.array(value, np.float64) for name, value in state.items()}
    experts: dict[int, dict[int, dict[str, str]]] = {}
    for name in state:
        if (match := _EXPERT.fullmatch(name)) and not name.startswith(MOMENTUM):
            experts.setdefault(int(match[2]), {}).setdefault(int(match[4]), {})[match[6]] = name
    for layer in experts.values():
        gates = {e: np.asarray(state[names["gate"]], np.float32).astype(np.float64) for e, names in layer.items()}
        for expert, names in layer.items():
            others = sorted((e for e in layer if e != expert), key=lambda e: (-_cosine(gates[expert], gates[e]), e))
            near = others[: min(top_k, len(layer) - 1)]
            for matrix, name in names.items():
                own = np.asarray(state[name], np.float64)
                change = np.mean([np.asarray(state[layer[e][matrix]], np.float64) - own for e in near], axis=0)
                after[name] = own + alpha * change
    return after


def _cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.sum(one * other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def check_equal(after: Tensors, expected: Tensors, where: str = "") -> None:
    """Every tensor equals the expected one to TOLERANCE of its largest value (momentum: or of what it is of)."""
    assert set(after) == set(expected), f"{where}: {sorted(set(after) ^ set(expected))[:3]} are not on both sides"
    for name, value in expected.items():
        error = float(np.max(np.abs(np.asarray(after[name], np.float64) - value), initial=0.0))
        scales = (np.max(np.abs(expected[key]), initial=0.0) for key in {name, name.removeprefix(MOMENTUM)})
        limit = TOLERANCE * float(max(scales))
        assert error <= limit, f"{where}: {name} is off by {error:.3g}, more than {limit:.3g}"


# ---- folders of --dump-rounds ----


@dataclass(frozen=True)
class Dump:
    """One peer's dump of one round."""

    peer: str
    round: int
    about: Mapping[str, Any]
    before: Tensors
    after: Tensors


def read_dumps(directory: Path) -> dict[int, dict[str, Dump]]:
    """All dumps below a folder, by round and peer id."""
    found: dict[int, dict[str, Dump]] = {}
    for path in sorted(directory.rglob("round-*/round.json")):
        about, folder = json.loads(path.read_text()), path.parent
        before, after = load_file(folder / "before.safetensors"), load_file(folder / "after.safetensors")
        dump = Dump(about["peer_id"], about["round"], about, before, after)
        assert folder.name == f"round-{dump.round:06d}", f"{folder} says that it is of round {dump.round}"
        assert dump.peer not in found.setdefault(dump.round, {}), f"two dumps of round {dump.round} by {dump.peer}"
        found[dump.round][dump.peer] = dump
    return found


def check_dumps(directory: Path, tile_values: int | None = None, complete: float = 1.0) -> list[int]:
    """Every dumped round is what its inputs give, and the same at all peers; the rounds that were checked.

    With `tile_values` the hash of the model is recomputed too. `complete`: in at least this share of the rounds nobody
    was lost or late, so that each slice has all its contributors.
    """
    rounds = read_dumps(directory)
    assert rounds, f"{directory} has no dumps"
    lacking: dict[int, list[str]] = {}
    for round, dumps in sorted(rounds.items()):
        _check_agreement(round, dumps, tile_values)
        earlier = next(iter(rounds[round - 1].values())) if round - 1 in rounds else None
        lacking[round] = _check_round(round, dumps, earlier, tile_values)
    whole = sum(not words for words in lacking.values())
    assert whole >= complete * len(rounds), "; ".join(text for words in lacking.values() for text in words)
    return sorted(rounds)


def _check_agreement(round: int, dumps: Mapping[str, Dump], tile_values: int | None) -> None:
    first = next(iter(dumps.values()))
    for dump in dumps.values():
        for key in ("model_hash", "step", "roster", "slices", "merge_alpha", "merge_top_k", "codec", "outer"):
            same = dump.about[key] == first.about[key]
            assert same, f"round {round}: {key} is {dump.about[key]} at {dump.peer}, {first.about[key]} at {first.peer}"
        for name, value in first.after.items():
            assert np.array_equal(dump.after[name], value), f"round {round}: {name} differs at {dump.peer}"
    if tile_values is not None:
        root = root_of(first.after, tile_values)
        assert root == first.about["model_hash"], f"round {round}: the state hashes to {root}, not to its model_hash"


def _check_round(round: int, dumps: Mapping[str, Dump], earlier: Dump | None, tile_values: int | None) -> list[str]:
    """Gives who is missing in which slice, in words."""
    about, after = next(iter((dump.about, dump.after) for dump in dumps.values()))
    slices = [SliceOf(s["block"], s["first_tile"], s["tiles"], tuple(s["contributors"])) for s in about["slices"]]
    used = {peer for piece in slices for peer in piece.contributors}
    missing = used - set(dumps)
    assert not missing, f"round {round}: no dump of the contributors {sorted(missing)}"
    peers = [
        Contributor(entry["peer_id"], entry["weight"], entry.get("steps", 0), dumps[entry["peer_id"]].before)
        for entry in about["roster"]
        if entry["peer_id"] in dumps
    ]
    lacking = _check_contributors(round, about, slices)
    if earlier is not None and all("steps" in entry for entry in about["roster"]):
        step = next_step(earlier.about["step"], peers)
        assert about["step"] == step, f"round {round}: the step is {about['step']}, not {step}"
    committed = earlier.after if earlier is not None else {}
    if about["slices"] and not committed:
        covered = {piece.block for piece in slices}
        assert covered == {block_of(name) for name in after}, f"round {round}: blocks without the state before"
    outer = None if about["outer"] is None else Outer(**about["outer"])
    if outer is not None and not committed:
        return lacking  # nobody knows the momentum before
    result = round_result(peers, slices, committed, about["merge_alpha"], about["merge_top_k"], tile_values, outer)
    if result:
        check_equal(after, result, f"round {round}")
    return lacking


def _check_contributors(round: int, about: Mapping[str, Any], slices: Sequence[SliceOf]) -> list[str]:
    lacking: list[str] = []
    owned = {entry["peer_id"]: set(entry["owned"]) for entry in about["roster"]}
    for piece in slices:
        may = {peer for peer, columns in owned.items() if piece.block == 0 or piece.block - 1 in columns}
        have = set(piece.contributors)
        words = f"round {round}: slice {piece} has contributors {sorted(have)}, its owners are {sorted(may)}"
        assert have <= may, words
        if have < may:
            lacking.append(words)
    return lacking
