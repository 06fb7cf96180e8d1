"""A short run of chaos, in which the bootstrap node is killed and comes back: long ones are for scripts/chaos.py.

In every run of the tests peers go on without it in tests/swarm/test_life_of_a_swarm.py and tests/swarm/test_moved.py.
How it comes back is shown in tests/cli/test_join.py, and other misfortune in tests/sync/test_chaos.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.chaos import Chaos
from tests.swarm.chaos_report import ChaosOptions

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
ROUNDS = 5


def test_a_bootstrap_node_that_is_killed_is_missed_by_nobody_and_follows_again(tmp_path: Path) -> None:
    """The seed kills it in the first round, and starts it again in the next."""
    told: list[str] = []
    found = Chaos(ChaosOptions(tmp_path, 3, ROUNDS, seed=351, steps_per_round=20), told.append).run()
    assert "bootstrap killed at 19% of the round" in told
    assert found.rounds >= ROUNDS
    assert found.left_over == []
    assert found.disagreements == []
    assert set(found.exit_codes.values()) == {0}
    assert "it continues at round " in (tmp_path / "bootstrap" / "output.log").read_text()
    assert not any("bootstrap" in problem for problem in found.problems)  # such as that it did not follow
