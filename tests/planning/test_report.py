"""What `plan` says of links that are too slow for a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.planning.gpus import gpu_named, usual_speed
from spes_p2p.planning.report import Question, answer
from spes_p2p.planning.traffic import Link

MBIT = 1e6 / 8
HOME = Link(20 * MBIT, 100 * MBIT)


def question(name: str, gpu: str = "RTX3060", link: Link = HOME) -> Question:
    config, card = load_config(bundled_config(name)), gpu_named(gpu)
    owned = config.swarm.experts_per_peer
    return Question(config, owned, 8, 1, card.memory_bytes, link, usual_speed(card, config, owned))


@pytest.mark.parametrize("gpu", ["RTX3060", "RTX4080", "RTX4090"])
def test_a_run_for_homes_suits_homes(gpu: str) -> None:
    assert answer(question("home", gpu)).too_slow() == ""


def test_links_that_are_too_slow_are_said_with_what_mends_it() -> None:
    words = answer(question("small")).too_slow()
    assert words.startswith("Too slow: 95% of the time goes into syncing. The config home has")
    assert words.endswith("Faster links help, and more tokens a step (optimizer.batch_sequences).")


def test_a_toy_is_called_one_instead_of_too_slow() -> None:
    words = answer(question("tiny", "RTX4090")).too_slow()
    assert words.startswith("A model for trying things out: a round of it is less than 0.1 s of training")
    assert "Too slow" not in words


def test_without_links_or_speed_nothing_can_be_said() -> None:
    assert answer(question("small", link=Link())).too_slow() == ""
    assert answer(replace(question("small"), tokens_per_second=None)).too_slow() == ""
