"""What a person chooses for one machine: the flags of `join`, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.data.web_url import WebAccess
from spes_p2p.errors import ConfigError, PermanentError
from spes_p2p.ids import PeerId
from spes_p2p.peer.pausing import Schedule
from spes_p2p.planning.units import parse_bytes, parse_rate
from spes_p2p.swarm.invite import MARK, Invite, decode, looks_like_invite
from spes_p2p.swarm.pacing import LEAST_BYTES_PER_SECOND

DEFAULT_HOST_MADDRS = ("/ip4/0.0.0.0/tcp/0",)
DEFAULT_MAX_DATA_DISK = 20 * 10**9
LEAST_DISK = 16 * 10**6
_GIVE = f"give the file that was sent to you, or the invitation itself, one long word that begins with {MARK}1"


@dataclass(frozen=True)
class NetworkOptions:
    """Where to find others, where to be found, and how much of the link may be taken.

    `identity_path` None: `identity.key` in the node's folder. `max_upload`, `max_download`: bytes a second.
    """

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = DEFAULT_HOST_MADDRS
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None
    client_mode: bool = False
    max_upload: float | None = None
    max_download: float | None = None
    known_peers: tuple[str, ...] = ()
    """Where this node found others in an earlier life."""


@dataclass(frozen=True)
class JoinTarget:
    """Where a run is found, and which one is meant; `organiser` None: whoever the run names. `token`: see `Invite`.

    `folder`: the node's on this machine that named it, for messages; None where somebody typed it.
    """

    addresses: tuple[str, ...] = ()
    run_id: str | None = None
    fingerprint: str | None = None
    organiser: PeerId | None = None
    token: bytes = b""
    folder: Path | None = None


def meeting(
    invites: Sequence[str],
    initial_peers: Sequence[str],
    run_id: str | None = None,
    fingerprint: str | None = None,
) -> JoinTarget:
    """The run and the addresses meant by invitations, `initial_peers` (which may hold invitations, too) and flags.

    Raises ConfigError for a mistyped invitation, and if invitations or flags name different runs.
    """
    found = [decode(word) for word in (*map(_typed_or_in_file, invites), *filter(looks_like_invite, initial_peers))]
    addresses = [word for word in initial_peers if not looks_like_invite(word)]
    if not found:
        return JoinTarget(tuple(addresses), run_id, fingerprint)
    for one in found:
        _check_one_run(one, found[0], run_id, fingerprint)
    addresses += [address for one in found for address in one.addresses]
    longer = max((fingerprint or "").lower(), found[0].fingerprint.hex(), key=len)
    token = next((one.token for one in found if one.token), b"")
    return JoinTarget(tuple(dict.fromkeys(addresses)), found[0].run_id, longer, found[0].organiser, token)


def _typed_or_in_file(word: str) -> str:
    """An invitation, or the one in the file of that name, in which lines may have been broken anywhere."""
    if looks_like_invite(word):
        return word
    try:
        text = "".join(Path(word).read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        if re.match(rf"{MARK}\d", word):
            return word  # cut short: of which is said that it is no invitation
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{word[:80]!r} is not an invitation, and no file with one: {reason}",
            fix=f"{_GIVE}; an address goes behind --initial-peers",
        ) from error
    found = re.search(rf"{MARK}\d\w+", text)  # a command may stand before it
    if found is None:
        raise ConfigError(f"the file {word} holds no invitation", fix=_GIVE)
    return found[0]


def _check_one_run(invite: Invite, first: Invite, run_id: str | None, fingerprint: str | None) -> None:
    given, own = (fingerprint or "").lower(), invite.fingerprint.hex()
    same = invite.fingerprint == first.fingerprint and run_id in (None, invite.run_id)
    if not (same and (own.startswith(given) or given.startswith(own))):
        other = first.run_id if invite.fingerprint != first.fingerprint else (run_id or f"fingerprint {fingerprint}")
        raise ConfigError(
            f"the invitation is to run {invite.run_id} with fingerprint {own[:16]}, not to {other}",
            fix="give one invitation, without --run-id and --fingerprint",
        )


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(invitations, overrides) of what was typed without a flag; overrides have an equals sign.

    Raises ConfigError for an address, which is no invitation.
    """
    if (address := next((word for word in words if word.startswith("/")), None)) is not None:
        raise ConfigError(f"{address} is an address without a flag", fix="give each its own: --initial-peers ADDRESS")
    invites = tuple(word for word in words if "=" not in word)
    return invites, tuple(word for word in words if word not in invites)


