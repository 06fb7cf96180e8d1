"""What status tells of a run, read by somebody who takes no part in it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import WIRE_VERSION
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.data.held import Coverage, Held
from spes_p2p.errors import NetworkError
from spes_p2p.exchange.requests import unpack_request
from spes_p2p.ids import PeerId
from spes_p2p.swarm.memory_backend import MemoryNetwork, MemoryPeer
from spes_p2p.swarm.ports import Blob
from spes_p2p.swarm.records import RUNS_KEY, PeerRecord, RunRecord, heads_key, peers_key, words_key
from spes_p2p.swarm.vitals import LEAVING, LEFT, Vitals
from spes_p2p.sync.announce import head_record
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.organiser_words import ending
from spes_p2p.sync.report import FRESH_SECONDS, LIVE_SECONDS, RunReport, read_report
from spes_p2p.wire import pack
from tests.simulation.virtual_time import run_virtual
from tests.sync.chains import ORGANISER, A, B, MadeRun, with_tokens
from tests.sync.swarm_cases import small_config

NOW = 1_700_000_000.0
NEWCOMER = PeerId("newcomer")


class Scene:
    """A directory with what a test puts there, and peer a, which serves its chain."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.run = MadeRun(small_config(*overrides, peers=1))
        self.network = MemoryNetwork()
        self.peer = self.network.peer(A)
        self.folder = folder
        self.chains: dict[PeerId, Chain] = {}

    async def publish(self, peer: MemoryPeer, key: str, record: object) -> None:
        await peer.directory.publish(key, pack(record), 60.0)

    async def announce_run(self) -> None:
        info = self.run.info
        await self.publish(
            self.peer,
            RUNS_KEY,
            RunRecord(info.run_id, info.fingerprint, ORGANISER, WIRE_VERSION, 0, b"", (f"/memory/p2p/{A}",)),
        )

    async def announce_peer(
        self,
        name: PeerId,
        age_seconds: float = 1.0,
        role: str = "peer",
        held: Held | None = None,
        phase: str = "",
    ) -> None:
        info, written = self.run.info, int(NOW - age_seconds)
        record = PeerRecord(info.run_id, name, (), "0.1.0", 2, 20, 300, 40.0, (0,), role, False, 1, written)
        record = replace(record, held=held or Held(), vitals=Vitals(phase=phase))
        await self.publish(self.network.peer(name), peers_key(info.run_id), record)

    async def announce_head(self, commit: Commit, seen_seconds_ago: int = 9, by: PeerId = A) -> None:
        record = head_record(commit, int(NOW) - seen_seconds_ago)
        await self.publish(self.network.peer(by), heads_key(self.run.info.run_id), record)

    async def serve(self, commits: list[Commit], by: PeerId = A) -> None:
        chain = self.chains[by] = Chain(self.folder / by)
        for commit in commits:
            chain.append(commit)
        serving = Serving(self.run.info, chain, None, lambda parent, first, count: None)
        answer = serving.answer

        class Handler:
            async def on_call(self, caller: PeerId, request: bytes) -> bytes:
                return b""

            async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
                return answer(unpack_request(request), caller)

        await self.network.peer(by).transport.serve(Handler())

    async def report(self) -> RunReport:
        reader = self.network.peer("reader")
        return await read_report(reader, None, NOW)


def test_before_genesis_there_are_only_waiting_peers(tmp_path: Path) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        await scene.announce_run()
        await scene.announce_peer(ORGANISER, role="bootstrap")
        await scene.announce_peer(A)
        return await scene.report()

    report = run_virtual(main())
    assert (report.certificate, report.round, report.columns, report.head_age_seconds) == ("", 0, (), None)
    assert [(peer.peer, peer.state) for peer in report.peers] == [(ORGANISER, "bootstrap"), (A, "waiting")]


def test_a_run_in_progress_with_its_signatures_checked(tmp_path: Path) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_peer(A)
        await scene.announce_peer(B, age_seconds=FRESH_SECONDS + 5)
        await scene.announce_peer(NEWCOMER)
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        return await scene.report()

    report = run_virtual(main())
    assert (report.certificate, report.checked, report.renewal) == ("quorum", True, False)
    assert (report.round, report.seals, report.electors, report.head_age_seconds) == (2, 1, 1, 9.0)
    assert {peer.peer: peer.state for peer in report.peers} == {A: "member", NEWCOMER: "joining", B: "left"}
    assert report.uncovered == ()
    assert [(column.owners, column.stale_rounds) for column in report.columns] == [((A,), 0)] * 4
    plain = report.to_json()
    assert (plain["round"], plain["live_peers"], plain["peers"][0]["peer"]) == (2, 1, A)


