"""What a bootstrap node says of its run, in lines for its log: coverage, the beginning, each newest certificate."""

from __future__ import annotations

import shlex
from collections.abc import Set
from pathlib import Path

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import trainers
from spes_p2p.consensus.messages import RENEWAL, Commit
from spes_p2p.files import NODE_FOLDER, in_folder
from spes_p2p.ids import NO_HASH, PeerId, short
from spes_p2p.interop.importing import ROUTER_WARNING
from spes_p2p.observe.metrics import amount_text, count_text, span_text
from spes_p2p.observe.text import to_type
from spes_p2p.ownership.assign import Ownership, columns_of, orphans
from spes_p2p.swarm.invite import is_public, to_be_shown
from spes_p2p.sync.finding import SHOWN_DIGITS
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import Words

MOST_SHOWN = 3


def expected_coverage(config: Config) -> str | None:
    """A warning where the peers that begin the run would not cover all columns; None where they do."""
    peers, each, columns = config.swarm.min_peers, config.swarm.experts_per_peer, config.model.num_experts
    if peers * each >= columns:
        return None
    return (
        f"warning: {amount_text(peers, 'peer')} with {each} columns each cover {peers * each} of {columns} expert "
        "columns; the rest are not trained until more peers join, unless some peers have memory for more"
    )


DATA_FLAG = " --data DIR"
OWN_DATA = "each peer trains on data of its own: it adds --data DIR to join, a folder that spes-p2p tokenize made"


def router_warning(config: Config) -> str | None:
    """A warning where the routers never learn from the loss, as in some published models; None where they do."""
    return None if config.model.router_learns else f"warning: {ROUTER_WARNING}"


def introduction(config: Config, info: RunInfo, newest: Commit | None, is_mirror: bool = False) -> list[str]:
    """Lines that name the run, and say at which round it is or for what it waits."""
    named = [f"run {info.run_id}, fingerprint {info.fingerprint.hex()}"]
    if info.dataset == NO_HASH:
        named.append(OWN_DATA)
    if newest is not None:
        return [*named, f"it continues at round {newest.manifest.round}, step {newest.manifest.step:,}"]
    wanted, warnings = config.swarm.min_peers, (expected_coverage(config), router_warning(config))
    begins = f"it starts once {amount_text(wanted, 'peer')} {'has' if wanted == 1 else 'have'} joined"
    if config.swarm.trusted == "vouched":
        whom = "one that the organiser vouches for, or a node" if is_mirror else "one that you vouch for, or this node"
        begins += f", and somebody who may vote is there: {whom} with --serve"
    return [*named, *(warning for warning in warnings if warning is not None), begins]


def how_to_join(word: str, folder: Path, addresses: tuple[str, ...], brings_data: bool = False) -> list[str]:
    """The invitation, and what to know of the address in it. `brings_data`: whether each peer has data of its own."""
    lines = [
        f"volunteers join with:\n  spes-p2p join {word}{DATA_FLAG if brings_data else ''}",
        "once peers have joined, get an invitation that lists them too: "
        + to_type(in_folder("spes-p2p invite", folder, NODE_FOLDER)),
    ]
    if not any(map(is_public, addresses)):
        lines.append(
            "this node's address is private: machines on the internet reach it only with --announce-maddrs "
            "/ip4/ADDRESS/tcp/PORT (its public address), where the router passes that port on"
        )
    return [*lines, "check from elsewhere whether it can be reached: spes-p2p doctor spes1..."]


def order_lines(words: Words, before: Words, newest: Commit | None) -> list[str]:
    """What the organiser has ordered since `before` (`spes-p2p run stop`, `decay`, `choose`, `vouch`, `ban`)."""
    lines = []
    if words.last_round is not None and words.last_round != before.last_round:
        last = max(words.last_round, newest.manifest.round if newest is not None else 0)
        lines.append(f"the organiser ends the run with round {last}: nobody can join it after that")
    if words.decay is not None and words.decay != before.decay:
        lines.append(decay_line(words.decay.value.steps, newest.manifest if newest is not None else None))
    if words.roll is not None and words.roll != before.roll:
        vouched, banned = len(words.roll.value.vouched), len(words.roll.value.banned)
        lines.append(f"the organiser vouches for {amount_text(vouched, 'peer')} and has banned {banned}")
    return lines


def decay_line(steps: int, newest: Manifest | None) -> str:
    """That the learning rate falls over `steps` steps, as the organiser has said, or has fallen by the newest round."""
    fall = newest.decay if newest is not None else None
    if newest is None or fall is None or newest.step < fall.begin_step + fall.steps:
        return f"the organiser lets the learning rate fall over {steps:,} steps"
    return f"the learning rate has fallen to its lowest (step {fall.begin_step + fall.steps:,})"


def join_command(addresses: tuple[str, ...], info: RunInfo) -> str:
    """What a volunteer types who has no invitation; loopback addresses only where there are no others."""
    nodes = [word for address in to_be_shown(addresses) for word in ("--initial-peers", address)]
    flags = ["--run-id", info.run_id, "--fingerprint", info.fingerprint.hex()[:SHOWN_DIGITS]]
    return shlex.join(["spes-p2p", "join", *nodes, *flags]) + (DATA_FLAG if info.dataset == NO_HASH else "")


def coverage(ownership: Ownership) -> str:
    """How many columns have an owner, and which have none."""
    without = orphans(ownership)
    if not without:
        return f"all {len(ownership)} expert columns have an owner"
    return f"warning: {len(without)} of {len(ownership)} expert columns have no owner: {span_text(without)}"


def genesis_lines(manifest: Manifest) -> list[str]:
    """The first members with their columns."""
    names = sorted(member.peer for member in trainers(manifest.members))
    lines = [f"the run starts with {amount_text(len(names), 'peer')}"]
    lines += [
        f"  {short(peer)} trains columns {span_text(columns_of(manifest.ownership, peer)) or '-'}" for peer in names
    ]
    return [*lines, coverage(manifest.ownership)]


def commit_lines(commit: Commit, before: Manifest) -> list[str]:
    """One line for the certificate, and one where members came or went or columns lost their last owner."""
    manifest = commit.manifest
    tokens = sum(entry.tokens for entry in manifest.roster)
    kind = " (a renewal, by the organiser's key)" if commit.certificate.kind == RENEWAL else ""
    lines = [
        f"round {manifest.round}{kind}: step {manifest.step:,}, "
        + (f"{count_text(tokens)} tokens from {amount_text(len(manifest.roster), 'peer')}, " if tokens else "")
        + f"{count_text(manifest.tokens)} in total"
    ]
    was, now = ({member.peer for member in one.members} for one in (before, manifest))
    lines += [f"joined: {_named(now - was)}"] if now - was else []
    lines += [f"left: {_named(was - now)}"] if was - now else []
    if orphans(manifest.ownership) != orphans(before.ownership):
        lines.append(coverage(manifest.ownership))
    return lines


def _named(peers: Set[PeerId]) -> str:
    shown = [short(peer) for peer in sorted(peers)[:MOST_SHOWN]]
    return ", ".join(shown) + (f" and {len(peers) - MOST_SHOWN} more" if len(peers) > MOST_SHOWN else "")
