"""`spes-p2p status`: what the DHT says of a run, for people and for scripts. Reads records and certificates only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli.arguments import InitialPeers, RunId

if TYPE_CHECKING:
    from spes_p2p.sync.report import RunReport

WATCH_SECONDS = 5.0


def status(
    initial_peers: InitialPeers,
    run_id: RunId = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every few seconds, until Ctrl-C.")] = False,
) -> None:
    """Shows a run: round, peers, columns with their owners, age of the newest certificate. Any live node will do.

    Example: spes-p2p status --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/Qm...
    """
    from spes_p2p.peer.connection import open_network
    from spes_p2p.peer.options import NetworkOptions
    from spes_p2p.swarm.hivemind_backend import NetworkThread
    from spes_p2p.sync.report import read_report

    options = NetworkOptions(tuple(initial_peers), client_mode=True, use_relay=False)
    with TemporaryDirectory(prefix="spes-p2p-status-") as folder, NetworkThread() as thread:
        network = thread.run(open_network(options, Path(folder) / "identity.key"))
        try:
            while True:
                reading = read_report(network.directory, network.transport, network.verifier, run_id, time.time())
                report = thread.run(reading)
                typer.echo(json.dumps(report.to_json(), indent=2) if as_json else _table(report))
                if not watch:
                    return
                time.sleep(WATCH_SECONDS)
        finally:
            thread.run(network.close())


def _certificate(report: RunReport) -> str:
    from spes_p2p.observe.metrics import seconds_text

    if not report.certificate:
        return "no certificate yet: the run has not begun"
    age = "" if report.head_age_seconds is None else f", {seconds_text(report.head_age_seconds)} old"
    return f"newest certificate: {report.certificate}{age}{', seals checked' if report.checked else ''}"


def _table(report: RunReport) -> str:
    from spes_p2p.observe.metrics import count_text, seconds_text

    now = time.time()
    lines = [
        f"run {report.run_id}  fingerprint {report.fingerprint[:16]}",
        f"round {report.round}  step {report.step:,}  {count_text(report.tokens)} tokens committed",
        _certificate(report),
        "",
        f"{'peer':<14} {'role':<10} {'round':>6} {'tokens/s':>9} {'tokens':>8} {'seen':>6}  {'version':<8} columns",
    ]
    for peer in report.peers:
        seen = seconds_text(max(0.0, now - peer.seen_at))
        columns = ",".join(map(str, peer.owned)) or "-"
        lines.append(
            f"{peer.peer[-12:]:<14} {peer.role:<10} {peer.round:>6} {count_text(peer.tokens_per_second):>9} "
            f"{count_text(peer.tokens):>8} {seen:>6}  {peer.version:<8} {columns}"
        )
    covered = sum(bool(column.owners) for column in report.columns)
    lines += ["", f"columns: {covered} of {len(report.columns)} have an owner"]
    for column in report.columns:
        owners = ", ".join(owner[-6:] for owner in column.owners) or "nobody"
        stale = f", {column.stale_rounds} rounds old" if column.stale_rounds else ""
        lines.append(f"  {column.index:>4}: {owners}{stale}")
    return "\n".join(lines)
