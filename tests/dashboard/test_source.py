"""The chain as the dashboard fetches it: whole, only what is new, and nothing that genesis does not lead to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import WIRE_VERSION, manifest_hash
from spes_p2p.dashboard.follow import Follower
from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.source import DOUBT_SECONDS, NOTHING, Known, Look, SwarmSource
from spes_p2p.dashboard.web import page_state
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm.records import RUNS_KEY, RunRecord, heads_key
from spes_p2p.sync.announce import head_record
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import ORGANISER, A, with_tokens
from tests.sync.test_report import NOW, Scene

LIAR, ROOT = PeerId("liar"), sha256(b"root")
LENGTH = 70
"""More than come in one answer."""


def source_of(scene: Scene) -> SwarmSource:
    reader = scene.network.peer("reader")
    return SwarmSource(reader)


async def announce_run(scene: Scene) -> None:
    """With an address, so that the run itself can be asked for."""
    info = scene.run.info
    record = RunRecord(info.run_id, info.fingerprint, ORGANISER, WIRE_VERSION, 0, b"", ("/ip4/203.0.113.1/tcp/1",))
    await scene.publish(scene.peer, RUNS_KEY, record)


def test_the_whole_chain_comes_and_then_only_what_is_new(tmp_path: Path) -> None:
    async def main() -> tuple[Look, Look, Look]:
        scene = Scene(tmp_path)
        commits = scene.run.chain(LENGTH)
        source = source_of(scene)
        await announce_run(scene)
        await scene.announce_peer(A)
        await scene.announce_head(commits[-3])
        await scene.serve(commits[:-2])
        history = History()
        follower = Follower(history)
        looks = []
        for newest in (commits[-3], commits[-3], commits[-1]):
            if newest is commits[-1]:
                for commit in commits[-2:]:
                    scene.chains[A].append(commit)
                await scene.announce_head(newest)
            looks.append(await source.look(NOW, follower.known()))
            follower.apply(looks[-1], NOW)
        assert page_state(history, NOW)["rounds"]["round"] == list(range(LENGTH))
        return looks[0], looks[1], looks[2]

    first, same, later = run_virtual(main())
    assert [commit.manifest.round for commit in first.commits] == list(range(LENGTH - 2))
    assert same.commits == ()
    assert [commit.manifest.round for commit in later.commits] == [LENGTH - 2, LENGTH - 1]
    assert later.report.checked


def test_a_history_that_does_not_lead_to_the_newest_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        commits = scene.run.chain(6)
        await announce_run(scene)
        await scene.announce_head(commits[-1])
        await scene.serve([*commits[:2], with_tokens(commits[2], 5), *commits[3:]])
        await source_of(scene).look(NOW, NOTHING)

    with pytest.raises(RemoteProtocolError, match="no peer could prove the certificate that it announces: a, round 5"):
        run_virtual(main())


def test_whoever_announces_what_nobody_signed_is_passed_over(tmp_path: Path) -> None:
    """Also with a parent that names its own electors: signatures must lead there from genesis on."""

    async def main() -> Look:
        scene = Scene(tmp_path)
        commits, liar = scene.run.chain(4), scene.network.peer(LIAR)
        members = (replace(commits[1].manifest.members[0], peer=LIAR),)
        false = scene.run.certified(replace(commits[1].manifest, members=members), LIAR)
        made = replace(scene.run.child(commits[3].manifest, ROOT, ROOT), parent=manifest_hash(false.manifest), round=9)
        head = scene.run.certified(made, LIAR)
        await announce_run(scene)
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        await scene.publish(liar, heads_key(scene.run.info.run_id), head_record(head, int(NOW)))
        source = source_of(scene)
        for later in (0.0, 1.0, DOUBT_SECONDS + 1.0):
            look = await source.look(NOW + later, NOTHING)
            assert look.report.round == 3
        return look

    look = run_virtual(main())
    assert (look.report.round, [commit.manifest.round for commit in look.commits]) == (3, [0, 1, 2, 3])


def test_what_we_knew_of_another_history_is_fetched_anew_from_where_it_was_left(tmp_path: Path) -> None:
    async def main() -> Look:
        scene = Scene(tmp_path)
        commits = scene.run.chain(6)
        await announce_run(scene)
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        ours = [manifest_hash(commit.manifest) for commit in commits[:3]] + [Hash(b"x" * 32)] * 2
        return await source_of(scene).look(
            NOW, Known(len(ours) - 1, lambda round: ours[round] if round < len(ours) else None)
        )

    assert [commit.manifest.round for commit in run_virtual(main()).commits] == [3, 4, 5]
