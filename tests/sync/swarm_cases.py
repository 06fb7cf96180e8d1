"""What the tests of whole in-memory swarms share: a very small run, and the questions that all of them ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.data.leases import take
from spes_p2p.ids import Hash
from spes_p2p.sync.messages import Commit
from spes_p2p.testing.memory_swarm import MemorySwarm
from spes_p2p.testing.virtual_time import run_virtual

T = TypeVar("T")
TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SMALL = (
    "model.d_model=8",
    "model.num_heads=2",
    "model.head_dim=4",
    "model.num_layers=2",
    "model.num_experts=4",
    "model.expert_ffn=4",
    "model.vocab_size=32",
    "model.embedding_rows=32",
    "sync.tile_values=128",
    "sync.slice_tiles=4",
    "sync.steps_per_round=10",
    "swarm.experts_per_peer=2",
)


def small_config(*overrides: str, peers: int = 3) -> Config:
    """A run of about 2,000 values in 18 tiles, 4 columns."""
    return load_config(TINY, [*SMALL, f"swarm.min_peers={peers}", *overrides])


def in_swarm(
    folder: Path,
    play: Callable[[MemorySwarm], Awaitable[T]],
    config: Config | None = None,
    seed: int = 0,
    leased: bool = True,
    max_virtual_seconds: float = 3600.0,
) -> T:
    """Plays one story on a virtual clock; a driver that broke fails it."""

    async def main() -> T:
        swarm = MemorySwarm(config or small_config(), folder, seed, leased)
        result = await play(swarm)
        await swarm.stop()
        for life in swarm.lives:
            if life.failures:
                raise life.failures[0]
        return result

    return run_virtual(main(), max_virtual_seconds)


def commits(swarm: MemorySwarm, name: str = "") -> list[Commit]:
    """The chain, from the disk of one peer (any that is up)."""
    chain = swarm.peers[name].chain if name else swarm.up[0].chain  # type: ignore[index]
    return [chain.commit(round) for round in range(chain.length)]


def check_agreement(swarm: MemorySwarm) -> dict[int, Hash]:
    """All versions on all disks have, hashed afresh, the roots that the chain says; all chains agree. Returns roots."""
    roots: dict[int, Hash] = {}
    for peer in swarm.up:
        for round in peer.store.rounds():
            peer.store.verify(round)
            assert peer.store.version(round).root == peer.chain.commit(round).manifest.state_root, peer.name
        for round in range(peer.chain.length):
            root = peer.chain.commit(round).manifest.state_root
            assert roots.setdefault(round, root) == root, f"{peer.name} has another round {round}"
    return roots


def check_leases(swarm: MemorySwarm, name: str = "") -> int:
    """No position was counted twice, nothing below the cursor is nowhere; the number of positions counted."""
    chain = commits(swarm, name)
    used: set[int] = set()
    for parent, child in zip(chain, chain[1:], strict=False):
        leases = parent.manifest.leases
        for entry in child.manifest.roster:
            spans, _ = take(leases.of(entry.peer), entry.sequences)
            positions = {at for start, stop in spans for at in range(start, stop)}
            assert len(positions) == entry.sequences
            assert not positions & used, f"round {child.manifest.round} counts positions of {entry.peer} again"
            used |= positions
    last = chain[-1].manifest.leases
    waiting = [span for _, ranges in last.held for span in ranges] + list(last.returned)
    held = [at for start, stop in waiting for at in range(start, stop)]
    assert not used & set(held)
    assert used | set(held) == set(range(last.cursor))
    return len(used)
