"""What a peer without `--data` fetches to train on, apart from what syncs move.

Sequences of s bytes are leased one by one in random order, and come in pieces of P bytes, each with a proof of h. A
piece holds parts of 1 + P / s sequences. In one epoch dealt to N peers, a peer that keeps what it fetched needs a piece
with the chance 1 - (1 - 1/N)^(1 + P/s), and trains on an N-th of the tokens. So for each byte that it trains on it
fetches

    over an epoch       (P + h) / P  N (1 - (1 - 1/N)^(1 + P/s))
    nothing kept        (P + h) / P  (1 + P / s)                   the bound of the former for many peers

That is what it needs itself, with `data.copies: 0`. Where a peer keeps copies for others, a dataset that fits on its
disk comes as a whole, once. Of one that does not fit, each peer takes its part of c copies of all that is trained on,
q = min(1, c / N), so that for each byte that it trains on it fetches

    the dataset fits    (P + h) / P  N
    nothing kept        (P + h) / P  (1 + P / s)  (1 + q (N - 1))

One peer alone: (P + h) / P = 1.06. All of it comes from those who have the data: the bootstrap node, peers with
`--data`, and, of pieces that several peers need, peers that fetched them before. In an epoch each piece leaves the
first two at least once: (P + h) / P for each byte trained. Leaves out requests, leases that somebody else trained on in
the end, and the held-out sequences of who evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config.schema import Config
from spes_p2p.planning.traffic import DAY_SECONDS, SyncCost, round_tokens

PIECE_BYTES = 8 * 2**10
"""P, as in data/pieces.py."""
PROOF_BYTES = 15 * 32
"""h: hashes in the tree over a shard of 256 MiB, the default of `tokenize`."""
SHORT_IDS = 2**16
"""Up to so many ids a token takes 2 bytes, else 4."""


@dataclass(frozen=True)
class DataCost:
    """Bytes; those of a day need tokens a second."""

    per_trained_byte: float
    """Over the first epoch, where the whole dataset fits on the peer's disk; nothing in later ones."""
    most_per_trained_byte: float
    """Where hardly anything of the dataset fits on the disks, copies for others included."""
    trained_bytes: float
    """Of tokens, that one peer trains on in a round."""
    peers: int
    rounds_per_day: float | None

    @property
    def round_bytes(self) -> float:
        """That one peer fetches in a round, over an epoch."""
        return self.per_trained_byte * self.trained_bytes

    @property
    def most_round_bytes(self) -> float:
        return self.most_per_trained_byte * self.trained_bytes

    @property
    def served_bytes(self) -> float:
        """That all who have the data serve in a round together, where no peer has brought its own."""
        return self.peers * self.round_bytes

    @property
    def least_served_bytes(self) -> float:
        """Of these, what the bootstrap node and peers with a copy serve at least."""
        return self.peers * fetched_share(1, 1.0) * self.trained_bytes

    def per_day(self, round_bytes: float) -> float | None:
        return None if self.rounds_per_day is None else round_bytes * self.rounds_per_day


def data_cost(config: Config, peers: int, tokens_per_second: float | None, sync: SyncCost) -> DataCost | None:
    """None where peers bring data of their own. `sync`: what a round waits for beside training."""
    if config.data.source == "local":
        return None
    token_bytes = 2 if config.model.vocab_size <= SHORT_IDS else 4
    unit = config.data.sequence_length * token_bytes
    per_day = None
    if tokens_per_second:
        per_day = DAY_SECONDS * tokens_per_second / round_tokens(config) * (1 - (sync.share or 0.0))
    together = 1 + PIECE_BYTES / unit
    copies = min(config.data.copies, peers)
    return DataCost(
        fetched_share(1, 1.0) * peers if copies else fetched_share(peers, together),
        fetched_share(None, together) * (1 + copies / peers * (peers - 1)),
        token_bytes * round_tokens(config),
        peers,
        per_day,
    )


def fetched_share(peers: int | None, together: float) -> float:
    """Bytes that a peer needs itself for each byte trained; `together`: sequences of a piece, in part; `peers` None:
    nothing is kept."""
    kept = together if peers is None else peers * (1 - (1 - 1 / peers) ** together)
    return (PIECE_BYTES + PROOF_BYTES) / PIECE_BYTES * kept
