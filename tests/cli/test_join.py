"""A volunteer's and an organiser's day with the real commands, over loopback, in this process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from spes_p2p.observe.events import Event, Round, Step, Warning
from spes_p2p.observe.sinks import EventReader
from spes_p2p.sync.chain import Chain
from tests.cli.conftest import LOOPBACK, Organiser, serve, spes_p2p
from tests.cli.test_errors import refused
from tests.peer.real import make_tokens

SHORT = ("swarm.min_peers=1", "swarm.experts_per_peer=8", "sync.steps_per_round=3", "sync.merge_alpha=0")
Serve = Callable[..., AbstractContextManager[Organiser]]


@pytest.fixture
def serving(tmp_path: Path, tokens: Path) -> Serve:
    """A bootstrap node of a run that begins with its first peer; the same folder each time unless another is named."""

    @contextmanager
    def start(*overrides: str, name: str = "organiser") -> Iterator[Organiser]:
        yield from serve(tmp_path / name, tokens, *SHORT, *overrides)

    return start


def events(output: Path) -> list[Event]:
    return [event for _, event in EventReader(output / "metrics.jsonl").read()]


def rounds(output: Path) -> list[Round]:
    return [event for event in events(output) if isinstance(event, Round)]


def test_the_printed_command_is_all_that_a_volunteer_needs(tmp_path: Path, serving: Serve) -> None:
    with serving() as organiser:
        program, *arguments = shlex.split(organiser.command)
        more = ("-o", str(tmp_path / "peer"), "--until-round", "2", "--host-maddrs", LOOPBACK)
        answer = spes_p2p(*arguments, *more)
    assert (program, answer.exit_code) == ("spes-p2p", 0), answer
    assert [event.round for event in rounds(tmp_path / "peer")] == [1, 2]
    assert [event.step for event in events(tmp_path / "peer") if isinstance(event, Step)] == [1, 2, 3, 4, 5, 6]
    lines = answer.output.splitlines()
    assert lines[0] == "loading PyTorch"
    assert lines[1].startswith("run tiny, fingerprint ")
    assert any(line.startswith("data comes from other peers: ") for line in lines)
    exported = spes_p2p("export", "--checkpoint", str(tmp_path / "peer"), "--output", str(tmp_path / "model"))
    assert (exported.exit_code, exported.errors) == (0, "")
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert sum(event.data_bytes_received for event in rounds(tmp_path / "peer")) > 0
    assert any(line.startswith("round 2 committed at step 6: 1 peer, ") for line in lines)
    said = "\n".join(organiser.said)
    assert "has joined, 1 of 1" in said
    assert "all 8 expert columns have an owner" in said
    assert "round 2: step 6, 1.5k tokens from 1 peer" in said


def test_the_same_command_goes_on_and_only_with_the_run_and_identity_of_its_folder(
    tmp_path: Path, serving: Serve
) -> None:
    peer = tmp_path / "peer"
    with serving() as organiser:
        data = ("--data", str(organiser.data))
        assert organiser.join(peer, *data, "--until-round", "1").exit_code == 0
        stranger = ("--identity-path", str(tmp_path / "other.key"))
        refused(organiser.join(peer, *data, *stranger), "belongs to peer Qm", "--identity-path", code=3)
        newest = max((peer / "checkpoints").iterdir())
        (newest / "metadata.json").write_text("{")
        again = organiser.join(peer, *data, "--until-round", "2")
        assert again.exit_code == 0
        assert f"continuing the run that is kept in {peer}" in again.output
    assert [event.round for event in rounds(peer)] == [1, 2]
    (warning,) = [event for event in events(peer) if isinstance(event, Warning)]
    assert f"{newest.name} is damaged" in warning.message
    assert "continuing from step-00000000" in warning.message
    with serving("run.seed=7", name="another") as other:
        refused(other.join(peer, *data), "holds another run", "--output", code=3)


def test_the_organiser_comes_back_with_the_same_genesis_and_with_no_other_config(
    tmp_path: Path, serving: Serve, tokens: Path
) -> None:
    with serving() as organiser:
        assert organiser.join(tmp_path / "peer", "--data", str(tokens), "--until-round", "1").exit_code == 0
    genesis = Chain(tmp_path / "organiser" / "run" / "chain").commit(0)
    with serving() as again:
        assert "it continues at round 1, step 3" in again.said
        assert again.command.split("--run-id")[1] == organiser.command.split("--run-id")[1]
        assert Chain(tmp_path / "organiser" / "run" / "chain").commit(0) == genesis
        answer = again.join(tmp_path / "peer", "--data", str(tokens), "--until-round", "2")
        assert answer.exit_code == 0
    folder = tmp_path / "organiser"
    common = ("bootstrap", "--config", "tiny", "--data", str(tokens), "-o", str(folder), "--host-maddrs", LOOPBACK)
    refused(spes_p2p(*common), "holds another run: its fingerprint is", "--output", code=3)


def test_who_has_fetched_its_data_goes_on_with_it(tmp_path: Path, serving: Serve) -> None:
    with serving() as organiser:
        assert organiser.join(tmp_path / "peer", "--until-round", "1").exit_code == 0
        first = sum(event.data_bytes_received for event in rounds(tmp_path / "peer"))
        assert organiser.join(tmp_path / "peer", "--until-round", "2").exit_code == 0
        again = sum(event.data_bytes_received for event in rounds(tmp_path / "peer")) - first
    assert again < first  # nothing that was here is fetched again
    assert (tmp_path / "peer" / "data" / "pieces.bin").stat().st_size > 0


def test_claims_are_granted_and_what_nobody_claims_is_said_aloud(tmp_path: Path, serving: Serve) -> None:
    with serving() as organiser:
        data = ("--data", str(organiser.data))
        claims = ("--owned-experts", "0,5-6", "--max-experts", "3")
        assert organiser.join(tmp_path / "peer", *data, "--until-round", "1", *claims).exit_code == 0
    assert rounds(tmp_path / "peer")[0].stale_columns == (1, 2, 3, 4, 7)
    assert "warning: 5 of 8 expert columns have no owner: 1-4,7" in organiser.said


def test_a_peer_with_data_of_its_own_counts_in_a_run_that_leases_data(tmp_path: Path, serving: Serve) -> None:
    own = make_tokens(tmp_path / "own", words=3000, seed=5)
    with serving() as organiser:
        answer = organiser.join(tmp_path / "peer", "--data", str(own), "data.source=local", "--until-round", "1")
    assert answer.exit_code == 0, answer
    (only,) = rounds(tmp_path / "peer")
    assert (only.tokens, only.roster_size) == (3 * 8 * 64, 1)


def test_status_by_json_says_who_trains_what(tmp_path: Path, serving: Serve) -> None:
    with serving() as organiser:
        ask = ("status", "--initial-peers", organiser.address)
        before = json.loads(spes_p2p(*ask, "--json").output)
        assert (before["certificate"], [peer["state"] for peer in before["peers"]]) == ("", ["bootstrap"])
        assert "the run has not begun: 0 peers waiting" in spes_p2p(*ask).output
        assert organiser.join(tmp_path / "peer", "--data", str(organiser.data), "--until-round", "2").exit_code == 0
        after = before
        while after["round"] < 2:  # the newest certificate is published within seconds
            after = json.loads(spes_p2p(*ask, "--json").output)
        table = spes_p2p(*ask).output
    assert (after["certificate"], after["checked"], after["round"], after["step"]) == ("quorum", True, 2, 6)
    member = after["peers"][1]
    assert (member["owned"], member["version"], after["uncovered"]) == (list(range(8)), "0.1.0", [])
    assert member["peer"][-6:] in table
    assert "expert columns: 8 of 8 have an owner" in table