def test_a_run_that_its_organiser_has_ended_is_over_from_the_last_round_on(tmp_path: Path) -> None:
    async def main() -> list[RunReport]:
        scene = Scene(tmp_path)
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        words, said = words_key(scene.run.info.run_id), []
        for author, last in ((B, 1), (ORGANISER, 3), (ORGANISER, 2)):
            await scene.publish(scene.peer, words, ending(scene.run.info, last, scene.run.sealer(author)))
            said.append(await scene.report())
        return said

    forged, coming, over = run_virtual(main())
    assert [report.last_round for report in (forged, coming, over)] == [None, 3, 2]
    assert [report.is_over for report in (forged, coming, over)] == [False, False, True]


@pytest.mark.parametrize(("age_seconds", "live"), [(LIVE_SECONDS - 1, 1), (LIVE_SECONDS + 1, 0)])
def test_a_member_that_missed_two_turns_is_not_counted_among_the_live(
    tmp_path: Path, age_seconds: float, live: int
) -> None:
    """It may have been killed; whether it has, is said when it is silent for longer."""

    async def main() -> RunReport:
        scene = Scene(tmp_path)
        await scene.announce_run()
        await scene.announce_peer(A, age_seconds)
        await scene.announce_head(scene.run.genesis(b"s" * 32))
        return await scene.report()

    report = run_virtual(main())
    assert ([peer.state for peer in report.peers], len(report.live)) == (["member"], live)


@pytest.mark.parametrize("phase", [LEAVING, LEFT])
def test_who_has_left_is_not_said_to_join_and_does_nothing_any_more(tmp_path: Path, phase: str) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_peer(A, phase=phase)
        await scene.announce_peer(B, phase=phase)
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        return await scene.report()

    report = run_virtual(main())
    states = {peer.peer: (peer.state, peer.tokens_per_second, peer.owned) for peer in report.peers}
    # one that leaves is there until a manifest does without it, and the last one's columns stay its own
    assert states == {A: ("member", 40.0, (0,)) if phase == LEAVING else ("left", 0.0, (0,)), B: ("left", 0.0, ())}


def test_a_member_that_says_nothing_is_silent(tmp_path: Path) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        await scene.announce_run()
        await scene.announce_head(scene.run.genesis(b"s" * 32))
        return await scene.report()

    report = run_virtual(main())
    assert (report.certificate, report.checked) == ("genesis", False)
    assert [(peer.peer, peer.state, peer.owned, peer.seen_at) for peer in report.peers] == [
        (A, "silent", (0, 1, 2, 3), 0.0)
    ]


@pytest.mark.parametrize(("age_seconds", "copies"), [(1.0, 3), (FRESH_SECONDS + 5, 2)])
def test_the_data_of_those_who_were_heard_lately_counts(tmp_path: Path, age_seconds: float, copies: int) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        await scene.announce_run()
        await scene.announce_peer(ORGANISER, age_seconds, "bootstrap", Held(whole=True))
        await scene.announce_peer(A, held=Held(7, b"\xff"))
        await scene.announce_peer(B, held=Held(whole=True))
        return await scene.report()

    assert run_virtual(main()).data == Coverage(copies, (), 1.0)


def test_certificates_that_nobody_can_prove_are_not_called_checked(tmp_path: Path) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_head(with_tokens(commits[-1], 10**9))  # its manifest is not what was signed
        await scene.serve(commits[:2])
        return await scene.report()

    assert run_virtual(main()).checked is False


def test_nobody_in_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        await Scene(tmp_path).report()

    with pytest.raises(NetworkError, match="announces no run"):
        run_virtual(main())


@pytest.mark.parametrize(("age_seconds", "missing"), [(1.0, ()), (FRESH_SECONDS + 5, (A,))])
def test_who_is_missing_for_a_quorum_is_named(tmp_path: Path, age_seconds: float, missing: tuple[PeerId, ...]) -> None:
    async def main() -> RunReport:
        scene = Scene(tmp_path)
        parent, child = scene.run.chain(2)
        renewal = scene.run.renewal(child.manifest)
        await scene.announce_run()
        await scene.announce_peer(A, age_seconds)
        await scene.announce_head(renewal)
        await scene.serve([parent, child, renewal])
        return await scene.report()

    report = run_virtual(main())
    assert (report.certificate, report.renewal, report.checked) == ("renewal", True, True)
    assert (report.needed, report.missing) == (1, missing)
