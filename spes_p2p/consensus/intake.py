"""Which part takes an event in. Decides nothing: the rules are tried afterwards."""

from __future__ import annotations

from spes_p2p.consensus import events as on
from spes_p2p.consensus.parts import Parts
from spes_p2p.consensus.rules import Outcome


def take(event: on.Event, parts: Parts, now: float) -> bool:
    """Takes an event in; whether the rules should look at what has changed. Raises TypeError for what is no event."""
    if _take_quietly(event, parts, now):
        return False
    if not _take_work(event, parts, now):
        _take_change(event, parts, now)
    return True


def _take_quietly(event: on.Event, parts: Parts, now: float) -> bool:
    """Events from which nothing follows at once."""
    match event:
        case on.BytesMoved():
            parts.staging.bytes_moved(now)
        case on.StateLost(state_roots):
            parts.staging.state_lost(state_roots)
        case on.PeersFound(peers):
            parts.lifecycle.peers_found(peers)
        case on.UplinkMeasured(bytes_per_second):
            parts.lifecycle.uplink_measured(bytes_per_second)
        case _:
            return False
    return True


def _take_work(event: on.Event, parts: Parts, now: float) -> bool:
    """How work went that was asked for."""
    match event:
        case on.TrainingProgressed(work):
            parts.round_plan.trained(work, now)
        case on.SliceReduced(report):
            parts.reducing.reduced(report, now)
        case on.SliceStaged(key, hashes, times_ours):
            parts.staging.staged(key, hashes, now)
            parts.audits.staged(key, times_ours)
        case on.SliceAudited(report, finding):
            parts.audits.audited(report, finding, now)
        case on.WorkAudited(entry, finding):
            parts.work_audits.audited(entry, finding)
        case on.ColumnsTried(columns, harmful):
            parts.trials.tried(columns, harmful, now)
        case on.FetchFailed(key, is_unfit):
            parts.staging.fetch_failed(key, now, is_unfit)
        case on.StagingFailed(key):
            parts.staging.staging_failed(key, now)
        case on.SlicesLost(keys):
            parts.staging.unstaged(keys)
        case on.StateBuilt(build, wire_root, state_root, merge):
            parts.reducing.built(build, Outcome(build.roster, build.slices, wire_root, state_root, merge), now)
        case on.StateVerified(manifest):
            parts.staging.verified(manifest, now)
        case on.VerifyFailed():
            parts.staging.verify_failed(now)
        case on.AdoptFailed():
            parts.following.adopt_failed()
        case on.CatchUpFailed(is_ours):
            parts.following.catch_up_failed(now, is_ours)
        case _:
            return False
    return True


def _take_change(event: on.Event, parts: Parts, now: float) -> None:
    """Where we stand, or what we may and want to do, is another."""
    match event:
        case on.CommitApplied(commit, ledger, placed):
            parts.contacts.place(placed)
            parts.following.applied(commit, ledger, now)
        case on.HistorySwitched(commit, ledger, incarnation, placed):
            parts.following.switched(commit, ledger, incarnation, now)
            parts.contacts.place(placed)
        case on.ForkRejected(tip_hash, look_again):
            parts.following.fork_rejected(tip_hash, look_again, now)
        case on.IncarnationBegun(incarnation):
            parts.lifecycle.begin_incarnation(incarnation)
        case on.DiskFull(durable):
            parts.lifecycle.disk_full(durable, now)
        case on.DiskHasRoom():
            parts.lifecycle.disk_has_room()
        case on.HistoryChosen(children):
            parts.lifecycle.choose(children)
        case on.DecayOrdered(order):
            parts.lifecycle.order_decay(order)
        case on.RollSigned(roll):
            parts.lifecycle.take_roll(roll)
        case on.IntentChanged(intent):
            parts.lifecycle.change_intent(intent)
        case _:
            raise TypeError(f"{event!r} is no event")
