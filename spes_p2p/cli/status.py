"""`spes-p2p status`: what the DHT says about a run, for people and for scripts. Reads records and certificates only."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import Fingerprint, Invitation, OptionalPeers, RunId, met, option
from spes_p2p.ids import short
from spes_p2p.observe.metrics import amount_text, count_text, seconds_text, span_text
from spes_p2p.observe.text import share_text, to_type

if TYPE_CHECKING:
    from spes_p2p.peer.options import JoinTarget
    from spes_p2p.swarm.hivemind_backend import HivemindNetwork
    from spes_p2p.sync.report import ColumnLine, RunReport

WATCH_SECONDS = 5.0
CLEAR_SCREEN = "\x1b[2J\x1b[H"


def status(
    invitation: Invitation = None,
    initial_peers: OptionalPeers = None,
    run_id: RunId = None,
    fingerprint: Fingerprint = None,
    as_json: Annotated[bool, option("Print one JSON object instead of a table.", "--json")] = False,
    watch: Annotated[bool, option("Refresh every few seconds, until Ctrl-C.", "--watch")] = False,
    ids: Annotated[bool, option("Also list the whole ids of the peers.", "--ids")] = False,
) -> None:
    """Shows a run: round, peers, columns with their owners, age of the newest certificate. Any live node will do.

    Without an invitation: the run of the peer in the folder "peer".

    Example: spes-p2p status spes1...
    """
    from spes_p2p.errors import Stopped
    from spes_p2p.peer.kept_invite import DEFAULT_FOLDER
    from spes_p2p.peer.network import visit

    run = met(invitation, initial_peers, run_id, fingerprint, DEFAULT_FOLDER)
    # while the network opens, which mostly waits
    threading.Thread(target=importlib.import_module, args=("spes_p2p.sync.report",), daemon=True).start()
    try:
        visit(run, lambda network: _read_and_show(network, run, partial(text_of, ids=ids), as_json, watch))
    except Stopped:
        if not watch:
            raise


async def _read_and_show(
    network: HivemindNetwork, run: JoinTarget, text: Callable[[RunReport, float], str], as_json: bool, watch: bool
) -> None:
    import asyncio

    from spes_p2p.errors import NetworkError
    from spes_p2p.sync.report import read_report

    while True:
        try:
            report = await read_report(network, run.run_id, time.time(), run.fingerprint, run.addresses)
            shown = "" if as_json else text(report, time.time())
            (_show_again if watch else _show)(report, shown)
        except NetworkError as error:
            if not watch:
                raise
            typer.echo(f"{error}; trying again", err=True)
        if not watch:
            return
        await asyncio.sleep(WATCH_SECONDS)


def _show(report: RunReport, text: str) -> None:
    """Without a text, as JSON."""
    typer.echo(text or json.dumps(report.to_json(), indent=2))


def _show_again(report: RunReport, text: str) -> None:
    """JSON: a line each time. On a terminal the new table takes the place of the old one."""
    if not text:
        typer.echo(json.dumps(report.to_json()))
    elif sys.stdout.isatty():
        ending = f"{time.strftime('%H:%M:%S')}, refreshed every {WATCH_SECONDS:g} s; Ctrl-C to stop"
        typer.echo(f"{CLEAR_SCREEN}{text}\n\n{ending}")
    else:
        typer.echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")


def text_of(report: RunReport, now: float, ids: bool = False) -> str:
    """The report for people, at most 100 columns wide where no list is longer. `now`: Unix seconds.

    `ids`: with the whole ids of all peers.
    """
    from spes_p2p.consensus.quorum import waiting_text
    from spes_p2p.peer.herald import DATA_FLAG

    lines = _ending(report)
    lines += [f"run {report.run_id}, fingerprint {report.fingerprint[:16]}"]
    if report.certificate:
        tokens = f"{count_text(report.tokens)} tokens"
        lines.append(f"round {report.round}, step {report.step:,}, {tokens}, model {report.model_hash[:10]}")
    lines += [_certificate(report)]
    if report.missing:
        lines += [f"WAITING: {waiting_text(report.round, report.electors, report.needed, report.missing)}"]
    lines += ["", *_peers(report, now)]
    if ids:
        lines += ["", *(f"{short(one.peer)} is {one.peer}" for one in report.peers)]
    if report.columns:
        lines += ["", *_columns(report)]
    if report.banned:
        lines += ["", f"banned: {', '.join(map(short, report.banned))}"]
    if (data := _data_line(report)) is not None:
        lines += ["", f"data: {data}"]
    if report.mix:
        total = max(1, sum(one.sequences for one in report.mix))
        shares = [f"{one.name} {one.sequences / total:.1%} (dataset {one.hash[:10]})" for one in report.mix]
        lines += ["", f"handed out so far: {', '.join(shares)}"]
    if report.invitation and not report.is_over:
        lines += ["", f"others join with: spes-p2p join {report.invitation}{DATA_FLAG if report.brings_data else ''}"]
    return "\n".join(lines)


def _ending(report: RunReport) -> list[str]:
    """What the organiser has said of the end, in the first line; none where nothing."""
    if report.last_round is None:
        return []
    if not report.is_over:
        return [f"the organiser ends the run with round {report.last_round}"]
    command = to_type(f"spes-p2p export {report.invitation or 'spes1...'} --output MODEL")
    return [f"the run is over: its organiser ended it with round {report.round}; get its model with: {command}"]


def _data_line(report: RunReport) -> str | None:
    """How many copies of the data there are, and whose loss would stop training."""
    if (data := report.data) is None:
        return None
    text = f"{data.copies or 'no'} {'copies' if data.copies > 1 else 'copy'} of the least copied piece"
    if data.needed and not report.is_over:
        organisers = {peer.peer for peer in report.peers if peer.state == "bootstrap"}
        names = [f"the bootstrap node {short(one)}" if one in organisers else short(one) for one in data.needed[:3]]
        more = f" or {len(data.needed) - 3} more" if len(data.needed) > 3 else ""
        text += f"; without {' or '.join(names)}{more} training would stop"
        text += f", after {data.safe_part:.0%} of an epoch" if data.safe_part >= 0.01 else ""
    if data.web:
        return f"{text}; all of the data is on the web, too"
    return text if data.copies or report.is_over else f"{text}: training will wait until somebody provides it"


def _certificate(report: RunReport) -> str:
    from spes_p2p.sync.genesis import GENESIS

    if not report.certificate:
        waiting = sum(peer.state == "waiting" for peer in report.peers)
        return f"the run has not begun: {amount_text(waiting, 'peer')} waiting"
    signed = amount_text(report.seals, "signature")
    by = "a renewal, signed by the organiser" if report.renewal else signed
    if report.certificate == GENESIS:
        by = "signed by the organiser"
    age = "" if report.head_age_seconds is None else f", {seconds_text(report.head_age_seconds)} old"
    checked = "" if report.certificate == GENESIS else ", checked" if report.checked else ", NOT CHECKED"
    votes = "" if report.is_over else f"; {amount_text(report.electors, 'elector')} for the next round"
    return f"newest certificate: {by}{checked}{age}{votes}"


def _peers(report: RunReport, now: float) -> list[str]:
    lines = [
        f"{'peer':<8} {'state':<10} {'round':>6} {'tokens/s':>9} {'trained':>9} {'seen':>9}  {'version':<9} columns"
    ]
    for peer in report.peers:
        trains, known = peer.state != "bootstrap", peer.seen_at > 0
        cells = (
            f"{short(peer.peer):<8}",
            f"{'paused' if peer.state == 'member' and peer.vitals.phase == 'paused' else peer.state:<10}",
            f"{peer.round if known else '-':>6}",
            f"{count_text(peer.tokens_per_second) if trains and known else '-':>9}",
            f"{count_text(peer.tokens) if trains and known else '-':>9}",
            f"{seconds_text(max(0.0, now - peer.seen_at)) if known else 'never':>9} ",
            f"{peer.version or '-':<9}",
            span_text(peer.owned) or "-",
        )
        lines.append(" ".join(cells))
    if report.live:
        speed = count_text(sum(peer.tokens_per_second for peer in report.live))
        lines.append(f"{amount_text(len(report.live), 'live member')}, {speed} tokens/s together")
    for peer in report.peers:
        if peer.share is not None and peer.average_share is not None:
            told = f"{share_text(peer.share)} of what it gave counted, {peer.average_share:.0%} on average"
            lines.append(f"stranger {short(peer.peer)}: {told}")
    return lines


def _columns(report: RunReport) -> list[str]:
    """Neighbouring columns with the same owners and age in one line."""
    covered = len(report.columns) - len(report.uncovered)
    behind = f", {len(report.stale)} stale: {span_text(report.stale)}" if report.stale else ""
    lines = [f"expert columns: {covered} of {len(report.columns)} have an owner{behind}"]
    if report.more_trusted:
        more = amount_text(report.more_trusted, "more trusted peer")
        lines.append(f"  only trusted peers own columns alone: it takes {more} (spes-p2p run vouch)")

    def same(column: ColumnLine) -> tuple[object, int]:
        return column.owners, column.stale_rounds

    for (_, stale), group in groupby(report.columns, key=same):
        columns = list(group)
        owners = ", ".join(short(owner) for owner in columns[0].owners) or "nobody"
        age = f", last trained {amount_text(stale, 'round')} ago" if stale else ""
        age = ", never trained" if stale and stale == report.round else age
        lines.append(f"  {span_text([column.index for column in columns]):<9} {owners}{age}")
    return lines
