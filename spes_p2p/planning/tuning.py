"""Which settings of a run suit the links and the memory of its peers, and why: `spes-p2p plan --tune`.

What costs the model least comes first, by what was measured (planning/measured.py), and each step is taken only while
peers still wait too long: fewer bits, training on while a round is synced, embedding and head in every few rounds, even
fewer bits for columns, columns in every few rounds with guests in between, even fewer bits for all, longer rounds, only
the largest changes. Waiting is by `sync_costs`; nothing is tried out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from spes_p2p.codecs.sizes import Codec, bytes_a_value
from spes_p2p.config.load import changed
from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.config.sync import MOST_TILE_VALUES
from spes_p2p.observe.metrics import amount_text
from spes_p2p.planning.measured import Effect, effects
from spes_p2p.planning.memory import Workload
from spes_p2p.planning.report import Question, usable
from spes_p2p.planning.search import Search, search
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import round_tokens, sync_costs

MOST_WAITING = 0.1
"""Share of the time that training may wait for syncs."""
GUEST_RANK = 16
COLUMN_ROUNDS = (2, 5, 10)
VOCABULARY_ROUNDS = 5
MUCH_VOCABULARY = 1 / 4
"""Of the shared parameters: from there on it is worth a setting of its own."""
MOST_STEPS = 500
"""Inner steps between two syncs of the same values, H: DiLoCo (arXiv 2311.08105) goes that far."""
COARSE = ("sync.expert_codec=ternary",)
TOY_SECONDS = 0.1
"""A round in which a machine trains less than this is of a toy, which no setting makes fit for slow links."""
TUNE_FIX = "give --uplink 20Mbit --downlink 100Mbit, and --gpu RTX4090 or --tokens-per-second N"
OWNERS = 2
"""Of a column: it goes on where one of them leaves."""


@dataclass(frozen=True)
class Step:
    """Overrides that belong together, what they are for, and what share of the time peers wait with all up to here."""

    overrides: tuple[str, ...]
    reason: str
    effect: Effect | None
    """On the loss; None where nobody has measured it."""
    waiting: float


@dataclass(frozen=True)
class Tuning:
    """`before`: the share of the time that peers wait as configured."""

    before: float
    steps: tuple[Step, ...]
    config: Config
    note: str
    """What no setting mends; empty where there is nothing."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """All of them, each key once."""
        last = {override.partition("=")[0]: override for step in self.steps for override in step.overrides}
        return tuple(last.values())

    @property
    def after(self) -> float:
        return self.steps[-1].waiting if self.steps else self.before

    def to_json(self) -> dict[str, Any]:
        """Shares between 0 and 1."""
        steps = [
            {
                "overrides": step.overrides, "reason": step.reason, "share": step.waiting,
                "loss": step.effect and asdict(step.effect),
            }
            for step in self.steps
        ]  # fmt: skip
        shares = {"share_before": self.before, "share": self.after}
        return {**shares, "overrides": self.overrides, "steps": steps, "note": self.note}

    @property
    def is_enough(self) -> bool:
        return self.after <= MOST_WAITING


@dataclass(frozen=True)
class Choice:
    """`measured`: what planning/measured.py calls it."""

    overrides: tuple[str, ...]
    reason: str
    measured: str

    def step(self, waiting: float) -> Step:
        """Taken, with what is known of its effect."""
        return Step(self.overrides, self.reason, effects().get(self.measured), waiting)


def waiting(question: Question) -> float | None:
    """The share of the time that peers wait for syncs; None where links or speed were not given."""
    found = question
    return sync_costs(found.config, found.peers, found.owned, found.link, found.tokens_per_second)[0].share


def tune(question: Question, fixed: Collection[str] = (), owners: bool = True) -> Tuning | None:
    """The steps to take, in their order; None where links or speed were not given.

    `fixed`: keys of settings that stay. `owners`: how many columns each peer trains is chosen, too.
    """
    before = waiting(question)
    if before is None:
        return None
    config, steps = question.config, list[Step]()
    choice, note = _owners(question, fixed) if owners else (None, "")
    if choice is not None:
        config = changed(config, choice.overrides)
        steps.append(choice.step(_share(question, config)))
    for saving in SAVINGS:
        choices = [choice for choice in saving(config) if not keys_of(choice.overrides) & set(fixed)]
        if choices and _share(question, config) > MOST_WAITING:
            tried = [choice.step(_share(question, changed(config, choice.overrides))) for choice in choices]
            steps.append(next((step for step in tried if step.waiting <= MOST_WAITING), tried[-1]))
            config = changed(config, steps[-1].overrides)
    return Tuning(before, tuple(steps), config, note)


def keys_of(overrides: Iterable[str]) -> set[str]:
    """What they set."""
    return {override.partition("=")[0].strip() for override in overrides}


def _share(question: Question, config: Config) -> float:
    found = waiting(question.of(config))
    assert found is not None
    return found


def _owners(question: Question, fixed: Collection[str]) -> tuple[Choice | None, str]:
    """Enough columns on each peer that all have two owners, or one where they do not fit.

    Nothing where they would have none, with a word where memory is why.
    """
    config, experts = question.config, question.config.model.num_experts
    if "swarm.target_replicas" in fixed or not config.sync.enabled:
        return None, ""
    least = math.ceil(experts / question.peers)
    most = experts - 1 if config.model.guest_rank and "model.guest_rank" in fixed else experts
    wanted, has = min(most, math.ceil(OWNERS * experts / question.peers)), config.swarm.experts_per_peer
    if "swarm.experts_per_peer" in fixed:
        wanted = has
    elif question.memory_bytes is not None:
        room = usable(question.memory_bytes)
        while (found := search(Workload.of(config, wanted, ranks=question.ranks), room)).chosen is None:
            if wanted <= least:
                return None, _too_few_peers(found, experts)
            wanted -= 1
    replicas = min(OWNERS, wanted * question.peers // experts)
    if wanted < least or (wanted, replicas) == (has, config.swarm.target_replicas):
        return None, ""
    reason = "each column has two owners: it goes on where one leaves" if replicas > 1 else "what fits into memory"
    columns = (f"swarm.experts_per_peer={wanted}",) if wanted != has else ()
    no_guests = ("model.guest_rank=0",) if config.model.guest_rank and wanted == experts else ()
    overrides = (*columns, f"swarm.target_replicas={replicas}", *no_guests)
    return Choice(overrides, reason, f"owners-{OWNERS}" if replicas == OWNERS else ""), ""


def _too_few_peers(found: Search, experts: int) -> str:
    """What to do where so few columns do not fit that with fewer some of the run's would have no owner."""
    fitting = 0 if found.nearest is None else found.nearest.owned
    if not fitting:
        return f"not even 1 of {amount_text(experts, 'column')} fits; take a larger GPU"
    columns, peers = amount_text(found.wanted, "column"), amount_text(math.ceil(experts / fitting), "peer")
    return f"{columns} a peer do not fit, and with fewer some of {experts} have no owner; take at least {peers}"


