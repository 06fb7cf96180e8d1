"""Which run is meant: from what the DHT announces, a name and perhaps a fingerprint to one run, and to its config.

Anybody may announce a run under any name, so the fingerprint is what tells runs apart. Nothing here loads numpy:
whoever only looks at a run needs no more than this.
"""

from __future__ import annotations

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import WIRE_VERSION
from spes_p2p.errors import ConfigError, NetworkError, RemoteProtocolError
from spes_p2p.exchange.patience import ask_small
from spes_p2p.exchange.requests import RunRequest
from spes_p2p.ids import short
from spes_p2p.swarm.ports import Directory, Network, Transport
from spes_p2p.swarm.records import RUNS_KEY, RunGroup, RunRecord, group_runs, parse_all
from spes_p2p.sync.genesis import RunInfo, check_run
from spes_p2p.wire import unpack

SHOWN_DIGITS = 16
MAX_RUN_BYTES = 2**20


async def find_run(
    directory: Directory, run_id: str | None, timeout_seconds: float, fingerprint: str | None = None
) -> RunGroup:
    """The run with this name and fingerprint (hexadecimal, its first digits will do), else the only one announced.

    Raises NetworkError when none is announced, ConfigError when there is a choice or none is the one asked for,
    RemoteProtocolError when it speaks another wire version than this program.
    """
    records = parse_all(RunRecord, await directory.read(RUNS_KEY, timeout_seconds))
    group = choose_run(group_runs(records), run_id, fingerprint)
    versions = group.wire_versions
    if WIRE_VERSION not in versions:
        raise RemoteProtocolError(
            f"run {group.run_id} speaks wire version {versions[-1]}, but this program speaks {WIRE_VERSION}",
            fix="upgrade spes-p2p" if versions[-1] > WIRE_VERSION else "ask the organiser to upgrade",
        )
    return group


async def find_and_load(
    network: Network, run_id: str | None, fingerprint: str | None, timeout_seconds: float
) -> tuple[RunInfo, Config]:
    """Of the run that is meant (see `find_run`). Raises NetworkError, ConfigError, RemoteProtocolError."""
    group = await find_run(network.directory, run_id, timeout_seconds, fingerprint)
    return await load_run(network.transport, group, timeout_seconds)


async def load_run(transport: Transport, group: RunGroup, timeout_seconds: float) -> tuple[RunInfo, Config]:
    """The run's record and config, from the first publisher that serves what the fingerprint stands for."""
    reasons: list[str] = []
    for peer, addresses in group.addresses().items():
        transport.learn(peer, addresses)
    for peer in group.addresses():
        try:
            info = unpack(RunInfo, await ask_small(transport, peer, RunRequest(), timeout_seconds, MAX_RUN_BYTES))
            return info, check_run(info, group.fingerprint)
        except (NetworkError, RemoteProtocolError) as error:
            reasons.append(f"{short(peer)}: {error}")
            if isinstance(error, RemoteProtocolError) and error.fix and len(group.records) == 1:
                raise
    raise NetworkError(
        f"no node could serve the config of run {group.run_id}: {'; '.join(reasons) or 'no address is announced'}",
        fix="try again in a minute, or ask the organiser whether the run is still alive",
    )


def choose_run(groups: list[RunGroup], run_id: str | None = None, fingerprint: str | None = None) -> RunGroup:
    """See `find_run`."""
    if not groups:
        raise NetworkError(
            "the DHT answers but announces no run",
            fix="check the address with the organiser; a bootstrap node without --config announces none",
        )
    named = [group for group in groups if run_id in (None, group.run_id)]
    if not named:
        names = " or ".join(sorted({group.run_id for group in groups}))
        raise ConfigError(
            f"no run {run_id!r} is announced here, only {_listed(groups)}",
            # an invitation names its run, by fingerprint too
            fix=f"give --run-id {names}" if fingerprint is None else "ask the organiser whether the run is still alive",
        )
    fitting = [group for group in named if group.fingerprint.hex().startswith((fingerprint or "").lower())]
    if not fitting:
        raise ConfigError(
            f"no run with fingerprint {fingerprint} is announced here, only {_listed(named)}",
            fix="ask the organiser for the right join command, or leave --fingerprint out to take what is announced",
        )
    if len(fitting) > 1:
        flag = "--run-id" if len({group.run_id for group in fitting}) == len(fitting) else "--fingerprint"
        raise ConfigError(f"several runs are announced here: {_listed(fitting)}", fix=f"choose one with {flag}")
    return fitting[0]


def _listed(groups: list[RunGroup]) -> str:
    return ", ".join(f"{group.run_id} ({group.fingerprint.hex()[:SHOWN_DIGITS]})" for group in groups)
