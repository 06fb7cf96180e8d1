"""Turns what a `Source` finds into history: rounds from commits, samples and events from what peers say of themselves.

If the swarm does not answer, only that is noted: the history stays, and the swarm is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.membership import Admission
from spes_p2p.consensus.messages import RENEWAL, Commit
from spes_p2p.consensus.quorum import waiting_text
from spes_p2p.dashboard.history import History, Load
from spes_p2p.dashboard.source import Known, Look, Source
from spes_p2p.errors import ClockSkewed, NetworkError, RemoteProtocolError, StorageFull
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.observe.metrics import span_text
from spes_p2p.ownership.assign import orphans
from spes_p2p.swarm.vitals import LEAVING, LEFT
from spes_p2p.sync.report import PeerLine, RunReport

LOOK_SECONDS = 2.0
MOST_FAILURES = 3
"""After this many looks in a row without any answer, the network is joined afresh."""
THIN_SECONDS = 600.0
MOST_PEERS = 500
DAY_SECONDS = 24 * 3600.0
WARNING_SECONDS, MOST_WARNINGS = 3600.0, 20
"""At most MOST_WARNINGS of one peer are recorded within WARNING_SECONDS."""
_MOST_CHARACTERS = 400

Open = Callable[[], Coroutine[Any, Any, Source]]


class Follower:
    """Writes looks into `history`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._thinned_at = 0.0
        self._warned: dict[PeerId, deque[float]] = {}

    def known(self) -> Known:
        newest = self._history.rows("SELECT MAX(round) FROM rounds")[0][0]
        return Known(-1 if newest is None else newest, self.name_of)

    def name_of(self, round: int) -> Hash | None:
        found = self._history.rows("SELECT name FROM rounds WHERE round = ?", (round,))
        return Hash(bytes.fromhex(found[0][0])) if found and found[0][0] else None

    def apply(self, look: Look, now: float) -> None:
        """`now`: Unix seconds. Raises ConfigError where the look is at another run, StorageFull."""
        report, history = look.report, self._history
        history.claim(report.run_id, report.fingerprint)
        with history.writing():
            if now - self._thinned_at > THIN_SECONDS:
                history.thin(now)
                self._thinned_at = now
            for commit in look.commits:
                self._add_commit(commit, report, now)
            self._set_head(report, now)
            before = history.peers()
            for line in report.peers:
                self._add_peer(line, before.get(line.peer), report, now)
            self._note_absent(before, report, now)
            self._tell(now, "")

    def fail(self, why: str, now: float) -> None:
        """Notes that nobody answered, or that the answers were invalid, and `why`."""
        with self._history.writing():
            self._tell(now, why)

    def _tell(self, now: float, why: str) -> None:
        was: dict[str, Any] = self._history.get("source") or {"error": "", "since": now}
        if bool(was["error"]) != bool(why):
            message = f"the swarm does not answer: {why}" if why else "the swarm answers again"
            self._history.add_event(now, "connection", "", message)
            was["since"] = now
        self._history.put("source", {"error": why, "since": was["since"], "at": now})

    # ---- the chain ----

    def _add_commit(self, commit: Commit, report: RunReport, now: float) -> None:
        manifest, history = commit.manifest, self._history
        newest = manifest.round == report.round
        at = now - (report.head_age_seconds or 0.0) if newest else None
        known = self.name_of(manifest.round)
        if known == manifest_hash(manifest):
            return  # another dashboard writes to the same file, and was faster
        if known is not None:
            history.add_event(
                now,
                "fork",
                "",
                f"the run goes on with a history that counts more: rounds from {manifest.round} on were replaced",
            )
        stale = sum(manifest.round > since for since in manifest.column_rounds) if manifest.slices else 0
        history.add_round(
            round=manifest.round, name=manifest_hash(manifest).hex(), at=at,
            kind=commit.certificate.kind, step=manifest.step,
            tokens=manifest.tokens, round_tokens=sum(one.tokens for one in manifest.roster),
            roster=len(manifest.roster), members=len(manifest.members),
            alpha=manifest.merge.alpha if manifest.merge else 0.0, stale=stale,
        )  # fmt: skip
        for one in manifest.roster:
            history.add_peer_round(round=manifest.round, peer=one.peer, at=at, seconds=[], loss=None, tokens=one.tokens)
        self._note_changes(commit, at if at is not None else now)

    def _note_changes(self, commit: Commit, at: float) -> None:
        manifest, history = commit.manifest, self._history
        before: dict[str, Any] | None = history.get("chain")
        now: dict[str, Any] = {
            "members": sorted(one.peer for one in manifest.members),
            "orphans": list(orphans(manifest.ownership)),
            "decay": 0 if manifest.decay is None else manifest.decay.steps,
        }
        history.put("chain", now)
        if commit.certificate.kind == RENEWAL:
            history.add_event(at, RENEWAL, "", f"round {manifest.round} is a renewal, by the organiser's key")
        if before is None:
            return
        for peer in sorted(set(now["members"]) - set(before["members"])):
            history.add_event(at, "joined", peer, f"{short(peer)} joined with round {manifest.round}")
        banned = Admission(manifest.roll).banned
        for peer in sorted(set(before["members"]) - set(now["members"])):
            kind, text = ("banned", "banned") if peer in banned else ("left", "no longer a member")
            history.add_event(at, kind, peer, f"{short(peer)} is {text} from round {manifest.round} on")
        if now["decay"] and not before.get("decay"):
            text = f"the learning rate falls over {now['decay']:,} steps from round {manifest.round} on"
            history.add_event(at, "decay", "", text)
        if now["orphans"] != before["orphans"]:
            without = f"expert columns without an owner: {span_text(now['orphans'])}"
            history.add_event(at, "experts", "", without if now["orphans"] else "every expert column has an owner")

    def _set_head(self, report: RunReport, now: float) -> None:
        before: dict[str, Any] = self._history.get("head") or {}
        waiting = ""
        if report.missing:
            waiting = waiting_text(report.round, report.electors, report.needed, report.missing)
        if bool(waiting) != bool(before.get("waiting")):
            self._history.add_event(now, "waiting", "", waiting or "enough electors are heard again")
        if report.last_round is not None and not before.get("last_round"):
            text = f"the organiser ends the run with round {report.last_round}"
            self._history.add_event(now, "ending", "", text)
        if report.is_over and not before.get("is_over"):
            self._history.add_event(now, "end", "", f"the run is over: round {report.round} was its last")
        self._history.put(
            "head",
            {
                "round": report.round, "step": report.step, "tokens": report.tokens,
                "certificate": report.certificate, "renewal": report.renewal, "checked": report.checked,
                "seals": report.seals, "electors": report.electors, "model_hash": report.model_hash,
                "at": now - report.head_age_seconds if report.head_age_seconds is not None else None,
                "stale": list(report.stale),
                "data": None if report.data is None else dataclasses.asdict(report.data),
                "last_round": report.last_round or before.get("last_round"),
                "is_over": report.is_over or bool(before.get("is_over")),
                "waiting": waiting,
                "columns": [[list(one.owners), one.stale_rounds] for one in report.columns],
            },
        )  # fmt: skip

    # ---- peers ----

    def _add_peer(self, line: PeerLine, before: dict[str, Any] | None, report: RunReport, now: float) -> None:
        history, vitals = self._history, line.vitals
        if before is None and line.state not in ("member", "silent") and len(history.peers()) >= MOST_PEERS:
            return  # anybody can write records
        self._note_peer(line, before, now)
        history.set_peer(line.peer, shown_of(line))
        if line.state == "bootstrap" or not line.seen_at or (before and before["seen_at"] == line.seen_at):
            return
        history.add_sample(
            peer=line.peer, at=now, loss=vitals.loss or None, tokens_per_second=line.tokens_per_second,
            sent=vitals.bytes_sent, received=vitals.bytes_received, tokens=report.tokens,
        )  # fmt: skip
        if line.state not in ("member", "silent"):
            return  # what only strangers say is not drawn
        self._note_warnings(line, before, now)
        if vitals.phase_seconds and self._is_kept(vitals.timed_round):
            tokens = history.rows(
                "SELECT tokens FROM peer_rounds WHERE round = ? AND peer = ?", (vitals.timed_round, line.peer)
            )
            self._add_load(line, tokens[0][0] if tokens else 0, len(report.columns), now)
            history.add_peer_round(
                round=vitals.timed_round, peer=line.peer, at=vitals.applied_at_seconds,
                seconds=list(vitals.phase_seconds), loss=vitals.round_loss or None,
                tokens=tokens[0][0] if tokens else 0,
            )  # fmt: skip
        if vitals.held_out_loss and self._is_kept(vitals.held_out_round):
            history.add_held_out(round=vitals.held_out_round, at=now, loss=vitals.held_out_loss, peer=line.peer)

    def _add_load(self, line: PeerLine, tokens: int, experts: int, now: float) -> None:
        """Weighted with the tokens that the round's certificate counts of the peer, not with what it says itself."""
        vitals = line.vitals
        parts = (vitals.load_percent, vitals.highest_load_percent, vitals.lowest_load_percent)
        load = Load(*(tuple(percent / 100 for percent in part) for part in parts))
        if tokens and len(load.mean) == experts:
            self._history.add_load(vitals.timed_round, line.peer, now, tokens, load)

    def _note_warnings(self, line: PeerLine, before: dict[str, Any] | None, now: float) -> None:
        """Records the peer's new warnings, in its own words, at the time that it gives if that is plausible."""
        told = (before or {}).get("warnings", [])
        lately = self._warned.setdefault(line.peer, deque(maxlen=MOST_WARNINGS))
        for warning in line.vitals.warnings:
            if [warning.at_seconds, warning.message] in told:
                continue
            if len(lately) == MOST_WARNINGS and now - lately[0] < WARNING_SECONDS:
                return
            lately.append(now)
            at = warning.at_seconds if now - DAY_SECONDS < warning.at_seconds < now else now
            self._history.add_event(at, warning.kind, line.peer, f"{short(line.peer)}: {warning.message}")

    def _is_kept(self, round: int) -> bool:
        """A peer may tell of rounds that nobody else knows."""
        return bool(self._history.rows("SELECT 1 FROM rounds WHERE round = ?", (round,)))

    def _note_peer(self, line: PeerLine, before: dict[str, Any] | None, now: float) -> None:
        was, is_now, name = before or {}, line.state, short(line.peer)
        if was.get("state") != is_now and is_now in ("silent", "joining", "waiting"):
            words = {"silent": "is silent", "joining": "is joining", "waiting": "is waiting for the run to start"}
            self._history.add_event(now, is_now, line.peer, f"{name} {words[is_now]}")
        if was.get("version") not in (None, "", line.version) and line.version:
            self._history.add_event(now, "version", line.peer, f"{name} now runs version {line.version}")
        paused = (was.get("phase") == "paused", line.vitals.phase == "paused")
        goes = line.vitals.phase in (LEAVING, LEFT)
        if before is not None and paused[0] != paused[1] and not goes:
            self._history.add_event(
                now, "pause", line.peer, f"{name} {'is paused' if paused[1] else 'resumes training'}"
            )

    def _note_absent(self, before: dict[str, dict[str, Any]], report: RunReport, now: float) -> None:
        """Keeps peers whose record has disappeared in the list, marked as gone."""
        for peer in set(before) - {line.peer for line in report.peers}:
            if before[peer]["state"] != "gone":
                self._history.set_peer(peer, {**before[peer], "state": "gone", "tokens_per_second": 0.0, "phase": ""})


