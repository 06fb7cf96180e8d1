"""The flight recorder: what was recorded is decided again, a torn tail is left out, files stay small."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import msgpack
import pytest

from spes_p2p.consensus import vote_events
from spes_p2p.consensus.content import Content, Statements
from spes_p2p.consensus.events import Event
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import leader_order
from spes_p2p.consensus.messages import Signed
from spes_p2p.consensus.state import Others, RoundState, State
from spes_p2p.errors import StateError
from spes_p2p.ids import PeerId
from spes_p2p.sync.recorder import (
    _BEGIN,
    _CLASSES,
    BEFORE,
    NEWEST,
    NOT_KEPT,
    FlightRecorder,
    _mark_of,
    load_recording,
    pack_plain,
    replay,
)
from tests.consensus import planted
from tests.simulation.attackers.leaders import machine_with
from tests.simulation.memory_swarm import MemorySwarm, PretendPeer
from tests.sync.swarm_cases import in_swarm


def record(folder: Path, target: Path, max_event_bytes: int = 2**22) -> MemorySwarm:
    """Three peers for a few rounds, then the leader is killed; what another went through is in `target`."""
    seen: list[MemorySwarm] = []

    async def play(swarm: MemorySwarm) -> None:
        seen.append(swarm)
        await swarm.start(["a", "b", "c"])
        recorder, told = FlightRecorder(target, swarm.info, max_event_bytes), swarm.peers[PeerId("b")]
        recorder.attach(told.driver.core)
        await swarm.until_round(3)
        while (leader := leader_of(told)) == told.name:
            await swarm.until_round(told.round + 1)
        await swarm.peers[leader].kill()
        await swarm.until_round(told.round + 2)
        assert recorder.failed is None

    in_swarm(folder, play)
    return seen[0]


def leader_of(life: PretendPeer) -> PeerId:
    """Who leads the round that it is in."""
    tip = life.driver.core.tip
    return leader_order(manifest_hash(tip), tip.members)[0]


def test_what_was_recorded_is_decided_again(folder: Path, tmp_path: Path) -> None:
    swarm = record(folder, tmp_path / "flight")
    recording = load_recording(tmp_path / "flight" / NEWEST)
    assert recording.info == swarm.info
    played = list(replay(recording, swarm.rules))
    assert [step.frame for step in played if not step.same] == []
    assert max(step.round for step in played) >= 4
    assert {"certify", "adopt", "vote", "verify"} <= {rule for step in played for rule in step.rules}


def test_all_that_a_state_machine_may_hold_can_be_recorded() -> None:
    """By the annotations of its state and of its events."""
    seen: set[Any] = set()

    def walk(hint: Any) -> None:
        if hint in seen:
            return
        seen.add(hint)
        for part in (*get_args(hint), get_origin(hint)):
            walk(part)
        if isinstance(hint, type) and is_dataclass(hint):
            for name, part in get_type_hints(hint).items():
                if name not in NOT_KEPT:
                    walk(part)

    for kind in (State, *get_args(Event)):
        walk(kind)
    found = {kind for kind in seen if isinstance(kind, type) and is_dataclass(kind)}
    assert {Content, Statements, Signed} <= found
    assert found - set(_CLASSES.values()) <= {
        *get_args(Event),
        vote_events.Persist,
    }  # a vote asks for it, and keeps none


def test_what_cannot_be_recorded_ends_the_recording_alone(folder: Path, tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        said: list[str] = []
        life = swarm.peers[PeerId("b")]
        recorder = FlightRecorder(tmp_path / "flight", swarm.info, say=said.append)
        recorder.attach(life.driver.core)
        recorder._note(cast(Event, object()), 0.0, [])
        assert isinstance(recorder.failed, TypeError)
        assert len(said) == 1
        await swarm.until_round(life.round + 1)

    in_swarm(folder, play)


def test_the_script_tells_the_rounds(folder: Path, tmp_path: Path) -> None:
    record(folder, tmp_path / "flight")
    script = Path(__file__).parents[2] / "scripts" / "replay.py"
    command = [sys.executable, str(script), str(tmp_path / "flight" / NEWEST)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "all was decided as it was then" in told
    assert "on round 4: " in told
    assert subprocess.run([*command[:2], str(script)], capture_output=True).returncode == 2


def test_another_state_machine_decides_otherwise(folder: Path, tmp_path: Path) -> None:
    swarm = record(folder, tmp_path / "flight")
    recording = load_recording(tmp_path / "flight" / NEWEST)
    assert not all(step.same for step in replay(recording, swarm.rules, machine_with(planted.NeverBlamesTheLeader)))


def test_files_stay_small_and_a_torn_tail_is_left_out(folder: Path, tmp_path: Path) -> None:
    swarm = record(folder, tmp_path / "flight", max_event_bytes=50_000)
    newest, before = tmp_path / "flight" / NEWEST, tmp_path / "flight" / BEFORE
    assert 0 < newest.stat().st_size < 100_000
    assert 50_000 <= before.stat().st_size < 100_000
    assert all(step.same for step in replay(load_recording(before), swarm.rules))
    whole = load_recording(newest)
    newest.write_bytes(newest.read_bytes()[:-3])
    torn = load_recording(newest)
    assert torn.frames == whole.frames[:-1]
    newest.write_bytes(b"something else")
    with pytest.raises(StateError, match="is not a recording"):
        load_recording(newest)
    assert whole.me == "b"


def test_a_recording_of_a_version_with_other_fields_is_refused(folder: Path, tmp_path: Path) -> None:
    """What its state lacks has no value that one could guess."""
    record(folder, tmp_path / "flight")
    data = (tmp_path / "flight" / NEWEST).read_bytes()
    older = tmp_path / "older"
    older.write_bytes(with_mark(data, "begin 4"))
    with pytest.raises(StateError, match="another version"):
        load_recording(older)
    older.write_bytes(with_mark(data, _BEGIN))
    assert load_recording(older).me == "b"
    older.write_bytes(with_mark(data, "begin 4", RoundState="OlderState"))  # a class that there is no more
    with pytest.raises(StateError, match="another version"):
        load_recording(older)

    kinds = (State, Others, RoundState)
    fewer = make_dataclass("Others", [(field.name, field.type) for field in fields(Others)[:-1]])
    assert _mark_of(kinds) == _mark_of(kinds[::-1]) != _mark_of((State, fewer, RoundState))


def with_mark(data: bytes, mark: str, **renamed: str) -> bytes:
    """A recording with another mark, and other names of classes, in its first frame."""
    end = 8 + int.from_bytes(data[:4], "big")
    first = msgpack.packb(["l", mark, *msgpack.unpackb(data[8:end])[2:]])
    for name, other in renamed.items():
        first = first.replace(name.encode(), other.encode())
    return len(first).to_bytes(4, "big") + zlib.crc32(first).to_bytes(4, "big") + first + data[end:]


def test_a_state_above_the_limit_is_not_written_again_at_each_event(folder: Path, tmp_path: Path) -> None:
    record(folder, tmp_path / "flight", max_event_bytes=5_000)
    before = load_recording(tmp_path / "flight" / BEFORE)
    assert len(pack_plain(before.state)) > 5_000
    assert len(before.frames) > 1


def test_where_it_cannot_write_it_says_so_once_and_the_peer_goes_on(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []

    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        recorder = FlightRecorder(tmp_path / "flight", swarm.info, say=said.append)
        recorder.attach(swarm.peers[PeerId("b")].driver.core)
        await swarm.until_round(1)
        shutil.rmtree(tmp_path / "flight")
        await swarm.until_round(3)

    in_swarm(folder, play)
    assert len(said) == 1
    assert "the flight recorder stops" in said[0]
    assert str(tmp_path / "flight") in said[0]
