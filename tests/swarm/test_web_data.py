"""Two peers and a bootstrap node, none of which has data: it lies on a web server, which is away for a while."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spes_p2p.data.web_url import WebAccess
from spes_p2p.observe.events import Round, Step
from tests.data.web_server import Faults, WebServer
from tests.swarm.micro import LOCAL, MICRO, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
NAMES = ("p0", "p1")
ROUNDS = 8
AGREED = ("swarm.min_peers=2", "swarm.experts_per_peer=4")


def test_a_run_whose_data_lies_on_the_web_outlives_its_bootstrap_node(tmp_path: Path, tokens: Path) -> None:
    whole = sum(path.stat().st_size for path in tokens.iterdir() if path.is_file())
    with WebServer(tokens) as server, local_swarm(tmp_path) as swarm:
        server.faults = Faults(breaks_off=lambda asked: 3000 if len(server.asked) % 5 == 0 else None)
        swarm.bootstrap("tiny", None, [*MICRO, *AGREED, f"data.urls=[{server.url}]"])
        for name in NAMES:
            swarm.peer(name, None, ["--until-round", str(ROUNDS), "--web-data", WebAccess.ANY, *LOCAL])
        swarm.wait_for_round(2, NAMES, 120.0)
        bootstrap = swarm.processes["bootstrap"]
        bootstrap.send(signal.SIGKILL)
        bootstrap.wait(10.0)
        swarm.wait_for_end(NAMES, 120.0)
        for name in NAMES:
            seen = [event for _, event in swarm.processes[name].seen]
            assert any(isinstance(event, Step) for event in seen)
            assert max(event.round for event in seen if isinstance(event, Round)) >= ROUNDS
            assert sum(event.data_bytes_received for event in seen if isinstance(event, Round)) > 0
    assert 0 < server.sent < 2 * len(NAMES) * whole  # at the same time both may ask for a piece that neither has as yet
