"""Which run is meant, where the DHT announces none, one or several."""

from __future__ import annotations

import pytest

from spes_p2p.consensus.manifest import WIRE_VERSION
from spes_p2p.errors import ConfigError, NetworkError, RemoteProtocolError
from spes_p2p.ids import Hash, PeerId
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.records import RUNS_KEY, RunGroup, RunRecord, group_runs
from spes_p2p.sync.finding import choose_run, find_run
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual

ONE, TWO = Hash(b"\x11" * 32), Hash(b"\x22" * 32)


def record(run_id: str, fingerprint: Hash, version: int = WIRE_VERSION) -> RunRecord:
    return RunRecord(run_id, fingerprint, PeerId("organiser"), version, 0, b"", ())


def groups(*runs: tuple[str, Hash]) -> list[RunGroup]:
    return group_runs({PeerId(f"peer{at}"): record(*run) for at, run in enumerate(runs)})


def test_the_only_run_is_taken() -> None:
    assert choose_run(groups(("tiny", ONE), ("tiny", ONE))).fingerprint == ONE


def test_a_name_or_the_first_digits_of_a_fingerprint_choose() -> None:
    assert choose_run(groups(("tiny", ONE), ("big", TWO)), "big").fingerprint == TWO
    assert choose_run(groups(("tiny", ONE), ("tiny", TWO)), "tiny", "2222").fingerprint == TWO


@pytest.mark.parametrize(
    ("announced", "run_id", "fingerprint", "message", "fix"),
    [
        ([("tiny", ONE)], "big", None, r"no run 'big' is announced here, only tiny \(1111", "give --run-id tiny"),
        ([("tiny", ONE)], "big", "99", r"no run 'big' is announced here, only tiny \(1111", "ask the organiser"),
        ([("tiny", ONE)], None, "99", r"no run with fingerprint 99 is announced here, only tiny \(1111", "organiser"),
        ([("tiny", ONE), ("big", TWO)], None, None, r"several runs are announced here: big .*, tiny", "--run-id"),
        ([("tiny", ONE), ("tiny", TWO)], "tiny", None, r"several runs .*1111.*2222", "--fingerprint"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(
    announced: list[tuple[str, Hash]], run_id: str | None, fingerprint: str | None, message: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose_run(groups(*announced), run_id, fingerprint)
    assert fix in caught.value.fix


def test_a_directory_without_runs_is_told_from_nobody_answering() -> None:
    with pytest.raises(NetworkError, match="the DHT answers but announces no run"):
        choose_run([])


def test_a_run_of_another_wire_version_is_refused_with_who_has_to_upgrade() -> None:
    async def find(version: int) -> None:
        peer = MemoryNetwork().peer("anna")
        await peer.directory.publish(RUNS_KEY, pack(record("tiny", ONE, version)), 30.0)
        await find_run(peer.directory, None, 5.0)

    with pytest.raises(RemoteProtocolError, match=f"wire version {WIRE_VERSION + 1}, but this program") as newer:
        run_virtual(find(WIRE_VERSION + 1))
    with pytest.raises(RemoteProtocolError) as older:
        run_virtual(find(WIRE_VERSION - 1))
    assert (newer.value.fix, older.value.fix) == ("upgrade spes-p2p", "ask the organiser to upgrade")
