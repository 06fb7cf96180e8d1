"""An organiser whose config names files and addresses of volunteers' machines, against an unmodified program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from spes_p2p.observe.events import Step
from spes_p2p.quickstart.processes import LOOPBACK, Host, Running
from tests.data.web_server import WebServer
from tests.fork_server import ForkedSwarm
from tests.swarm.lying_organiser import LIE
from tests.swarm.micro import LOCAL, MICRO, nothing_left

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
AGREED = ("swarm.min_peers=1", "swarm.experts_per_peer=8")
NODE = "bootstrap"


class Lying(ForkedSwarm):
    """Its bootstrap node runs another program."""

    published = ""

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
        if output.parent.name == NODE:
            module, environment = "tests.swarm.lying_organiser", {**environment, LIE: self.published}
        return super().launch(module, arguments, environment, output, errors, host, fresh)


@pytest.mark.parametrize(
    ("published", "field"),
    [
        ("data: {source: local, path: /etc/shells, raw_dtype: uint16}", "data.source"),
        ("data: {urls: ['%s']}", "data.urls"),
    ],
)
def test_a_volunteer_takes_no_file_and_no_address_from_the_organiser(
    tmp_path: Path, tokens: Path, published: str, field: str
) -> None:
    with WebServer(tokens) as server, nothing_left() as mark, Lying(tmp_path, environment=mark) as swarm:
        swarm.published = published.replace("%s", server.url)
        swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        victim = swarm.peer("victim", None, ["--until-round", "2", *LOCAL])
        assert victim.wait(120.0) != 0
        assert f"sets {field}, which is for the owner of each machine alone to say" in victim.output()
        assert not [event for _, event in victim.read_events() if isinstance(event, Step)]
        assert server.asked == []
