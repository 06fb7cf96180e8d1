"""Real peers beside strangers of whom most lie: rounds go on, nobody is dropped, and the model learns as without them.

The lies are the crudest and the narrowest one; scripts/bench_attacks.py measures the others, and the loss in longer
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest

from spes_p2p.consensus.manifest import SHARE, Manifest
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Eval
from spes_p2p.quickstart.processes import LOOPBACK, Host, Running
from spes_p2p.sync.chain import Chain
from tests.fork_server import ForkedSwarm
from tests.swarm.lying_peer import LIE, LIES
from tests.swarm.micro import LOCAL, MICRO, identity_of, nothing_left

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
TRUSTED, HONEST = ("p0", "p1", "p2", "p3"), "honest"
ROUNDS = 10
AGREED = (
    *MICRO, "sync.codec=int4", "sync.overlap=true", "sync.vocabulary_rounds=2", "sync.merge_alpha=0",
    "swarm.trusted=vouched", "swarm.experts_per_peer=2", "swarm.heartbeat_seconds=1",
)  # fmt: skip


class LyingSwarm(ForkedSwarm):
    """Peers whose names are those of lies run another program."""

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path,
        host: Host = LOOPBACK,
        fresh: bool = False,
    ) -> Running:
        if (name := output.parent.name) in LIES:
            module, environment = "tests.swarm.lying_peer", {**environment, LIE: name}
        return super().launch(module, arguments, environment, output, errors, host, fresh)


@dataclass(frozen=True)
class Story:
    """A run that ended: who took part, what the trusted peers committed, and the held-out loss by round."""

    ids: Mapping[str, PeerId]
    chain: Sequence[Manifest]
    losses: Mapping[int, float]


def told(folder: Path, tokens: Path, strangers: Sequence[str]) -> Story:
    folder.mkdir()
    names = (*TRUSTED, *strangers)
    with nothing_left() as mark, LyingSwarm(folder, environment=mark) as swarm:
        node = swarm.bootstrap("tiny", tokens, [*AGREED, f"swarm.min_peers={len(names)}"])
        ids = {name: identity_of(folder / name) for name in names}
        swarm.ask("run", "vouch", *(ids[name] for name in TRUSTED), "--folder", str(node.folder))
        for name in names:
            swarm.peer(name, tokens, ["--until-round", str(ROUNDS), *LOCAL])
        swarm.wait_for_end(TRUSTED, 100.0)
        evals = [event for name in TRUSTED for _, event in swarm.processes[name].seen if isinstance(event, Eval)]
        for process in swarm.processes.values():
            process.end()
    chain = Chain(folder / "p0" / "run" / "chain")
    by_round = {number: [event.loss for event in evals if event.round == number] for number in range(ROUNDS + 1)}
    return Story(
        ids, [chain.commit(number).manifest for number in range(chain.length)],
        {number: mean(losses) for number, losses in by_round.items() if losses},
    )  # fmt: skip


def test_a_run_learns_beside_strangers_of_whom_most_lie(tmp_path: Path, tokens: Path) -> None:
    lying, clean = told(tmp_path / "lying", tokens, (HONEST, *LIES)), told(tmp_path / "clean", tokens, (HONEST,))
    everybody, trusted = set(lying.ids.values()), {lying.ids[name] for name in TRUSTED}
    assert len(lying.chain) > ROUNDS
    assert all({member.peer for member in made.members} == everybody for made in lying.chain)
    owners = [set(some) for made in lying.chain for some in made.ownership]
    assert all(len(some & trusted) == 1 for some in owners)
    assert any(some - trusted for some in owners)
    averages = {credit.peer: credit.average / SHARE for credit in lying.chain[ROUNDS].strangers}
    assert averages[lying.ids["turned-sign"]] < 0.15
    assert averages[lying.ids[HONEST]] > 0.5
    assert lying.losses[ROUNDS] < lying.losses[0] - 1
    assert lying.losses[ROUNDS] < 1.05 * clean.losses[ROUNDS]
