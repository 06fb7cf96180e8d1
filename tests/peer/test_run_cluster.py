"""scripts/run_cluster.sh and slurm.sbatch: a scheduler's variables become a bootstrap node and a peer a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peer.real import SMALL, make_tokens, quiet_port

SCRIPTS = Path(__file__).parents[2] / "scripts"
NOT_OURS = re.compile(r"(SPES_|SLURM_|RANK|WORLD_SIZE|LOCAL_|MASTER_|NPROC_)")
FAKE = """\
#!/bin/bash
# Stands in for spes-p2p: says what it was given. A bootstrap node stays until it is told to end.
{ printf '%s\\n' "$@"; env | grep -E '^(RANK|WORLD_SIZE|MASTER_ADDR|LOCAL_RANK)=' || true; } >"$SPES_SHARED/$1.$$"
if [ "$1" = bootstrap ]; then
    [ -z "${FAIL:-}" ] || { echo "error: $FAIL"; exit 1; }
    trap 'echo told >"$SPES_SHARED/ended"; exit 0' TERM
    echo "  spes-p2p join --initial-peers /ip4/10.0.0.1/tcp/1/p2p/Qm --run-id x"
    while :; do sleep 0.05; done
fi
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not NOT_OURS.match(key)}
    return clean | {"SPES_SHARED": str(folder), "SPES_CONFIG": "tiny"} | variables


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With a program that only says what it was given."""
    program = folder / "program"
    program.write_text(FAKE)
    program.chmod(0o755)
    return subprocess.run(
        [str(SCRIPTS / "run_cluster.sh"), *arguments],
        env=environment(folder, SPES_PROGRAM=str(program), **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def given(folder: Path, command: str) -> list[str]:
    """The arguments of the only call of a command."""
    (file,) = folder.glob(f"{command}.[0-9]*")
    return file.read_text().splitlines()


def test_node_0_is_bootstrap_node_and_peer(tmp_path: Path) -> None:
    overrides = ("optimizer.lr=1e-4", "output.tensorboard=true")
    result = run(
        tmp_path, *overrides, RANK="0", WORLD_SIZE="2", MASTER_ADDR="node-a", NPROC_PER_NODE="4", SPES_DATA="/t",
        SPES_ROUNDS="3", LOCAL_RANK="0",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert given(tmp_path, "bootstrap") == [
        *("bootstrap", "--config", "tiny", "--output", f"{tmp_path}/bootstrap"),
        *("--host-maddrs", "/ip4/0.0.0.0/tcp/31337", "--announce-maddrs", "/dns4/node-a/tcp/31337", "--data", "/t"),
        *("swarm.min_peers=2", *overrides),
    ]
    assert given(tmp_path, "join") == [
        *("join", "--initial-peers", "/ip4/10.0.0.1/tcp/1/p2p/Qm", "--output", f"{tmp_path}/peer-0"),
        *("--data", "/t", "--local-ranks", "4", "--until-round", "3", "output.tensorboard=true"),
    ]  # and none of the scheduler's variables: its ranks are its own
    assert (tmp_path / "ended").exists()  # the bootstrap node was told to


def test_other_nodes_are_peers_alone_with_slurms_variables_too(tmp_path: Path) -> None:
    (tmp_path / "initial-peer").write_text("/ip4/10.0.0.9/tcp/1/p2p/Qm\n")
    result = run(tmp_path, SLURM_NODEID="1", SLURM_JOB_NUM_NODES="4", MASTER_ADDR="10.0.0.9", SLURM_GPUS_ON_NODE="8")
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob("bootstrap*"))
    assert given(tmp_path, "join") == [
        *("join", "--initial-peers", "/ip4/10.0.0.9/tcp/1/p2p/Qm", "--output", f"{tmp_path}/peer-1"),
        *("--local-ranks", "8"),
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK is ''"),
        ({"RANK": "0", "WORLD_SIZE": "many", "MASTER_ADDR": "a"}, "WORLD_SIZE is 'many'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK is 2 of 2 nodes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is empty"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "FAIL": "no such config"}, "the bootstrap node ended"),
    ],
)
def test_what_is_missing_is_named(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    result = run(tmp_path, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert " / fix: " in result.stderr
    assert variables.get("FAIL", "") in result.stderr


def test_the_batch_script_starts_it_once_a_node(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(SCRIPTS / "slurm.sbatch"), "optimizer.lr=1e-4"]
    result = subprocess.run(
        command, env=environment(tmp_path, PATH=path, SPES_SCRIPTS=str(SCRIPTS)), capture_output=True, text=True
    )
    wanted = ["--kill-on-bad-exit=0", "--export=ALL", "bash", str(SCRIPTS / "run_cluster.sh"), "optimizer.lr=1e-4"]
    assert result.stdout.splitlines() == wanted
    lost = subprocess.run(
        command, env=environment(tmp_path, PATH=path, SLURM_SUBMIT_DIR="/"), capture_output=True, text=True
    )
    assert (lost.returncode, "set SPES_SCRIPTS" in lost.stderr) == (2, True)


@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_two_nodes_on_one_machine_train_together(tmp_path: Path) -> None:
    program, data, shared = tmp_path / "program", make_tokens(tmp_path), tmp_path / "shared"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spes_p2p.cli.main "$@"\n')
    program.chmod(0o755)
    variables = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1", "SPES_DATA": str(data),
        "SPES_ROUNDS": "2", "SPES_PORT": str(quiet_port()), "SPES_PROGRAM": str(program), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    nodes = []
    for rank in (1, 0):  # node 0 comes last: the other waits for it
        command = [str(SCRIPTS / "run_cluster.sh"), *SMALL, "swarm.experts_per_peer=4"]
        log = (tmp_path / f"node-{rank}.log").open("wb")
        nodes.append(
            subprocess.Popen(command, env=environment(shared, RANK=str(rank), **variables), stdout=log, stderr=log)
        )
        log.close()
    try:
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
                node.wait(30)
    said = "\n".join((tmp_path / f"node-{rank}.log").read_text()[-2000:] for rank in (0, 1))
    assert codes == [0, 0], said
    chains = [sorted(path.name for path in (shared / f"peer-{rank}/run/chain").glob("*.commit")) for rank in (0, 1)]
    assert chains[0] == chains[1]
    assert "00000002.commit" in chains[0]