def shown_of(line: PeerLine) -> dict[str, Any]:
    """What the page shows of a peer, and of its warnings those that stand among the events already."""
    is_member = line.state in ("member", "silent")
    return {
        "state": line.state, "version": line.version, "round": line.round, "step": line.step, "tokens": line.tokens,
        "tokens_per_second": line.tokens_per_second, "owned": list(line.owned), "seen_at": line.seen_at,
        "joined_at": line.joined_at, "reach": _reach(line), "phase": line.vitals.phase, "device": line.vitals.device,
        "warnings": [[one.at_seconds, one.message] for one in line.vitals.warnings] if is_member else [],
        "share": line.share, "average_share": line.average_share,
        "loss": line.vitals.loss or None, "sent": line.vitals.bytes_sent, "received": line.vitals.bytes_received,
    }  # fmt: skip


def _reach(line: PeerLine) -> str:
    if not line.seen_at:
        return ""
    return "behind NAT" if line.client_mode or not line.addresses else "direct"


async def follow(
    open_source: Open,
    history: History,
    source: Source | None = None,
    look_seconds: float = LOOK_SECONDS,
    clock: Callable[[], float] = time.time,
) -> None:
    """Looks at the run for ever. `source`: one that is already open. Raises all errors but those of the network, a
    clock that is wrong for a while, and a full disk.
    """
    follower, failures = Follower(history), 0
    try:
        while True:
            try:
                source = source or await open_source()
                look = await source.look(clock(), follower.known())
                await asyncio.get_running_loop().run_in_executor(None, follower.apply, look, clock())
                failures = 0
            except (NetworkError, RemoteProtocolError, ClockSkewed, StorageFull) as error:
                failures += not isinstance(error, StorageFull)
                with contextlib.suppress(StorageFull):
                    follower.fail(f"{error}"[:_MOST_CHARACTERS], clock())
            if failures >= MOST_FAILURES and source is not None:
                failing, source, failures = source, None, 0
                await failing.close()
            await asyncio.sleep(look_seconds)
    finally:
        if source is not None:
            await source.close()
