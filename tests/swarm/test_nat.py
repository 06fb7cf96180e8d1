"""Two peers behind routers of their own, that nobody can dial, train with one that can be: no port is forwarded.

The routers are real processes between network namespaces (`tests/swarm/nat_box.py`); needs the right to make
those. The same story is told on the in-memory network by tests/sync/test_nat.py.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from spes_p2p.consensus.messages import QUORUM
from spes_p2p.sync.chain import Chain
from tests.swarm.micro import LOCAL, MICRO, config_of, local_swarm, peer_id_of, recomputed_state
from tests.swarm.namespaces import Lab, may_make_namespaces

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2 for network namespaces"),
]
PORT = 4001
HIDDEN = ("home1", "home2")
NAMES = ("public", *HIDDEN)
OVERRIDES = ("swarm.min_peers=3", "swarm.heartbeat_seconds=1.0", "swarm.target_replicas=2")
ROUNDS = 6


def counted(folder: Path) -> set[str]:
    """Whose work some round has counted: a busy machine makes a peer late for others."""
    chain = Chain(folder / "run" / "chain")
    return {entry.peer for at in range(2, chain.length) for entry in chain.commit(at).manifest.roster}


def test_two_homes_train_with_the_bootstrap_node_alone(tmp_path: Path, tokens: Path) -> None:
    """`--serve`: it is the only host that can be dialled, and it trains nothing."""
    agreed = ("swarm.min_peers=2", *OVERRIDES[1:])
    with ExitStack() as stack:
        lab = Lab(stack)
        hosts = {"bootstrap": lab.host("bootstrap", "net", "11.0.0.10")}
        for at, name in enumerate(HIDDEN):
            hosts[name] = lab.home(name, "net", f"11.0.0.{101 + at}", [f"11.0.0.10:{PORT}"])
        swarm = stack.enter_context(local_swarm(tmp_path, hosts))
        limits = ["--max-upload", "100Mbit", "--max-download", "100Mbit"]
        listen = ["--host-maddrs", f"/ip4/11.0.0.10/tcp/{PORT}"]
        swarm.bootstrap("tiny", tokens, [*MICRO, *agreed, "--serve", *limits, *listen])
        for name in HIDDEN:
            swarm.peer(name, tokens, [*LOCAL, "--client-mode"])
        swarm.wait_for_round(ROUNDS, HIDDEN, 180.0)
        swarm.wait_until(lambda: len(counted(tmp_path / "bootstrap")) == 2, "both are counted", HIDDEN, 180.0)
        for name in HIDDEN:
            swarm.processes[name].send(signal.SIGTERM)
        codes = [swarm.processes[name].wait(30.0) for name in HIDDEN]
        swarm.processes["bootstrap"].send(signal.SIGTERM)
        codes.append(swarm.processes["bootstrap"].wait(30.0))

    assert codes == [0, 0, 0]
    chain = Chain(tmp_path / "bootstrap" / "run" / "chain")
    server = next(member.peer for member in chain.commit(0).manifest.members if not member.trains)
    for commit in map(chain.commit, range(2, ROUNDS + 1)):
        assert commit.certificate.kind == QUORUM
        assert server not in {entry.peer for entry in commit.manifest.roster}
        assert all(p.reducer == server or p.contributors == (p.reducer,) for p in commit.manifest.slices)
    for name in ("bootstrap", *HIDDEN):
        round, root = recomputed_state(tmp_path / name, config_of(agreed))
        assert round >= ROUNDS, name
        assert root == chain.commit(round).manifest.state_root.hex(), name
    for process in swarm.processes.values():
        assert "Traceback" not in process.output(), process.name


@pytest.mark.thorough
def test_two_homes_train_with_one_public_peer(tmp_path: Path, tokens: Path) -> None:
    with ExitStack() as stack:
        lab = Lab(stack)
        hosts = {
            "bootstrap": lab.host("bootstrap", "net", "11.0.0.10"),
            "public": lab.host("public", "net", "11.0.0.20"),
        }
        doors = [f"{host.address}:{PORT}" for host in hosts.values()]
        for at, name in enumerate(HIDDEN):
            hosts[name] = lab.home(name, "net", f"11.0.0.{101 + at}", doors)
        swarm = stack.enter_context(local_swarm(tmp_path, hosts))
        swarm.bootstrap("tiny", tokens, [*MICRO, *OVERRIDES, "--host-maddrs", f"/ip4/11.0.0.10/tcp/{PORT}"])
        swarm.peer("public", tokens, [*LOCAL, "--host-maddrs", f"/ip4/11.0.0.20/tcp/{PORT}"])
        swarm.peer("home1", tokens, [*LOCAL, "--client-mode"])
        swarm.peer("home2", tokens, LOCAL)
        swarm.wait_for_round(ROUNDS, NAMES, 180.0)
        swarm.wait_until(lambda: len(counted(tmp_path / "public")) == 3, "all are counted", NAMES, 180.0)
        public = peer_id_of(swarm.processes["public"])
        for name in NAMES:
            swarm.processes[name].send(signal.SIGTERM)
        said = {name: swarm.processes[name].output() for name in NAMES}
        codes = [swarm.processes[name].wait(30.0) for name in NAMES]

    assert codes == [0, 0, 0]
    assert f"others can dial this machine, at /ip4/11.0.0.20/tcp/{PORT}" in said["public"]
    assert "nobody can dial this machine" in said["home2"]
    assert "dial this machine" not in said["home1"], "it was told so"
    chain = Chain(tmp_path / "public" / "run" / "chain")
    found = [chain.commit(round) for round in range(2, ROUNDS + 1)]
    assert {commit.certificate.kind for commit in found} == {QUORUM}
    for commit in found:
        assert {piece.block for piece in commit.manifest.slices} == set(
            range(1 + config_of(OVERRIDES).model.num_experts)
        )
        assert all(p.reducer == public or p.contributors == (p.reducer,) for p in commit.manifest.slices)
    roots = {
        commit.manifest.round: commit.manifest.state_root.hex() for commit in map(chain.commit, range(chain.length))
    }
    for name in NAMES:
        round, root = recomputed_state(tmp_path / name, config_of(OVERRIDES))
        assert root == roots[round], name
    for process in swarm.processes.values():
        assert "Traceback" not in process.output(), process.name