def _fewer_bits(config: Config) -> list[Choice]:
    """What rounding loses goes out later."""
    bits: dict[Codec, str] = {"int8": "a quarter of the bytes", "int4": "an eighth of the bytes"}
    fewer: dict[Codec, tuple[Codec, ...]] = {"fp32": ("int8", "int4"), "bf16": ("int8", "int4"), "int8": ("int4",)}
    left = [codec for codec in fewer.get(config.sync.codec, ()) if codec == "int8" or not _is_audited(config)]
    return [Choice((f"sync.codec={codec}", *_for_columns(config, codec)), bits[codec], codec) for codec in left]


def _for_columns(config: Config, codec: Codec) -> tuple[str, ...]:
    """The same for columns, unless they have fewer bits already."""
    return (f"sync.expert_codec={codec}",) if bytes_a_value(codec) < bytes_a_value(config.sync.expert_codec) else ()


def _coarse_columns(config: Config) -> list[Choice]:
    """The one owner of a column goes on from its own values, which have all that rounding leaves out; two do not."""
    if config.sync.expert_codec != "int4" or _is_audited(config):
        return []
    alone = Choice(COARSE, "columns in 1.7 bits: their owner goes on from its own values", "ternary-columns")
    paired = Choice(COARSE, "columns in 1.7 bits; what rounding leaves out follows later", "ternary-owners-2")
    return {1: [alone], 2: [paired]}.get(config.swarm.target_replicas, [])


def _overlap(config: Config) -> list[Choice]:
    if config.sync.overlap:
        return []
    return [Choice(("sync.overlap=true",), "peers train on while a round is synced", "overlap")]


