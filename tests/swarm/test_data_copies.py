"""Three peers that brought no data lose the bootstrap node, then one of themselves: the other two go on training.

In every run of the tests: copies that outlive who brought them, in memory (tests/peer/test_data_copies.py), and for
real peers without data (tests/swarm/test_data.py) and a mixture that outlives one (tests/swarm/test_mixture.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spes_p2p.observe.events import Warning
from tests.swarm.micro import LOCAL, MICRO, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
NAMES = ("p0", "p1", "p2")
AGREED = ("swarm.min_peers=3", "swarm.experts_per_peer=4")
MORE_ROUNDS = 20


def test_two_of_three_train_on_without_the_bootstrap_node_and_the_third(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        node = swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        peers = [swarm.peer(name, None, LOCAL) for name in NAMES]
        swarm.wait_for_round(2, NAMES)
        node.send(signal.SIGKILL)
        node.wait(10.0)
        round = max(event.round for event in peers[0].rounds())
        swarm.wait_for_round(round + 2, NAMES)
        peers[2].send(signal.SIGKILL)
        peers[2].wait(10.0)
        round = max(event.round for event in peers[0].rounds())
        swarm.wait_for_round(round + MORE_ROUNDS, NAMES[:2])
        for one in peers[:2]:
            assert sum(event.roster_size == 2 and event.tokens > 0 for event in one.rounds()) >= MORE_ROUNDS // 2
            said = [event.message for _, event in one.seen if isinstance(event, Warning)]
            assert not [text for text in said if "training is waiting for data" in text]
        word = (tmp_path / "p0" / "invite.txt").read_text().split()[-1]
        swarm.wait_until(
            lambda: "data: 2 copies of the least copied piece\n" in swarm.ask("status", word),
            "a status without those who are gone",
            NAMES[:2],
        )
