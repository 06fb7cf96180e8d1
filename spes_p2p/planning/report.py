"""Everything that `spes-p2p plan` says, as values: the question, the answer, and the one sentence about what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.planning.budget import MARGIN_SHARE
from spes_p2p.planning.data_traffic import DataCost, data_cost
from spes_p2p.planning.memory import Memory, Workload, predict, state_bytes
from spes_p2p.planning.options import EIGHT_BIT_INSTALL, KEYS, Options, is_agreed
from spes_p2p.planning.search import Fit, Rung, Search, search
from spes_p2p.planning.sizes import Sizes, flops_per_token
from spes_p2p.planning.traffic import Link, SyncCost, stored_bytes, sync_costs
from spes_p2p.planning.units import gib_text

NO_LIMIT = Link()
FULL_VALUE_BYTES = 16
"""Training everything in fp32 with AdamW: value, gradient, two moments."""


@dataclass(frozen=True)
class Question:
    """`memory_bytes` None: of a GPU that nobody named. `owned`: columns wanted. `tokens_per_second`: of each peer."""

    config: Config
    owned: int
    peers: int
    ranks: int = 1
    memory_bytes: int | None = None
    link: Link = NO_LIMIT
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Answer:
    question: Question
    sizes: Sizes
    memory: Memory
    state_bytes: int
    """Of what is trained and the bank: without activations, logits and buffers."""
    search: Search | None
    costs: tuple[SyncCost, ...]
    data: DataCost | None
    """What a peer without a copy fetches to train on; None where peers bring their own."""

    @property
    def usable_bytes(self) -> int:
        """Of the GPU, after the margin that `join` keeps."""
        return usable(self.question.memory_bytes or 0)

    @property
    def full_bytes(self) -> int:
        """The same of the whole model, trained in fp32 with AdamW."""
        return FULL_VALUE_BYTES * self.sizes.total

    def sentence(self) -> str:
        """Whether it fits, and if not, the nearest thing that does; nothing where no GPU was named."""
        return "" if self.search is None else _sentence(self, self.search)

    def eight_bit_words(self) -> str:
        """What a machine must install for what fits, where that counts on 8-bit moments; else nothing."""
        fit = None if self.search is None else self.search.chosen or self.search.nearest
        if fit is None or fit.options.optimizer != "adamw8bit":
            return ""
        return f"adamw8bit needs, in the clone of each peer that uses it: {EIGHT_BIT_INSTALL}"

    def to_json(self) -> dict[str, Any]:
        """Bytes, seconds and values throughout; shares between 0 and 1."""
        question, config = self.question, self.question.config
        return {
            "run_id": config.run.run_id,
            "parameters": {
                "total": self.sizes.total,
                "active": self.sizes.active,
                "shared": self.sizes.shared,
                "column": self.sizes.column,
                "trained": self.sizes.trained(question.owned),
            },
            "owned_experts": question.owned,
            "micro_batch_sequences": config.optimizer.micro_batch_sequences,
            "flops_per_token": flops_per_token(config.model, config.data.sequence_length, question.owned),
            "memory": _memory_json(self.memory) | {"state": self.state_bytes, "fully_trained_state": self.full_bytes},
            "fits": None if self.search is None else self._fits_json(self.search),
            "stored_state": stored_bytes(config),
            "peers": question.peers,
            "steps_per_round": steps_per_round_at(config, config.scheduler.total_steps),
            "tokens_per_second": question.tokens_per_second,
            "sync": {cost.codec: _cost_json(cost) for cost in self.costs},
            "data": None if self.data is None else _data_json(self.data),
        }

    def _fits_json(self, found: Search) -> dict[str, Any]:
        before = Options.of(self.question.config)
        return {
            "gpu_memory": self.question.memory_bytes,
            "usable": self.usable_bytes,
            "options": [_rung_json(rung) for rung in found.rungs],
            "chosen": _fit_json(found.chosen, before),
            "nearest": _fit_json(found.nearest, before),
            "sentence": self.sentence(),
        }


def answer(question: Question) -> Answer:
    """All of it; milliseconds."""
    config, owned = question.config, question.owned
    work = Workload.of(config, owned, ranks=question.ranks)
    found = None if question.memory_bytes is None else search(work, usable(question.memory_bytes))
    costs = sync_costs(config, question.peers, owned, question.link, question.tokens_per_second)
    data = data_cost(config, question.peers, question.tokens_per_second, costs[0])
    return Answer(question, Sizes.of(config.model), predict(work), state_bytes(work), found, costs, data)


def usable(memory_bytes: int) -> int:
    """What is left after the margin."""
    return memory_bytes - round(MARGIN_SHARE * memory_bytes)


def organisers_choice(override: str) -> bool:
    """Whether `override` is of a field that all peers must have equal."""
    return is_agreed(override.partition("=")[0])


def _sentence(self: Answer, found: Search) -> str:
    before, columns = Options.of(self.question.config), _columns(found.wanted)
    needed = gib_text(self.memory.total)
    room = f"the {gib_text(self.usable_bytes)} that {gib_text(self.question.memory_bytes or 0)} leave after a margin"
    if found.chosen is not None and found.chosen.options == before:
        return f"{columns} fit as configured: {needed} of {room}."
    if found.chosen is not None:
        return f"{columns} as configured need {needed}, more than {room}; they fit with {_text(found.chosen, before)}."
    not_at_all = f"{columns} do not fit into {room} with any options (as configured they need {needed})"
    if found.nearest is None:
        least = gib_text(found.least_bytes)
        return f"{not_at_all}, nor does a peer without columns, which needs {least}; take a larger GPU."
    nearest = f"{_columns(found.nearest.owned)} with {_text(found.nearest, before)}"
    return f"{not_at_all}; the nearest that fits: {nearest}."


def _text(fit: Fit, before: Options) -> str:
    changes = ", ".join(fit.options.changes(before)) or "the options as they are"
    return f"{changes} ({gib_text(fit.memory.total)})"


def _columns(count: int) -> str:
    return f"{count} expert column{'' if count == 1 else 's'}"


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "parts": dict(memory.parts),
        "allocated": memory.allocated,
        "slack": memory.slack,
        "context": memory.context,
        "total": memory.total,
        "peak": memory.moment,
        "pinned_host": memory.host,
    }


def _rung_json(rung: Rung) -> dict[str, Any]:
    return {
        "adds": rung.adds,
        "organisers_choice": bool(rung.adds) and organisers_choice(rung.adds),
        "total": rung.memory.total,
        "most_columns": rung.most_columns,
        "largest_micro_batch": rung.largest_micro_batch,
    }


def _fit_json(fit: Fit | None, before: Options) -> dict[str, Any] | None:
    if fit is None:
        return None
    options = {KEYS[name]: getattr(fit.options, name) for name in KEYS}
    return {
        "owned_experts": fit.owned,
        "total": fit.memory.total,
        "overrides": list(fit.options.changes(before)),
        "options": options,
    }


def _cost_json(cost: SyncCost) -> dict[str, Any]:
    return {
        "bytes_up": round(cost.bytes_up),
        "bytes_down": round(cost.bytes_down),
        "seconds": cost.seconds,
        "share_of_time": cost.share,
        "bytes_per_day": None if cost.bytes_per_day is None else round(cost.bytes_per_day),
    }


def _data_json(data: DataCost) -> dict[str, Any]:
    day, served = data.per_day(data.round_bytes), data.per_day(data.served_bytes)
    return {
        "per_trained_byte": data.per_trained_byte,
        "most_per_trained_byte": data.most_per_trained_byte,
        "bytes_per_round": round(data.round_bytes),
        "most_bytes_per_round": round(data.most_round_bytes),
        "bytes_per_day": None if day is None else round(day),
        "served_per_round": round(data.served_bytes),
        "least_served_by_copies_per_round": round(data.least_served_bytes),
        "served_per_day": None if served is None else round(served),
    }
