"""A made-up run for the dashboard's tests: looks as a `Source` would find them, of four peers over some rounds."""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.consensus.manifest import Merge
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.dashboard.source import Known, Look
from spes_p2p.data.held import Coverage
from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.swarm.vitals import PeerWarning, Vitals
from spes_p2p.sync.report import ColumnLine, PeerLine, RunReport
from tests.sync.chains import MadeRun

NOW = 1_700_000_000.0
ROUND_SECONDS = 30.0
PEERS = tuple(PeerId(f"QmcUafVmoHSS8E9zV7UwhPHaR5gmUCrGRLMvXBYqN{name}1") for name in ("anna", "bent", "carl", "dora"))
BOOTSTRAP = PeerId("QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xboot3")
WARNED_ROUND, WARNING = 22, "3 expert columns begin with <b>fresh</b> optimizer moments: their owner was lost"
FINGERPRINT = "d53c9f38a4046582" * 4


class MadeSource:
    """Gives look after look, a round further each time; raises NetworkError once `dead` is set."""

    def __init__(self, rounds: int = 40, columns: int = 16) -> None:
        self.round = 0
        self.dead = False
        self.closed = 0
        self._columns = columns
        self._chain = _chain(rounds)

    async def look(self, now: float, known: Known) -> Look:
        if self.dead:
            raise NetworkError("no initial peer can be reached: 10.0.0.1 is refused")
        look = self.look_at(self.round, now, known)
        self.round = min(self.round + 1, len(self._chain) - 1)
        return look

    async def close(self) -> None:
        self.closed += 1

    def look_at(self, round: int, now: float, known: Known) -> Look:
        return Look(self.report(round, now), tuple(self._chain[known.newest + 1 : round + 1]))

    def report(self, round: int, now: float) -> RunReport:
        manifest = self._chain[round].manifest
        peers = tuple(_line(at, peer, round, now) for at, peer in enumerate(PEERS))
        boot = PeerLine(BOOTSTRAP, "bootstrap", round, 0, 0, 0.0, (), "0.1.0", now - 1, ("/ip4/203.0.113.7/tcp/31337",))
        columns = tuple(_column(at, round) for at in range(self._columns))
        return RunReport(
            "made", FINGERPRINT, round, manifest.step, manifest.tokens, "quorum" if round else "genesis", False,
            True, 3, 4, 2.0, "7e37ef20d4" * 6, (boot, *peers), columns,
            data=Coverage(1, (BOOTSTRAP,), 0.0),
        )  # fmt: skip


def loss_at(round: int) -> float:
    return 6.0 * 0.96**round + 2.0


def load_at(expert: int, round: int, peer: int) -> int:
    """In percent: even at first, then expert 5 takes more and more, and 11 less and less until nothing is left."""
    drift = {5: 9, 11: -4}.get(expert, -(expert % 3) / 2)
    wave = (expert * 37 + round * 11) % 17 - 8 if expert != 11 else 0
    return max(0, int(100 + drift * round + wave + 2 * peer))


def _chain(rounds: int) -> list[Commit]:
    """Commits whose manifests follow one another by their hashes; a merge in every fifth."""
    made = MadeRun()
    members = [Member(peer, 1, True, 0) for peer in PEERS]
    commits = [made.genesis(b"s" * 32)]
    commits[0] = replace(commits[0], manifest=replace(commits[0].manifest, members=tuple(members)))
    for round in range(1, rounds):
        manifest = made.child(commits[-1].manifest, b"%032d" % round, b"w" * 32)
        roster = tuple(
            replace(manifest.roster[0], peer=peer, tokens=40_000 + 1000 * at) for at, peer in enumerate(PEERS)
        )
        alpha = 0.05 * (1 - round / rounds)
        manifest = replace(
            manifest, roster=roster, members=tuple(members), tokens=166_000 * round,
            merge=Merge(alpha, ()) if round % 5 == 0 else None,
        )  # fmt: skip
        commits.append(made.certified(manifest))
    return commits


def _line(at: int, peer: PeerId, round: int, now: float) -> PeerLine:
    train = 20.0 + at + (12.0 if at == 3 and round % 4 == 0 else 0.0)
    loss = loss_at(round) + 0.02 * at if round else 0.0
    vitals = Vitals(
        "training", ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "cpu", "")[at], loss_at(round) + 0.05 * at,
        round, now - 1.0, (train, 0.4, 5.0 - at, 0.3, 1.0) if round else (), loss,
        10**8 * round * (at + 1), 2 * 10**8 * round, round if at == 0 else 0, loss_at(round) + 0.1 if at == 0 else 0.0,
    )  # fmt: skip
    if round:
        load = tuple(load_at(expert, round, at) for expert in range(16))
        highest = tuple(2 * percent for percent in load)
        vitals = replace(vitals, load_percent=load, highest_load_percent=highest, lowest_load_percent=(0,) * 16)
    if at == 1 and round >= WARNED_ROUND:
        since = float(int(now - (round - WARNED_ROUND) * ROUND_SECONDS + 0.5))
        vitals = replace(vitals, warnings=(PeerWarning(since, "warning", WARNING),))
    addresses = () if at == 1 else ("/ip4/203.0.113.9/tcp/4000",)
    return PeerLine(
        peer, "silent" if at == 2 and round > 30 else "member", round, 100 * round, 40_000 * round, 1500.0 + 400 * at,
        tuple(range(4 * at, 4 * at + 4)), "0.1.0", now - 1 - at, addresses, at == 1, NOW, vitals,
    )  # fmt: skip


def _column(at: int, round: int) -> ColumnLine:
    owners = (PEERS[at // 4 % 4],) if at % 5 else (PEERS[at // 4 % 4], PEERS[(at // 4 + 1) % 4])
    return ColumnLine(at, () if at == 13 and round > 20 else owners, round - 20 if at == 13 and round > 20 else 0)
