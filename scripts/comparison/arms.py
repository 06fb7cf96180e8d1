"""The methods that are compared ("arms"): what each changes of a config, and what all of them have in common.

An arm is a line of `ARMS`. Another one is another line; `Setting.config_of` makes a config of it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spes_p2p.config.load import load_config, parse_override
from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.errors import ConfigError
from spes_p2p.peer.options import config_path

PERIODS = 5
"""With two periods, so many times as often are shared weights averaged as a column is handed out."""
REFERENCE = "spes"
"""What the other arms are compared with, where it is among them and nothing else is asked for."""

ARMS = {
    "centralized": "each={experts} swarm.min_peers=1 batch={whole_batch} micro={micro}",
    "diloco": "each={experts} swarm.target_replicas={peers}",
    "diloco-often": "diloco sync.steps_per_round={often}",
    "diloco-two-periods": "diloco two-periods",
    "nesterov": "diloco sync.outer=nesterov",
    "nesterov-often": "nesterov sync.steps_per_round={often}",
    "nesterov-small": "nesterov-often sync.outer_lr=0.3 sync.outer_momentum=0.7",
    "spes": "",
    "spes-often": "sync.steps_per_round={often}",
    "merge": "sync.merge_alpha={merge} sync.merge_interval={H}",
    "two-owners": "each={twice} swarm.target_replicas=2",
    "three-owners": "each={thrice} swarm.target_replicas=3",
    "rising": "sync.steps_per_round=[[{twice_H},{quarter_H}],[0,{H}]]",
    "two-periods": "sync.steps_per_round={often} sync.expert_rounds={periods}",
    "two-periods-two-owners": "two-periods two-owners",
    "int4": "two-periods sync.codec=int4",
    "wsd": "two-periods scheduler.name=wsd",
    "muon": "two-periods optimizer.name=muon",
    "muon-int4": "muon sync.codec=int4",
    "muon-ternary": "muon-int4 sync.expert_codec=ternary",
    "diloco-muon-ternary": "diloco-muon sync.codec=ternary",
    "diloco-muon": "diloco optimizer.name=muon",
    "diloco-muon-int4": "diloco-muon sync.codec=int4",
    "diloco-often-muon": "diloco-often optimizer.name=muon",
    "diloco-often-muon-int4": "diloco-often-muon sync.codec=int4",
    "two-owners-muon-int4": "two-owners optimizer.name=muon sync.codec=int4",
    "two-owners-often-muon-int4": "two-owners sync.steps_per_round={often} optimizer.name=muon sync.codec=int4",
    "centralized-muon": "centralized optimizer.name=muon",
    "spes-muon-int4": "optimizer.name=muon sync.codec=int4",
    "eight-peers-muon-int4": "eight-peers optimizer.name=muon sync.codec=int4",
    "eight-peers-two-owners-muon-int4": "eight-peers-muon-int4 each={each} swarm.target_replicas=2",
    "eight-peers": "two-periods each={half} swarm.min_peers={twice_peers} batch={half_batch} micro={half_micro}",
}  # fmt: skip
"""What each changes of SPES with merges off, one owner a column and H steps a round: names of other arms, and fields.

What stands in braces is told by `terms`, the short names of fields by `FIELDS`.
"""
FIELDS = {
    "each": "swarm.experts_per_peer",
    "batch": "optimizer.batch_sequences",
    "micro": "optimizer.micro_batch_sequences",
}


@dataclass(frozen=True)
class Benchmark:
    """A model and data that arms are compared on, by name."""

    config: str
    steps: int
    peers: int
    steps_per_round: int
    overrides: tuple[str, ...]

    def setting(self, steps: int, given: Sequence[str]) -> Setting:
        """For so many steps, with `given` overrides on top."""
        return Setting(Path(self.config), steps, self.peers, self.steps_per_round, self.overrides, tuple(given))


BENCHMARKS = {
    "small-cpu": Benchmark(
        "tiny", 800, 4, 50,
        (
            "model.d_model=128", "model.num_layers=4", "model.num_heads=4", "model.num_experts=8", "model.top_k=2",
            "model.expert_ffn=128", "model.norm_topk=true", "data.sequence_length=128", "data.held_out_fraction=0.05",
            "optimizer.batch_sequences=8", "optimizer.lr=0.002", "scheduler.warmup_steps=80", "eval.sequences=384",
        ),
    ),
}  # fmt: skip
"""small-cpu: 2M parameters, bytes of the standard library's sources, 4 peers x 8 x 128 tokens a step."""

