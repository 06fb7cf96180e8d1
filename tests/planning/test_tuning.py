"""What suits links and GPUs: `plan --tune`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from spes_p2p.config.load import bundled_config, changed, load_config
from spes_p2p.config.schema import steps_per_round_at
from spes_p2p.planning.gpus import gpu_named, usual_speed
from spes_p2p.planning.measured import effects
from spes_p2p.planning.report import Question
from spes_p2p.planning.traffic import Link
from spes_p2p.planning.tuning import MOST_STEPS, MOST_WAITING, TUNE_FIX, guest_overrides, too_slow, tune, waiting

MBIT = 1e6 / 8
HOME = Link(20 * MBIT, 100 * MBIT)


def question(name: str, gpu: str = "RTX3060", peers: int = 8, link: Link = HOME) -> Question:
    config, card = load_config(bundled_config(name)), gpu_named(gpu)
    owned = config.swarm.experts_per_peer
    return Question(config, owned, peers, 1, card.memory_bytes, link, usual_speed(card, config, owned))


@pytest.mark.parametrize("name", ["small", "spes-1b", "spes-7b", "home"])
@pytest.mark.parametrize("gpu", ["RTX3060", "RTX4090"])
@pytest.mark.parametrize("peers", [2, 4, 8, 16])
def test_each_step_is_a_valid_config_and_lets_training_wait_less(name: str, gpu: str, peers: int) -> None:
    asked = question(name, gpu, peers)
    found = tune(asked)
    assert found is not None
    assert found.config == changed(asked.config, found.overrides)
    assert steps_per_round_at(found.config, 10**9) <= max(MOST_STEPS, steps_per_round_at(asked.config, 10**9))
    shares = [step.waiting for step in found.steps if "swarm." not in step.overrides[0]]
    assert shares == sorted(shares, reverse=True)
    assert found.after == waiting(replace(asked, config=found.config, owned=found.config.swarm.experts_per_peer))
    assert found.is_enough == (found.after <= MOST_WAITING)


def test_the_first_rounds_stay_short_and_columns_have_two_owners() -> None:
    found = tune(question("small"))
    assert found is not None
    assert found.is_enough
    assert found.config.sync.steps_per_round == ((100, 5), (300, 10), (0, 50))
    assert found.config.swarm.target_replicas == 2
    assert found.config.sync.vocabulary_rounds == 5
    assert (found.config.sync.codec, found.config.sync.expert_codec) == ("int4", "ternary")
    assert found.config.sync.overlap
    assert (found.config.model.guest_rank, found.config.sync.expert_rounds) == (0, 1), "it is enough without"


@pytest.mark.parametrize(
    ("ramp", "becomes"),
    [
        ("100", 400),
        ("[[200,20],[0,100]]", ((200, 20), (0, 400))),
        ("[[200,20],[40000,40],[50000,100],[0,20]]", ((200, 20), (40000, 40), (0, 400))),  # the run ends at 40,000
    ],
)
def test_rounds_become_longer_whatever_they_are_spread_over(ramp: str, becomes: object) -> None:
    """Four times as long: eight times would be more than anybody has tried."""
    overrides = (f"sync.steps_per_round={ramp}",)
    asked = question("home", link=Link(0.02 * MBIT, 100 * MBIT))
    asked = replace(asked, config=changed(asked.config, overrides))
    found = tune(asked, owners=False)
    assert found is not None
    (longer,) = [step for step in found.steps if step.overrides[0].startswith("sync.steps_per_round=")]
    assert found.config.sync.steps_per_round == becomes
    assert longer.reason == "a sync every 400 steps"
    assert longer.effect == effects()["longer-4"]
    assert too_slow(asked).count("sync.steps_per_round=") == 1


def test_a_run_of_strangers_keeps_what_audits_need() -> None:
    asked = question("small", "H100", link=Link(MBIT, MBIT))
    config = changed(asked.config, ("swarm.faults=byzantine", "sync.aggregate=clip"))
    found = tune(replace(asked, config=config))
    assert found is not None
    assert not found.is_enough
    assert (found.config.sync.codec, found.config.model.guest_rank) == ("int8", 0)
    assert found.config.sync.vocabulary_rounds == 1


def test_what_costs_the_model_least_comes_first() -> None:
    """As far as the measurements can tell settings apart."""
    measured = effects()
    order = [
        "int8", "int4", "overlap", "vocabulary-5", "ternary-columns", "columns-5-guests", "ternary",
        "longer-2", "longer-4",
    ]  # fmt: skip
    for earlier, later in pairwise(order):
        assert measured[earlier].percent <= measured[later].percent + (measured[later].half_interval or 0.0)
    found = tune(question("small", link=Link(2 * MBIT, 10 * MBIT)))
    assert found is not None
    told = {step.overrides[0]: step.effect for step in found.steps}
    assert told["sync.codec=int4"] == measured["int4"]
    assert told["sync.expert_rounds=10"] is None, "with guests it was not measured"
    assert found.config.model.guest_rank == 16


@pytest.mark.parametrize(("owners", "measured"), [(1, "ternary-columns"), (2, "ternary-owners-2"), (3, None)])
def test_columns_get_fewer_bits_where_that_was_measured(owners: int, measured: str | None) -> None:
    asked = question("small")
    config = changed(asked.config, (f"swarm.target_replicas={owners}", "swarm.experts_per_peer=6"))
    found = tune(replace(asked, config=config, owned=6), owners=False)
    assert found is not None
    told = {step.overrides[0]: step.effect for step in found.steps}
    if measured is None:
        assert found.config.sync.expert_codec == "int4"
    else:
        assert found.config.sync.expert_codec == "ternary"
        assert told["sync.expert_codec=ternary"] == effects()[measured]


def test_columns_that_have_fewer_bits_keep_them() -> None:
    asked = question("small")
    three = ("swarm.target_replicas=3", "swarm.experts_per_peer=6")  # for which nothing would make them ternary again
    config = changed(asked.config, ("sync.expert_codec=ternary", *three))
    found = tune(replace(asked, config=config), owners=False)
    assert found is not None
    assert found.config.sync.codec != "fp32"
    assert found.config.sync.expert_codec == "ternary"


def test_what_is_fixed_stays() -> None:
    found = tune(question("small"), {"sync.codec", "swarm.experts_per_peer"})
    assert found is not None
    assert found.config.sync.codec == "fp32"
    assert (found.config.swarm.experts_per_peer, found.config.swarm.target_replicas) == (2, 2)


def test_what_a_person_has_said_of_owners_and_guests_stays() -> None:
    asked = question("small")
    three = replace(asked, config=changed(asked.config, ("swarm.target_replicas=3",)))
    found = tune(three, {"swarm.target_replicas"})
    assert found is not None
    assert found.config.swarm.target_replicas == 3
    two_peers = replace(asked, config=changed(asked.config, guest_overrides(asked.config, 16)), peers=2)
    free, fixed = tune(two_peers), tune(two_peers, {"model.guest_rank"})
    assert free is not None
    assert fixed is not None
    assert (free.config.swarm.experts_per_peer, free.config.model.guest_rank) == (8, 0), "nobody is a guest"
    assert (fixed.config.swarm.experts_per_peer, fixed.config.model.guest_rank) == (7, 16)


def test_a_peer_with_columns_of_its_own_number_keeps_them() -> None:
    asked = replace(question("small"), owned=6)
    usual, more = tune(question("small"), owners=False), tune(asked, owners=False)
    assert usual is not None
    assert more is not None
    assert (usual.steps[0].overrides, more.before) == (more.steps[0].overrides, waiting(asked))
    first = replace(asked, config=changed(asked.config, more.steps[0].overrides))
    assert more.steps[0].waiting == waiting(first) != usual.steps[0].waiting


def test_guests_are_not_offered_where_no_tile_holds_their_rows() -> None:
    asked = question("small", link=Link(0.5 * MBIT, 10 * MBIT))
    config = changed(
        asked.config, ("model.d_model=2054", "model.num_heads=2", "model.num_kv_heads=2", "model.expert_ffn=65537")
    )
    found = tune(replace(asked, config=config, peers=32, memory_bytes=None), owners=False)
    assert found is not None
    assert found.config.sync.expert_rounds > 1
    assert found.config.model.guest_rank == 0


def test_a_run_that_exchanges_nothing_waits_for_nothing() -> None:
    asked = question("small", link=Link(0.5 * MBIT, 10 * MBIT))
    found = tune(replace(asked, config=changed(asked.config, ("sync.enabled=false",))))
    assert found is not None
    assert (found.before, found.steps) == (0.0, ())


@pytest.mark.parametrize(("name", "columns", "enough"), [("spes-9b", 2, 8), ("spes-7b", 8, 5)])
def test_columns_that_do_not_fit_ask_for_more_peers_not_for_columns_without_owner(
    name: str, columns: int, enough: int
) -> None:
    asked = question(name, "RTX4090", peers=4)
    found, fewer, fitting = (tune(replace(asked, peers=peers)) for peers in (4, enough - 1, enough))
    assert found is not None
    assert fewer is not None
    assert fitting is not None
    experts = asked.config.model.num_experts
    words = f"{columns} columns a peer do not fit, and with fewer some of {experts} have no owner"
    assert found.note == found.to_json()["note"] == f"{words}; take at least {enough} peers"
    assert found.config.swarm == asked.config.swarm
    assert fewer.note.endswith(f"take at least {enough} peers")
    assert fitting.note == ""
    assert fitting.config.swarm.target_replicas == 1
    assert fitting.config.swarm.experts_per_peer * enough >= experts


def test_where_no_column_fits_more_peers_are_of_no_use() -> None:
    found = tune(replace(question("spes-7b", peers=4), memory_bytes=8 * 2**30))
    assert found is not None
    assert found.note == "not even 1 of 32 columns fits; take a larger GPU"


def test_too_few_columns_that_were_given_are_left_as_they_are() -> None:
    asked = question("small", peers=2)
    config = changed(asked.config, ("swarm.experts_per_peer=1", "swarm.target_replicas=2"))
    found = tune(replace(asked, config=config, owned=1), {"swarm.experts_per_peer"})
    assert found is not None
    assert found.config.swarm == config.swarm


def test_nothing_is_changed_that_suits() -> None:
    found = tune(question("spes-1b", link=Link(1000 * MBIT, 1000 * MBIT)))
    assert found is not None
    assert [step.overrides[0] for step in found.steps] == ["swarm.target_replicas=2"]


def test_a_run_for_homes_suits_homes() -> None:
    for gpu in ("RTX3060", "RTX4080", "RTX4090"):
        found = tune(question("home", gpu))
        assert found is not None
        assert found.before <= MOST_WAITING
        assert not found.steps
        assert too_slow(question("home", gpu)) == ""


def test_links_that_are_too_slow_are_said_with_what_mends_it() -> None:
    words = too_slow(question("small"))
    assert words.startswith("Too slow: 95% of the time goes into syncing. With sync.codec=int4")
    assert "experts_per_peer" not in words
    hopeless = too_slow(question("small", "H100", link=Link(MBIT, MBIT)))
    assert hopeless.endswith("Faster links help, and more tokens a step (optimizer.batch_sequences).")


def test_a_toy_is_called_one_instead_of_too_slow() -> None:
    words = too_slow(question("tiny", "RTX4090"))
    assert words.startswith("A model for trying things out: a round of it is less than 0.1 s of training")
    assert "Too slow" not in words


def test_without_links_or_speed_nothing_can_be_said() -> None:
    assert tune(question("small", link=Link())) is None
    assert tune(replace(question("small"), tokens_per_second=None)) is None
    assert too_slow(question("small", link=Link())) == ""
    assert "--uplink" in TUNE_FIX