@dataclass(frozen=True)
class PeerOptions:
    """Everything about one peer that is not the run's.

    `fingerprint`: hexadecimal digits with which the run's fingerprint must begin. `organiser`: whose key genesis must
    be signed with (None: whom the run names, which its fingerprint covers). `token`: of an invitation for this peer
    alone. `owned_experts`: columns to claim (None: none by number). `max_experts`: most columns that it ever owns
    (None: what fits into memory). `until_round`: stop once the run has committed this round (None: go on until told to
    stop). `dump_rounds`: folder for what goes in and out of each round. `config_path`: the run must have this config.
    `max_data_disk`: bytes of the run's data that are kept where they come from other peers (`data` is None).
    `schedule`: hours in which to train (None: all). `metrics_port`: where Prometheus may ask at `metrics_host` (None:
    nowhere). `web_data`: which web servers data is fetched from, of those that the organiser names.
    """

    network: NetworkOptions
    folder: Path
    data: str | None = None
    run_id: str | None = None
    fingerprint: str | None = None
    owned_experts: tuple[int, ...] | None = None
    max_experts: int | None = None
    device: str = "auto"
    local_ranks: int | None = None
    until_round: int | None = None
    dump_rounds: Path | None = None
    overrides: tuple[str, ...] = ()
    config_path: Path | None = None
    max_data_disk: int = DEFAULT_MAX_DATA_DISK
    organiser: PeerId | None = None
    token: bytes = b""
    schedule: Schedule | None = None
    pause_on_battery: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    web_data: WebAccess = WebAccess.PUBLIC


def listening(host_maddrs: Sequence[str] | None, port: int | None) -> tuple[str, ...]:
    """The addresses to listen on. `port`: on all interfaces, 0 or None for a free one. Raises ConfigError for both."""
    if host_maddrs and port is not None:
        raise ConfigError(
            f"--port {port} and --host-maddrs {host_maddrs[0]} both say where to listen",
            fix="give --port, or addresses with their ports in --host-maddrs",
        )
    return tuple(host_maddrs or (f"/ip4/0.0.0.0/tcp/{port or 0}",))


def parse_data_disk(text: str) -> int:
    """`20GB` to bytes. Raises ConfigError, also for less than training can live with."""
    size = parse_bytes(text, "--max-data-disk")
    if size < LEAST_DISK:
        raise ConfigError(
            f"--max-data-disk {text} is too small: it must hold enough of the run's data to train from",
            fix=f"allow {LEAST_DISK // 10**6}MB or more, or give a copy of the token shards with --data",
        )
    return size


def parse_limit(text: str | None, flag: str) -> float | None:
    """`20Mbit` to bytes a second. Raises ConfigError that names `flag`, also for less than a peer can live with."""
    rate = None if text is None else parse_rate(text, flag)
    if rate is not None and rate < LEAST_BYTES_PER_SECOND:
        least = f"{LEAST_BYTES_PER_SECOND * 8 // 1000}kbit"
        raise ConfigError(f"{flag} {text} is less than the messages of a round need", fix=f"allow {least} or more")
    return rate


def config_path(given: Path) -> Path:
    """The file, or the config of this name that comes with spes-p2p. Raises ConfigError for a name of none."""
    from spes_p2p.config.load import bundled_config  # takes long to load, and not everybody has a config

    is_name = given.suffix == "" and len(given.parts) == 1 and not given.is_file()
    return bundled_config(str(given)) if is_name else given


def parse_columns(text: str) -> tuple[int, ...]:
    """`0,3-5` to (0, 3, 4, 5). Raises ConfigError for anything else."""
    columns: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not span:
            raise ConfigError(f"--owned-experts {text!r} is not a list of columns", fix="write it as 0,3-5")
        columns |= set(span)
    return tuple(sorted(columns))


def check_columns(columns: tuple[int, ...], num_experts: int) -> None:
    """Raises PermanentError where a column is out of the run's range."""
    wrong = [column for column in columns if column >= num_experts]
    if wrong:
        raise PermanentError(
            f"--owned-experts names column {wrong[0]}, but the run has {num_experts} (0 to {num_experts - 1})",
            fix=f"choose columns below {num_experts}",
        )


def column_budget(options: PeerOptions, experts_per_peer: int, fit: int, num_experts: int) -> int:
    """The most columns that this peer may be given. `fit`: the number that fits into memory according to the plan.

    `experts_per_peer` and the columns claimed with --owned-experts are assumed to fit. Raises PermanentError if more
    are claimed than --max-experts allows.
    """
    claimed = len(options.owned_experts or ())
    if options.max_experts is None:
        return min(num_experts, max(fit, claimed or experts_per_peer))
    if claimed > options.max_experts:
        raise PermanentError(
            f"--owned-experts names {claimed} columns, but --max-experts is {options.max_experts}",
            fix="claim fewer columns, or raise --max-experts",
        )
    return min(num_experts, options.max_experts)