PLAIN = (
    "sync.steps_per_round={H}", "sync.merge_alpha=0", "swarm.min_peers={peers}", "swarm.target_replicas=1",
    "swarm.experts_per_peer={each}",
)  # fmt: skip
"""What every arm sets first."""
FROM_CONFIG = {"{batch}", "{half_batch}", "{whole_batch}", "{micro}", "{half_micro}", "{merge}"}
"""Values that follow what the config says of the same field: an override of it is not lost."""
OPTIONS = {
    "sync.steps_per_round": "--steps-per-round", "swarm.min_peers": "--peers", "run.seed": "--seeds",
    "data.path": "--data",
}  # fmt: skip
"""Fields that have an option of their own."""
ARMS_FILE = "scripts/comparison/arms.py"


def terms(config: Config, peers: int, steps_per_round: int) -> dict[str, int | float]:
    """What an arm's line may say in braces. H is `steps_per_round`."""
    experts, batch, H = config.model.num_experts, config.optimizer.batch_sequences, steps_per_round
    micro, half_batch = config.optimizer.micro_batch_sequences, max(1, batch // 2)
    each = -(-experts // peers)
    often = max(1, H // PERIODS)
    periods = max(1, H // often)
    return {
        "experts": experts, "peers": peers, "twice_peers": 2 * peers,
        "each": each, "half": max(1, each // 2), "twice": min(experts, 2 * each), "thrice": min(experts, 3 * each),
        "batch": batch, "half_batch": half_batch, "whole_batch": batch * peers,
        "micro": micro, "half_micro": math.gcd(micro, half_batch),
        "H": H, "twice_H": 2 * H, "quarter_H": max(1, H // 4),
        "often": often, "periods": periods,
        "merge": config.sync.merge_alpha or 0.05,
    }  # fmt: skip


def check_arms(arms: Sequence[str]) -> None:
    """Raises ConfigError for one that is not there."""
    for name in arms:
        if name not in ARMS:
            near = difflib.get_close_matches(name, ARMS, n=1)
            fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ARMS)}"
            raise ConfigError(f"--arms has {name!r}, an unknown arm", fix=fix)


def in_short(arm: str, known: dict[str, int | float]) -> str:
    """What an arm changes, as its line says it: names of other arms and whole names of fields."""
    words = ARMS[arm].format(**known).split()
    return " ".join(word if word in ARMS else f"`{_field(word)}`" for word in words)


def _set_by(arm: str) -> dict[str, str]:
    """The fields that an arm sets, with values that may have braces; the last word of each counts."""
    return dict(word.split("=", 1) for word in (*PLAIN, *_words(arm)))


def _words(name: str) -> Iterator[str]:
    for word in ARMS[name].split():
        yield from _words(word) if word in ARMS else (_field(word),)


def _field(word: str) -> str:
    """`field=value` with the field's whole name."""
    field, equals, value = word.partition("=")
    return FIELDS.get(field, field) + equals + value


@dataclass(frozen=True)
class Setting:
    """What all arms of a comparison have in common. `given` are overrides of the caller, `named` of a benchmark."""

    config: Path
    steps: int
    peers: int
    steps_per_round: int
    named: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def check(self, arms: Sequence[str]) -> None:
        """Raises ConfigError for unknown arms, rounds that do not fit, ignored overrides, and arms with more data."""
        check_arms(arms)
        if rest := self.steps % self.steps_per_round:
            more = self.steps + self.steps_per_round - rest
            raise ConfigError(
                f"--steps {self.steps} is no multiple of --steps-per-round {self.steps_per_round}, and a round is "
                f"never cut short: it would train {more} steps",
                fix=f"use --steps {more}, or another --steps-per-round",
            )
        for override in self.given:
            self._check_override(override, arms)
        self._check_sequences(arms)

    def _check_sequences(self, arms: Sequence[str]) -> None:
        """Of a step, of all peers together."""
        batch, odd = self.base.optimizer.batch_sequences, dict[str, int]()
        for arm in arms:
            values = {field: value.format(**self.known) for field, value in _set_by(arm).items()}
            sequences = int(values["swarm.min_peers"]) * int(values.get("optimizer.batch_sequences", batch))
            if sequences != self.peers * batch:
                odd[arm] = sequences
        if odd:
            raise ConfigError(
                f"optimizer.batch_sequences is {batch}, so that a step of the other arms has {self.peers * batch} "
                f"sequences, but of {', '.join(f'{arm} {sequences}' for arm, sequences in odd.items())}",
                fix="make it even, or leave out those arms with --arms",
            )

    def _check_override(self, override: str, arms: Sequence[str]) -> None:
        key, value = parse_override(override)
        option = OPTIONS.get(key)
        if key in ("run.seed", "data.path"):
            raise ConfigError(f"{key} is set by {option}", fix=f"give {option} instead of {override}")
        overruled = [arm for arm in arms if self._overrules(arm, key, value)]
        if not overruled:
            return
        if option is not None:
            fix = f"give {option} instead of {override}"
        else:
            fix = f"leave out {override}, or those arms; or add a line with it to ARMS in {ARMS_FILE}"
        named = f"the arm{'s' if len(overruled) > 1 else ''} {', '.join(overruled)}"
        raise ConfigError(f"{key} is set by {named}: {override} would do nothing there", fix=fix)

    def _overrules(self, arm: str, key: str, value: object) -> bool:
        found = _set_by(arm).get(key)
        return (
            found is not None
            and found not in FROM_CONFIG
            and parse_override(f"{key}={found.format(**self.known)}")[1] != value
        )

    @cached_property
    def base(self) -> Config:
        """The config with everything but what an arm sets."""
        return self._load(())

    @cached_property
    def known(self) -> dict[str, int | float]:
        """What stands for the words in braces."""
        return terms(self.base, self.peers, self.steps_per_round)

    def config_of(self, arm: str, seed: int, data: Path) -> Config:
        """Of one arm and one seed."""
        own = [f"{field}={value.format(**self.known)}" for field, value in _set_by(arm).items()]
        return self._load((f"data.path={data}", *own, f"run.seed={seed}"))

    def _load(self, more: Sequence[str]) -> Config:
        return load_config(config_path(self.config), (*self.named, *self._schedule, *self.given, *more))

    @cached_property
    def _schedule(self) -> tuple[str, ...]:
        """The learning rate has fallen when the training ends, and rises over a quarter of it at most.

        Where the caller sets `scheduler.total_steps` nothing is changed.
        """
        given = {parse_override(override)[0] for override in self.given}
        if "scheduler.total_steps" in given:
            return ()
        long = ("scheduler.total_steps=1000000000", "scheduler.decay_steps=1")
        longest = load_config(config_path(self.config), (*self.named, *self.given, *long)).scheduler.warmup_steps
        fields = {
            "scheduler.total_steps": self.steps,
            "scheduler.warmup_steps": min(longest, self.steps // 4),
            "scheduler.decay_steps": max(1, self.steps // 5),
        }
        return tuple(f"{field}={value}" for field, value in fields.items() if field not in given)


def steps_of(config: Config, steps: int) -> int:
    """Where the round ends in which a run makes its step number `steps`."""
    step = 0
    while step < steps:
        step += steps_per_round_at(config, step)
    return step
