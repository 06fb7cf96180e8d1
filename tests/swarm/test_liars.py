"""Real peers of which one lies: the others go on, with one state that learns, and ban whom they know to have lied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Eval, Peer, Round, Warning
from spes_p2p.ownership.assign import columns_of
from spes_p2p.quickstart.processes import LOOPBACK, Host, Running
from spes_p2p.sync.chain import Chain
from tests.cli.conftest import spes_p2p
from tests.fork_server import ForkedSwarm
from tests.swarm.lying_peer import LIE
from tests.swarm.micro import LOCAL, MICRO, config_of, nothing_left, peer_id_of, recomputed_state

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
HONEST, LIAR = ("p0", "p1", "p2", "p3"), "liar"
ROUNDS = 6
CLIP = ("sync.aggregate=clip", "swarm.faults=byzantine", f"swarm.min_peers={len(HONEST) + 1}", "sync.merge_alpha=0")
ALONE = (*CLIP, "swarm.target_replicas=1", "swarm.experts_per_peer=2")
TOGETHER = (*CLIP, "swarm.target_replicas=5", "swarm.experts_per_peer=8")


class LyingSwarm(ForkedSwarm):
    """One of its peers runs another program."""

    attack = ""

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
        if output.parent.name == LIAR:
            module, environment = "tests.swarm.lying_peer", {**environment, LIE: self.attack}
        return super().launch(module, arguments, environment, output, errors, host, fresh)


@pytest.mark.parametrize(
    ("attack", "agreed", "is_banned"),
    [
        ("sole-owner", ALONE, False),
        pytest.param("nan", TOGETHER, False, marks=pytest.mark.thorough),
        pytest.param("claimed-flip", TOGETHER, False, marks=pytest.mark.thorough),
        pytest.param("nan-tiles", TOGETHER, True, marks=pytest.mark.thorough),
        pytest.param("noisy-tiles", TOGETHER, True, marks=pytest.mark.thorough),
    ],
)
def test_a_run_goes_on_with_one_that_lies(
    tmp_path: Path, tokens: Path, attack: str, agreed: tuple[str, ...], is_banned: bool
) -> None:
    with nothing_left() as mark, LyingSwarm(tmp_path, environment=mark) as swarm:
        swarm.attack = attack
        swarm.bootstrap("tiny", tokens, [*MICRO, *agreed])
        for name in (*HONEST, LIAR):
            swarm.peer(name, tokens, ["--until-round", str(ROUNDS), *LOCAL])
        swarm.wait_for_end(HONEST, 300.0)
        liar = PeerId(peer_id_of(swarm.processes[LIAR]))
        events = {name: [event for _, event in swarm.processes[name].seen] for name in HONEST}
        for process in swarm.processes.values():
            process.end()
    config = config_of(agreed)
    last = {name: [event for event in some if isinstance(event, Round)][-1] for name, some in events.items()}
    states = {recomputed_state(tmp_path / name, config) for name in HONEST}
    assert states == {(event.round, event.model_hash) for event in last.values()}
    assert len(states) == 1
    chain = Chain(tmp_path / "p0" / "run" / "chain")
    manifests = [chain.commit(round).manifest for round in range(chain.length)]
    assert manifests[-1].banned == ((liar,) if is_banned else ())
    evals = sorted((event.round, event.loss) for some in events.values() for event in some if isinstance(event, Eval))
    assert evals[-1][1] < evals[0][1] - 0.3
    if attack == "noisy-tiles":
        proof = next(tmp_path.glob("p*/run/proofs/*.proof"))
        assert f"{liar} has signed" in spes_p2p("run", "inspect", "--proof", str(proof)).output
        bans = [event for some in events.values() for event in some if isinstance(event, Peer) and event.proof]
        assert {(event.change, event.who) for event in bans} == {("banned", liar)}
        assert all(Path(event.proof).exists() for event in bans)
    if attack == "sole-owner":
        pieces = [piece for manifest in manifests for piece in manifest.slices if piece.block]
        assert not [piece for piece in pieces if liar in piece.contributors]
        assert any(refused(before, after, liar) for before, after in pairwise(manifests))
        said = [event.message for some in events.values() for event in some if isinstance(event, Warning)]
        assert any("would make the model worse on held-out text" in message for message in said)


def refused(before: Manifest, after: Manifest, liar: PeerId) -> set[int]:
    """Columns of a liar whose work counts, and that keep their values while others do not."""
    done = {piece.block - 1 for piece in after.slices if piece.block}
    is_there = done and any(entry.peer == liar for entry in after.roster)
    return set(columns_of(before.ownership, liar)) - done if is_there else set()
