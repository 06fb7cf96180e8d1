"""What fits into a given memory, and which options make it fit.

Options are tried in the order of what they cost in speed, each on top of those before (`LADDER`): selective
checkpointing a few percent; foreign experts in one byte are unpacked twice a micro-batch; full checkpointing computes
every layer twice; foreign experts in half a byte are further from what their owners have; Muon is another method, with
a learning rate of its own. On each rung the micro-batch is halved first, down to 4,096 tokens, where products are still
large; smaller ones come last of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

from spes_p2p.planning.memory import Memory, Workload, predict
from spes_p2p.planning.options import Options, halved

LADDER: tuple[tuple[str, Any], ...] = (
    ("activation_checkpointing", "selective"),
    ("foreign_dtype", "int8"),
    ("activation_checkpointing", "full"),
    ("foreign_dtype", "nf4"),
    ("optimizer", "muon"),
)
CHEAP_TOKENS = 4096
"""A micro-batch of fewer tokens makes products that are too small."""
MOST_TOKENS = 32_768
"""Larger micro-batches gain nothing any more."""
_CHECKPOINTING = ("none", "selective", "full")
_RISING = {
    "activation_checkpointing": _CHECKPOINTING,
    "foreign_dtype": ("compute", "int8", "nf4"),
    "optimizer": ("adamw", "muon"),
}
"""Each saves what those before it do, and more."""


@dataclass(frozen=True)
class Rung:
    """One set of options with the micro-batch of the config."""

    options: Options
    adds: str
    """Its last step as an override; nothing for the config as it is."""
    memory: Memory
    """Of the wanted columns."""
    most_columns: int | None
    """Most columns that fit with these options; None if not even a peer without columns fits."""
    largest_micro_batch: int
    """Largest micro-batch (in sequences) that fits with the wanted columns; 0 if none does."""


@dataclass(frozen=True)
class Fit:
    """Something that fits: these options, micro-batch included, with so many columns."""

    options: Options
    owned: int
    memory: Memory


@dataclass(frozen=True)
class Search:
    """`chosen`: the wanted columns by the cheapest options, if any hold them; `nearest`: if not, most columns."""

    wanted: int
    rungs: tuple[Rung, ...]
    chosen: Fit | None
    nearest: Fit | None
    least_bytes: int
    """What a peer without columns needs at least, with all these options."""


def search(work: Workload, memory_bytes: int, fixed: Collection[str] = frozenset()) -> Search:
    """All rungs for the columns and options of `work`; `memory_bytes` is what the device may be filled with.

    `fixed`: names of options that stay.
    """
    ladder = list(rungs(work.options, fixed))
    found = tuple(_rung(work, options, adds, memory_bytes) for options, adds in ladder)
    tried = [options for options, _ in ladder]
    if "micro_batch_sequences" not in fixed:
        tried = [smaller for options in tried for smaller in _halvings(options, work.batch_sequences)]
    chosen = _first_that_fits(work, tried, memory_bytes)
    least = min(predict(replace(work, options=options, owned=0)).total for options in tried)
    nearest = None if chosen else _nearest(work, tried, memory_bytes)
    return Search(work.owned, found, chosen, nearest, least)


def rungs(options: Options, fixed: Collection[str] = frozenset()) -> Iterator[tuple[Options, str]]:
    """`options`, then cumulatively with each option of the ladder that saves memory."""
    yield options, ""
    for name, value in LADDER:
        if name in fixed or _RISING[name].index(value) <= _RISING[name].index(getattr(options, name)):
            continue
        changed = replace(options, **{name: value})
        yield changed, changed.changes(options)[0]
        options = changed


def most_columns(work: Workload, memory_bytes: int) -> int | None:
    """Most columns that fit with the options of `work`; None where not even none does."""
    fitting = [owned for owned in range(work.model.num_experts + 1) if _fits(replace(work, owned=owned), memory_bytes)]
    return max(fitting, default=None)


def one_step_down(options: Options, batch_sequences: int, sequence_length: int) -> Options | None:
    """The next cheapest way to less memory that a peer can take while it runs; None at the end.

    Halves the micro-batch down to 4,096 tokens, then checkpoints more, then halves on.
    """
    smaller = halved(options, batch_sequences)
    if smaller != options and smaller.micro_batch_sequences * sequence_length >= CHEAP_TOKENS:
        return smaller
    more = _CHECKPOINTING[_CHECKPOINTING.index(options.activation_checkpointing) + 1 :]
    if more:
        return replace(options, activation_checkpointing=more[0])
    return smaller if smaller != options else None


def with_largest_micro_batch(work: Workload, memory_bytes: int) -> Options:
    """The options of `work` with the largest micro-batch that fits and divides a rank's batch, never a smaller one."""
    share, own = work.batch_sequences // work.ranks, work.options.micro_batch_sequences
    most = max(own, MOST_TOKENS // work.sequence_length)
    sizes = [size for size in range(own, most + 1) if size == own or share % size == 0]
    sized = (replace(work.options, micro_batch_sequences=size) for size in reversed(sizes))
    return next((options for options in sized if _fits(replace(work, options=options), memory_bytes)), work.options)


def sizes_to_time(options: Options, batch_sequences: int, sequence_length: int) -> tuple[int, ...]:
    """The micro-batch of `options` and two smaller ones that may be as fast, the largest first."""
    sizes = [each.micro_batch_sequences for each in islice(_halvings(options, batch_sequences), 3)]
    return tuple(size for size in sizes if size == sizes[0] or size * sequence_length >= CHEAP_TOKENS)


def _rung(before: Workload, options: Options, adds: str, memory_bytes: int) -> Rung:
    work = replace(before, options=options)
    share = max(1, work.batch_sequences // work.ranks)
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    sized = {size: replace(options, micro_batch_sequences=size) for size in sizes}
    fitting = [size for size, changed in sized.items() if _fits(replace(work, options=changed), memory_bytes)]
    return Rung(work.options, adds, predict(work), most_columns(work, memory_bytes), max(fitting, default=0))


def _first_that_fits(work: Workload, tried: list[Options], memory_bytes: int) -> Fit | None:
    """Two passes: first with micro-batches that cost no speed, then with any."""
    configured = work.options.micro_batch_sequences * work.sequence_length
    for least_tokens in (min(CHEAP_TOKENS, configured), 0):
        for options in tried:
            enough = options.micro_batch_sequences * work.sequence_length >= least_tokens
            changed = replace(work, options=options)
            if enough and _fits(changed, memory_bytes):
                return Fit(options, work.owned, predict(changed))
    return None


def _nearest(work: Workload, tried: list[Options], memory_bytes: int) -> Fit | None:
    """Most columns that any options hold, by the first options that hold them."""
    held = [(most_columns(replace(work, options=options), memory_bytes), options) for options in tried]
    fitting = [(columns, options) for columns, options in held if columns is not None]
    if not fitting:
        return None
    best, options = max(fitting, key=itemgetter(0))
    return Fit(options, best, predict(replace(work, options=options, owned=best)))


def _halvings(options: Options, batch_sequences: int) -> Iterator[Options]:
    """`options`, and with ever smaller micro-batches."""
    yield options
    while (smaller := halved(options, batch_sequences)) != options:
        options = smaller
        yield options


def _fits(work: Workload, memory_bytes: int) -> bool:
    return predict(work).total <= memory_bytes
