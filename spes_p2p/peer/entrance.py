"""How a node comes into the network and finds its run there; nothing of the run is entered yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.config.fingerprint import apply_peer_overrides, check_peer_overrides, differences
from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Admission
from spes_p2p.errors import ConfigError, NetworkError, PermanentError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.peer.contacts import Contacts, first_addresses
from spes_p2p.peer.folder import CHAIN, RUN, claim_folder, kept_run
from spes_p2p.peer.network import open_network
from spes_p2p.peer.options import PeerOptions, check_columns, column_budget, config_path
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, Reach
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.swarm.ports import Network
from spes_p2p.sync.chain import CommitFiles
from spes_p2p.sync.finding import find_run, load_run
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.node import Run
from spes_p2p.sync.organiser_words import WORDS_FILE, Words, known_words, load_orders
from spes_p2p.sync.passes import read_pass
from spes_p2p.sync.sealing import EnvelopeChecker

ANSWER_SECONDS = 15.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class FoundRun:
    """A run as a peer found it: `run` has the peer's own choices in its config.

    `publishers` announce the run, `round` is where they say it is. `contacts` are what is known of its nodes.
    """

    run: Run
    publishers: tuple[PeerId, ...]
    round: int
    contacts: Contacts


def reach_text(network: HivemindNetwork) -> str:
    """What a person should know of how others reach this machine; empty where nothing was found out."""
    if network.reach is Reach.PUBLIC:
        return f"others can dial this machine, at {network.dialled_at}{_by_router(network.dialled_at)}"
    if network.reach is Reach.PRIVATE:
        return (
            "nobody can dial this machine (a firewall, or a router that opened no port when asked): it can still "
            "train, over connections that it keeps open; to let it also reduce for others, forward a TCP port and name "
            "it with --port"
        )
    return ""


def _by_router(address: str) -> str:
    """Says so where an address is not of this machine itself: then a router has opened the port, or forwards it."""
    import psutil  # here, since who only looks at a run needs none

    own = {one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found}
    return "" if any(part in own for part in address.split("/")) else ": its router has opened the port, or forwards it"


def check_dialable(network: HivemindNetwork) -> None:
    """Raises NetworkError where others have tried to dial this node and could not: nobody would come."""
    if network.client_mode:
        raise NetworkError(
            "nobody can dial this machine (NAT or a firewall), so nobody could join through it",
            fix="forward a TCP port to it, listen there with --port PORT, and name the address "
            "that others see with --announce-maddrs /ip4/ADDRESS/tcp/PORT",
        )


async def open_peer_network(options: PeerOptions, say: Say) -> tuple[HivemindNetwork, tuple[str, ...]]:
    """By the addresses that were given, and those that this peer knew in an earlier life; these addresses too.

    What of the options can be checked before anybody is asked is checked first. Raises ConfigError, NetworkError.
    """
    check_peer_overrides(options.overrides)
    addresses = first_addresses(options)
    network = await open_network(replace(options.network, known_peers=addresses), options.folder / "identity.key")
    if said := reach_text(network):
        say(said)
    return network, addresses


async def find(network: HivemindNetwork, options: PeerOptions, addresses: tuple[str, ...], say: Say) -> FoundRun:
    """The run that the options mean, checked, and the peer's folder claimed for it.

    Raises NetworkError, RemoteProtocolError, ConfigError; PermanentError where it is over, or not the one meant.
    """
    expected = None if options.config_path is None else load_config(config_path(options.config_path))
    group = await find_run(network.directory, options.run_id, ANSWER_SECONDS, options.fingerprint)
    info, agreed = await load_run(network.transport, group, ANSWER_SECONDS)
    check_organiser(options.organiser, info)
    contacts = Contacts(options.folder, info, network.signer.peer_id, addresses)
    words = await organiser_words(network, info, ANSWER_SECONDS)
    check_open(words, info, group.round, network.signer.peer_id)
    if options.token:
        check_own_pass(options.token, info, network)
    if options.until_round is not None and group.round > options.until_round:
        raise PermanentError(
            f"the run is already at round {group.round}, but --until-round says to stop at round {options.until_round}",
            fix="give a later round with --until-round, or leave it out",
        )
    if expected is not None:
        _check_same(expected, agreed, info)
    data = () if options.data is None else (f"data.path={options.data}",)
    config = apply_peer_overrides(agreed, [*options.overrides, *data])
    from spes_p2p.interop.hf import state_layout  # loads torch: who only looks at a run does without

    layout = state_layout(config)
    if options.owned_experts is not None:
        check_columns(options.owned_experts, layout.num_columns)
    column_budget(options, config.swarm.experts_per_peer, 0, layout.num_columns)
    claim_folder(
        options.folder / RUN, info, layout, network.signer.peer_id
    )  # before anything of this run is written there
    run = Run(info, config, layout)
    say(f"run {info.run_id}, fingerprint {info.fingerprint.hex()[:16]}")
    if not words.admission(run.rules).is_trusted(network.signer.peer_id):
        say(_of_a_stranger(network.signer.peer_id, options.token))
    return FoundRun(run, tuple(group.addresses()), group.round, contacts)


def _of_a_stranger(me: PeerId, token: bytes) -> str:
    if token:
        return "this peer's invitation makes it a trusted one, as soon as the organiser's node has seen it"
    return (
        "this peer is a stranger here: what it trains counts as far as it agrees with the trusted peers; the organiser "
        f"makes it one of them with: spes-p2p run vouch {me}"
    )


def check_own_pass(token: bytes, info: RunInfo, network: Network) -> None:
    """Raises ConfigError where it is for another peer, RemoteProtocolError where the organiser did not sign it."""
    named, me = read_pass(token, info, network.verifier.verify).peer, network.signer.peer_id
    if named != me:
        raise ConfigError(
            f"the invitation is for peer {named} alone, but this peer is {me}",
            fix=f"join with that peer's folder, or ask the organiser for: spes-p2p invite --for {me}",
        )


async def organiser_words(network: Network, info: RunInfo, timeout_seconds: float) -> Words:
    """What the organiser has said so far; nothing where nobody knows, and it is looked for again when we are in."""
    try:
        return await known_words(network, info, timeout_seconds)
    except NetworkError:
        return Words()


def check_kept_is_open(folder: Path, fingerprint: str | None) -> None:
    """Raises PermanentError where the run in `folder` is over by what is kept there, if it is the one that is meant.

    `fingerprint`: the first digits of that one's; None for any.
    """
    if (info := kept_run(folder, fingerprint)) is None or not (folder / RUN / CHAIN).is_dir():
        return
    last_round = load_orders(folder / RUN / WORDS_FILE, info, EnvelopeChecker(RsaVerifier()).check).last_round
    newest = CommitFiles(folder / RUN / CHAIN, mends=False).count() - 1
    if last_round is not None and newest >= last_round:
        raise PermanentError(
            f"run {info.run_id} is over: its organiser ended it with round {newest}",
            fix=f"get its model with: spes-p2p export --checkpoint {folder} --output MODEL",
        )


def check_open(words: Words, info: RunInfo, round: int, me: PeerId) -> None:
    """Raises PermanentError where the organiser has banned this peer, or ended the run."""
    if words.is_banned(me):
        raise banned(info, me)
    last_round = words.last_round
    if last_round is not None and round >= last_round:
        raise PermanentError(
            f"run {info.run_id} is over: its organiser ended it with round {round}",
            fix="get its model with spes-p2p export, or ask for an invitation to another run",
        )


def banned(info: RunInfo, peer: PeerId) -> PermanentError:
    """What a peer ends with that the organiser has banned."""
    return PermanentError(
        f"the organiser of run {info.run_id} has banned this peer",
        fix=f"ask the organiser, who can lift it with: spes-p2p run ban --undo {peer}",
    )


def check_not_banned(info: RunInfo, manifest: Manifest, me: PeerId) -> None:
    """Raises PermanentError where the organiser has banned this peer by what a manifest says."""
    if Admission(manifest.roll).is_banned(me):
        raise banned(info, me)


def check_organiser(expected: PeerId | None, info: RunInfo) -> None:
    """Raises RemoteProtocolError where the run is not that of the organiser who invited."""
    if expected not in (None, info.organiser):
        raise RemoteProtocolError(
            f"run {info.run_id} belongs to organiser {info.organiser}, but the invitation is from {expected}",
            fix="ask whoever invited you for a new invitation",
        )


def _check_same(ours: Config, theirs: Config, info: RunInfo) -> None:
    """Raises PermanentError naming the fields in which a local config differs from the run's."""
    wrong = differences(ours, theirs)
    if wrong:
        shown = ", ".join(f"{item.key} is {item.ours!r} here and {item.theirs!r} there" for item in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PermanentError(
            f"--config differs from the config of run {info.run_id}: {shown}{more}",
            fix="leave --config out (the run's config comes from the swarm), or join the right run with --run-id",
        )