def _vocabulary_seldom(config: Config) -> list[Choice]:
    sizes, sync = Sizes.of(config.model), config.sync
    if sizes.vocabulary < MUCH_VOCABULARY * sizes.shared or sizes.vocabulary < sync.tile_values:
        return []
    if sync.vocabulary_rounds > 1 or sync.outer != "none" or _is_audited(config):
        return []
    overrides, measured = (f"sync.vocabulary_rounds={VOCABULARY_ROUNDS}",), f"vocabulary-{VOCABULARY_ROUNDS}"
    return [Choice(overrides, f"embedding and head are averaged once in {VOCABULARY_ROUNDS} rounds", measured)]


def _columns_seldom(config: Config) -> list[Choice]:
    """With guests, where some columns are others'."""
    guests, model = guest_overrides(config, GUEST_RANK), config.model
    if model.guest_rank or _is_audited(config) or config.swarm.experts_per_peer >= model.num_experts:
        guests = ()
    if math.lcm(model.d_model, model.expert_ffn) > MOST_TILE_VALUES:  # no tile could hold whole rows of its matrices
        guests = ()
    rest = ", guests train them in between" if guests or config.model.guest_rank else ""
    more = [rounds for rounds in COLUMN_ROUNDS if rounds > config.sync.expert_rounds]
    measured = "columns-{}-guests" if rest else "columns-{}"
    return [
        Choice(
            (f"sync.expert_rounds={n}", *guests), f"a column goes out in one of {n} rounds{rest}", measured.format(n)
        )
        for n in more
    ]


def _coarse_shared(config: Config) -> list[Choice]:
    """Of these everybody loses what rounding leaves out, until it follows."""
    if (config.sync.codec, config.sync.expert_codec) != ("int4", "ternary") or _is_audited(config):
        return []
    return [Choice(("sync.codec=ternary",), "all in 1.7 bits; what rounding leaves out follows later", "ternary")]


def _longer(config: Config) -> list[Choice]:
    """The first rounds of a run stay as short as they are."""
    end, ramp = config.scheduler.total_steps, config.sync.steps_per_round
    steps = steps_per_round_at(config, end)  # H
    early = [] if isinstance(ramp, int) else [stage for stage in ramp if 0 < stage[0] <= end]
    found = list[Choice]()
    for times in (times for times in (2, 4, 8) if times * steps <= MOST_STEPS):
        rounds = json.dumps([*early, (0, times * steps)]) if early else str(times * steps)
        reason = f"a sync every {times * steps} steps"
        found.append(Choice((f"sync.steps_per_round={rounds}",), reason, f"longer-{times}"))
    return found


SAVINGS = _fewer_bits, _overlap, _vocabulary_seldom, _coarse_columns, _columns_seldom, _coarse_shared, _longer
"""By the loss that each costs for what it saves."""


def _is_audited(config: Config) -> bool:
    """Work is audited in no run with guests or a codec coarser than int8 (docs/security.md), and nobody has tried how
    well where vocabulary takes turns."""
    return config.swarm.faults == "byzantine"


def guest_overrides(config: Config, rank: int) -> tuple[str, ...]:
    """The rank, and tiles that hold whole rows of the experts' matrices."""
    if not rank:
        return ()
    row = math.lcm(config.model.d_model, config.model.expert_ffn)
    return f"model.guest_rank={rank}", f"sync.tile_values={max(1, config.sync.tile_values // row) * row}"


def too_slow(question: Question) -> str:
    """What there is to say of links that are too slow for a run as configured; nothing where they are not."""
    found = tune(question, owners=False)
    if found is None or found.before <= MOST_WAITING:
        return ""
    assert question.tokens_per_second is not None
    training = round_tokens(question.config) / question.tokens_per_second
    if training < TOY_SECONDS:
        return (
            f"A model for trying things out: a round of it is less than {TOY_SECONDS:g} s of training on such a GPU, "
            "so nearly all of the time goes into syncing. It runs all the same, as fast as the links."
        )
    slow = f"Too slow: {found.before:.0%} of the time goes into syncing."
    mended = f"With {' '.join(found.overrides)} it is {found.after:.0%} (why: --tune)." if found.steps else ""
    rest = "" if found.is_enough else "Faster links help, and more tokens a step (optimizer.batch_sequences)."
    return " ".join(words for words in (slow, mended, rest) if words)
