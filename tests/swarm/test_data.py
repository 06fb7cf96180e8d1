"""Two peers that bring no data: what they are leased comes from the bootstrap node and from each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.data.trees import FolderPieces
from spes_p2p.observe.events import Eval, Round, Step, Warning
from tests import oracle
from tests.swarm.micro import LOCAL, MICRO, MOST, Finished, config_of, dump_initial_state, dumping, local_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
NAMES = ("p0", "p1")
ROUNDS = 4
AGREED = ("swarm.min_peers=2", "swarm.experts_per_peer=4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Finished:
    folder = tmp_path_factory.mktemp("no-data")
    with local_swarm(folder) as swarm:
        swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        for name in NAMES:
            arguments = [*dumping(folder, name), "--until-round", str(ROUNDS), "--max-data-disk", "100MB", *LOCAL]
            swarm.peer(name, None, arguments)
        swarm.wait_for_end(NAMES, 240.0)
        seen = {name: swarm.processes[name].seen for name in NAMES}
    return Finished(folder, config_of(AGREED), seen)


def test_they_train_the_same_rounds_with_the_same_bits(finished: Finished) -> None:
    rounds = finished.of(Round)
    hashes = [{event.round: event.model_hash for event in rounds[name]} for name in NAMES]
    both = set(hashes[0]) & set(hashes[1])  # who was late for a round catches up and hears of the next alone
    assert [hashes[0][round] for round in both] == [hashes[1][round] for round in both]
    assert both >= {ROUNDS}
    assert len(both) >= MOST * ROUNDS
    assert sum(event.roster_size == 2 for event in rounds["p0"]) >= MOST * len(rounds["p0"])
    assert all(finished.of(Step)[name] for name in NAMES)
    dump_initial_state(finished.folder, finished.config, "p0")
    assert oracle.check_dumps(finished.folder / "dumps", finished.config.sync.tile_values, MOST)


def test_somebody_measured_the_held_out_loss(finished: Finished) -> None:
    assert any(finished.of(Eval).values())
    said = [event.message for events in finished.of(Warning).values() for event in events]
    assert not [text for text in said if "was not evaluated" in text]


def test_data_is_counted_apart(finished: Finished) -> None:
    for name in NAMES:
        rounds = finished.of(Round)[name]
        received = sum(event.data_bytes_received for event in rounds)
        assert received > 0
        assert all(event.bytes_received > 0 for event in rounds if event.roster_size == len(NAMES))


def test_what_they_keep_is_the_runs_data(finished: Finished, tokens: Path) -> None:
    """Piece by piece."""
    whole = FolderPieces.open(Dataset.open(tokens), finished.folder / "own", lambda text: None)
    for name in NAMES:
        cache = PieceCache(finished.folder / name / "data", whole.grid, 10**8)
        assert 0 < cache.held <= whole.held
        found = [piece for piece in range(whole.held) if cache.find(piece) is not None]
        assert len(found) == cache.held
        assert all(cache.find(piece) == whole.find(piece) for piece in found)
        cache.close()
