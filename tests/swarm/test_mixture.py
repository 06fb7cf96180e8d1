"""Two datasets in one run, of which no peer has any; one peer dies in the midst of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spes_p2p.data.order import Mixture
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.events import Round
from spes_p2p.sync.chain import Chain
from tests.swarm.micro import LOCAL, MICRO, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
NAMES = ("p0", "p1", "p2")
ROUNDS = 6
MIX = ((60, 4, 1), (0, 1, 2))
AGREED = (f"data.mix={[list(stage) for stage in MIX]}", "model.document_end=256", "swarm.min_peers=2")


def test_a_mixture_outlives_a_peer_and_all_say_the_same_of_it(tmp_path: Path, tokens: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_text("one and one and " * 4000)
    tokenize([str(text)], tmp_path / "lines", TokenizeOptions(tokenizer="byte", processes=1))
    listed = tmp_path / "mix.txt"
    listed.write_text(f"{tokens}\n{tmp_path / 'lines'}\n")
    with local_swarm(tmp_path) as swarm:
        swarm.bootstrap("tiny", listed, [*MICRO, *AGREED])
        for name in NAMES:
            swarm.peer(name, None, ["--until-round", str(ROUNDS), *LOCAL])
        swarm.wait_for_round(2, NAMES, 120.0)
        killed = swarm.processes["p2"]
        killed.send(signal.SIGKILL)
        killed.wait(10.0)
        swarm.wait_for_end(NAMES[:2], 120.0)
        rounds = {
            name: {event.round: event for _, event in swarm.processes[name].seen if isinstance(event, Round)}
            for name in NAMES[:2]
        }
    for name, seen in rounds.items():
        chain = Chain(tmp_path / name / "run" / "chain")
        for number, event in seen.items():
            cursor = chain.commit(number).manifest.leases.cursor
            given = dict(zip((tokens.name, "lines"), Mixture(MIX).counts(cursor), strict=True))
            assert (event.handed_out, sum(event.handed_out.values())) == (given, cursor)
        assert max(seen) >= ROUNDS
        assert sum(seen[max(seen)].handed_out.values()) > MIX[0][0]  # the weights have changed
