"""Everything that `spes-p2p plan` says, as values: the question, the answer, and the one sentence about what fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spes_p2p.config.schema import Config
from spes_p2p.observe.metrics import amount_text
from spes_p2p.planning.budget import MARGIN_SHARE
from spes_p2p.planning.memory import Memory, Workload, predict, state_bytes
from spes_p2p.planning.options import FOR_ALL, KEYS, Options
from spes_p2p.planning.search import Fit, Search, search
from spes_p2p.planning.sizes import Sizes, flops_per_token
from spes_p2p.planning.traffic import Link, SyncCost, round_tokens, stored_bytes, sync_costs
from spes_p2p.planning.units import gib_text

NO_LIMIT = Link()
MOST_WAITING = 0.1
"""Share of the time that training may wait for syncs."""
TOY_SECONDS = 0.1
"""A round in which a machine trains less than this is of a toy, which no setting makes fit for slow links."""
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

    def too_slow(self) -> str:
        """What there is to say of links that are too slow for the run as configured; nothing where they are not."""
        share = self.costs[0].share
        if share is None or share <= MOST_WAITING:
            return ""
        assert self.question.tokens_per_second is not None
        training = round_tokens(self.question.config) / self.question.tokens_per_second
        if training < TOY_SECONDS:
            return (
                f"A model for trying things out: a round of it is less than {TOY_SECONDS:g} s of training on such a "
                "GPU, so nearly all of the time goes into syncing. It runs all the same, as fast as the links."
            )
        return (
            f"Too slow: {share:.0%} of the time goes into syncing. The config home has the settings that save bytes "
            "and waiting, docs/results.md what each costs. Faster links help, and more tokens a step "
            "(optimizer.batch_sequences)."
        )

    def trusted(self) -> str:
        """How many peers the organiser has to vouch for, where only those own columns alone; nothing elsewhere."""
        config, owned = self.question.config, self.question.owned
        if config.swarm.trusted != "vouched" or not owned:
            return ""
        needed = amount_text(-(-config.model.num_experts // owned), "trusted peer")
        return (
            f"Only trusted peers own columns alone: it takes {needed} with {amount_text(owned, 'column')} each to own "
            f"all {config.model.num_experts}, whoever else trains."
        )

    def to_json(self) -> dict[str, Any]:
        """Bytes, seconds and values throughout; shares between 0 and 1."""
        config, found, sizes = self.question.config, self.search, self.sizes
        counts = {"total": sizes.total, "active": sizes.active, "trained": sizes.trained(self.question.owned)}
        return {
            "run_id": config.run.run_id,
            "owned_experts": self.question.owned,
            "peers": self.question.peers,
            "parameters": asdict(sizes) | counts,
            "flops_per_token": flops_per_token(config.model, config.data.sequence_length, self.question.owned),
            "memory": asdict(self.memory) | {"allocated": self.memory.allocated, "total": self.memory.total},
            "usable": self.usable_bytes,
            "fits": found and asdict(found),
            "sentence": self.sentence(),
            "stored_state": stored_bytes(config),
            "sync": {cost.codec: asdict(cost) for cost in self.costs},
        }


def answer(question: Question) -> Answer:
    """All of it; milliseconds."""
    config, owned = question.config, question.owned
    work = Workload.of(config, owned, ranks=question.ranks)
    found = None if question.memory_bytes is None else search(work, usable(question.memory_bytes))
    costs = sync_costs(config, question.peers, owned, question.link, question.tokens_per_second)
    return Answer(question, Sizes.of(config.model), predict(work), state_bytes(work), found, costs)


def usable(memory_bytes: int) -> int:
    """What is left after the margin."""
    return memory_bytes - round(MARGIN_SHARE * memory_bytes)


def organisers_choice(override: str) -> bool:
    """Whether `override` is of a field that all peers should have equal."""
    return override.partition("=")[0] == KEYS[FOR_ALL]


def _sentence(self: Answer, found: Search) -> str:
    before, columns = Options.of(self.question.config), amount_text(found.wanted, "expert column")
    needed = gib_text(self.memory.total)
    room = f"the {gib_text(self.usable_bytes)} that {gib_text(self.question.memory_bytes or 0)} leave after a margin"
    if found.chosen is not None and found.chosen.options == before:
        return f"{columns} {'fits' if found.wanted == 1 else 'fit'} with these settings: {needed} of {room}."
    if found.chosen is not None:
        return f"{columns} as configured need {needed}, more than {room}; they fit with {_text(found.chosen, before)}."
    not_at_all = f"{columns} do not fit into {room} with any options (as configured they need {needed})"
    if found.nearest is None:
        least = gib_text(found.least_bytes)
        return f"{not_at_all}, nor does a peer without columns, which needs {least}; take a larger GPU."
    nearest = f"{amount_text(found.nearest.owned, 'expert column')} with {_text(found.nearest, before)}"
    return f"{not_at_all}; the closest option that fits: {nearest}."


def _text(fit: Fit, before: Options) -> str:
    changes = ", ".join(fit.options.changes(before)) or "the options as they are"
    return f"{changes} ({gib_text(fit.memory.total)})"
