"""What a peer takes on with the memory that it finds: the same arithmetic as `plan`, with a margin.

Numbers are measured by somebody else; options that all peers must have equal are never touched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from spes_p2p.config.schema import Config
from spes_p2p.planning.memory import CONTEXT_BYTES, Workload, column_value_bytes, predict
from spes_p2p.planning.options import FOR_ALL, KEYS, Options
from spes_p2p.planning.search import Search, most_columns, search, with_largest_micro_batch
from spes_p2p.planning.units import gib_text

MARGIN_SHARE = 0.08
"""Of all memory, kept free because a prediction may be wrong by that much."""
FRAGMENT_SHARE = 0.05
"""Share of all memory kept free once a peak has been measured."""


@dataclass(frozen=True)
class Device:
    """What was measured before the model was made: `free_bytes` of `total_bytes`, on each of `ranks` devices."""

    free_bytes: int
    total_bytes: int
    ranks: int = 1
    is_gpu: bool = True
    is_bf16: bool = True
    """What a GPU computes in; else it is fp16."""

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - round(MARGIN_SHARE * self.total_bytes)

    def workload(self, config: Config, owned: int) -> Workload:
        work = Workload.of(config, owned, ranks=self.ranks)
        return replace(work, compute_bytes=2 if self.is_gpu else 4, is_bf16=self.is_bf16)

    @property
    def paid_bytes(self) -> int:
        """Bytes of `Memory.total` that were in use when free memory was measured: CUDA's context only."""
        return CONTEXT_BYTES if self.is_gpu else 0

    @property
    def limit(self) -> int:
        """To be compared with `Memory.total`."""
        return self.usable_bytes + self.paid_bytes


def columns_that_fit(config: Config, device: Device) -> int:
    """Columns that a peer has memory for, besides training the shared parameters; 0 also where not even these fit."""
    work = device.workload(config, 0)
    return most_columns(work, device.limit) or 0


def fitted(config: Config, device: Device, wanted: int, chosen_by_hand: Collection[str]) -> tuple[Config, str]:
    """`config` with the cheapest local options that make `wanted` columns fit, and what there is to say about it.

    What a person has set (dotted keys in `chosen_by_hand`) stays. Nothing is computed twice that need not be, and the
    micro-batch is the largest that fits (at most `search.MOST_TOKENS`): whether a smaller one is faster is timed later.
    The same config where nothing makes it fit, with a warning.
    """
    work = device.workload(config, wanted)
    fixed = frozenset({FOR_ALL, *(name for name, key in KEYS.items() if key in chosen_by_hand)})
    if "activation_checkpointing" not in fixed:
        work = replace(work, options=replace(work.options, activation_checkpointing="none"))
    found = search(work, device.limit, fixed)
    if found.chosen is None:
        return config, not_enough(found, device.usable_bytes, predict(work).total - device.paid_bytes)
    chosen = found.chosen.options
    if "micro_batch_sequences" not in fixed:
        chosen = with_largest_micro_batch(replace(work, options=chosen), device.limit)
    changes = chosen.changes(Options.of(config))
    if not changes:
        return config, ""
    room = gib_text(device.usable_bytes)
    return chosen.applied(config), f"{wanted} expert columns fit into {room} with {', '.join(changes)}"


def not_enough(found: Search, usable_bytes: int, needed_bytes: int) -> str:
    """One sentence for a search without result, with the nearest thing that does fit."""
    asked = f"{found.wanted} expert columns need {gib_text(needed_bytes)}, more than the {gib_text(usable_bytes)} here"
    if found.nearest is None:
        return f"{asked}, and no local options make even a peer without columns fit"
    return f"{asked}, even with all local options; {found.nearest.owned} would fit"


def columns_by_experience(
    owned: int, spare_bytes: int, total_bytes: int, column_values: int, options: Options | None = None
) -> int:
    """Columns that there is memory for, where training `owned` of them left `spare_bytes` at its peak."""
    room = spare_bytes - round(FRAGMENT_SHARE * total_bytes)
    return owned + max(0, int(room // (column_values * column_value_bytes(options or Options()))))
