"""What a round puts on the links, by the plan that every peer follows (consensus/slices.py).

A slice with m contributors is sent to its reducer by the m - 1 others, and handed out by it to the N - 1 others. So
with N peers, P_s shared values, and columns of P_c values with r owners each (links alike, columns dealt evenly) a peer
with O columns sends, and receives, in values:

    up    2 (N - 1) / N P_s  +  O ((r - 1) + (N - 1)) / r P_c
    down  2 (N - 1) / N P_s  +  2 O (r - 1) / r P_c  +  (E_o - O) P_c

where E_o columns have an owner. With r = 1 and E = N O that is 2(N-1)/N P_s + (N-1)/N P_e both ways. Any holder may
hand a tile on, so that one peer may send more and another less; the sum stays. The momentum of an outer optimizer is no
part of this: all peers compute it, and only who fetches a state gets it from others. Leaves out what messages add: the
same for any model, 130 KB a round and peer among four, and 900 bytes a heartbeat for each other member both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.codecs.sizes import CODECS, Codec, bytes_a_value
from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.planning.sizes import Sizes

DAY_SECONDS = 86_400


@dataclass(frozen=True)
class OneWay:
    """Values that go one way in a round: of the shared parameters and of expert columns."""

    shared: float = 0.0
    columns: float = 0.0

    @property
    def values(self) -> float:
        return self.shared + self.columns

    def bytes_in(self, codec: Codec, expert_codec: Codec | None = None) -> float:
        return self.shared * bytes_a_value(codec) + self.columns * bytes_a_value(expert_codec or codec)


@dataclass(frozen=True)
class Traffic:
    """What one peer sends and receives in a round."""

    up: OneWay
    down: OneWay


@dataclass(frozen=True)
class Link:
    """Bytes a second; None: no limit known."""

    up: float | None = None
    down: float | None = None

    @property
    def is_known(self) -> bool:
        return self.up is not None or self.down is not None

    def seconds(self, up_bytes: float, down_bytes: float) -> float:
        """At the link's full speed both ways at once."""
        return max(up_bytes / self.up if self.up else 0.0, down_bytes / self.down if self.down else 0.0)


@dataclass(frozen=True)
class SyncCost:
    """One codec, or one for shared parameters and one for columns, on one link. None where something was not given."""

    codec: str
    bytes_up: float
    bytes_down: float
    seconds: float | None
    """One sync; needs a link."""
    share: float | None
    """Of all time that training waits for syncs; needs tokens a second, too."""
    bytes_per_day: float | None
    """Up and down together; needs the same."""


@dataclass(frozen=True)
class Spread:
    """Who owns how much: `owned` columns this peer, r = `replicas` >= 1 owners each of the `covered` (E_o) columns."""

    peers: int
    owned: float
    replicas: float
    covered: float

    @classmethod
    def of(cls, num_experts: int, peers: int, owned: int, owned_by_others: int, most_replicas: int) -> Spread:
        """All columns are covered before one has a second owner. Where there is room for more than `most_replicas`
        of each, all peers own less."""
        room = owned + (peers - 1) * owned_by_others
        owners = min(room, most_replicas * num_experts)
        own = owned * owners / room if room else 0.0
        return cls(peers, own, max(1.0, owners / num_experts), min(num_experts, owners))

    @classmethod
    def in_run(cls, config: Config, peers: int, owned: int) -> Spread:
        """With room for `owned` columns here, and at each other peer for as many as the run asks for."""
        swarm = config.swarm
        return cls.of(config.model.num_experts, peers, owned, swarm.experts_per_peer, swarm.target_replicas)


def round_traffic(sizes: Sizes, spread: Spread, expert_rounds: int = 1, vocabulary_rounds: int = 1) -> Traffic:
    """The formula above, on average: columns travel in every `expert_rounds`-th round, embedding and head once in
    `vocabulary_rounds`.

    For one peer alone, nothing moves.
    """
    others, replicas, owned = spread.peers - 1, spread.replicas, spread.owned
    if not others:
        return Traffic(OneWay(), OneWay())
    shared = sizes.shared - sizes.vocabulary * (1 - 1 / vocabulary_rounds)
    share, column = 2 * others / spread.peers * shared, sizes.column / expert_rounds
    up = owned * (replicas - 1 + others) / replicas * column
    down = (2 * owned * (replicas - 1) / replicas + spread.covered - owned) * column
    return Traffic(OneWay(share, up), OneWay(share, down))


def sync_costs(
    config: Config, peers: int, owned: int, link: Link, tokens_per_second: float | None
) -> tuple[SyncCost, ...]:
    """What is configured, then each other codec: `owned` columns here, `swarm.experts_per_peer` at each other peer.

    All peers are equally fast.
    """
    sizes = Sizes.of(config.model)
    spread = Spread.in_run(config, peers, owned)
    sync, traffic = config.sync, Traffic(OneWay(), OneWay())
    if sync.enabled:
        traffic = round_traffic(sizes, spread, sync.expert_rounds, sync.vocabulary_rounds)
    training = round_tokens(config) / tokens_per_second if tokens_per_second else None
    hidden = training if training is not None and sync.overlap else 0.0
    configured = config.sync.codec, config.sync.expert_codec
    pairs = [configured, *((codec, codec) for codec in CODECS if (codec, codec) != configured)]
    found = []
    for shared, columns in pairs:
        up, down = (way.bytes_in(shared, columns) for way in (traffic.up, traffic.down))
        name = shared if shared == columns else f"{shared}, experts {columns}"
        found.append(_cost(name, up, down, link, training, hidden))
    return tuple(found)


def stored_bytes(config: Config) -> int:
    """A committed state on disk, which is what a newcomer fetches: fp32 values, as many again for outer momentum."""
    return 4 * Sizes.of(config.model).total * (1 if config.sync.outer == "none" else 2)


def round_tokens(config: Config) -> int:
    """Tokens that one peer trains in a round, late in the run: H B S."""
    steps = steps_per_round_at(config, config.scheduler.total_steps)
    return steps * config.optimizer.batch_sequences * config.data.sequence_length


def _cost(
    name: str, up: float, down: float, link: Link, training_seconds: float | None, hidden_seconds: float
) -> SyncCost:
    """`up`, `down`: bytes."""
    seconds = link.seconds(up, down) if link.is_known else None
    share = per_day = None
    if seconds is not None and training_seconds is not None:
        waits = max(0.0, seconds - hidden_seconds)
        share = waits / (waits + training_seconds)
        per_day = (up + down) * DAY_SECONDS / (waits + training_seconds)
    return SyncCost(name, up, down, seconds, share, per_day)
