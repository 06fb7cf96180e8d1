"""Meeting the initial peers: who answers, why the others do not, whether our clock and our identity may join.

hivemind says for all of this that its daemon failed; here each address gets its own reason. Leaves out the DHT itself.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from spes_p2p.errors import ClockSkewed, NobodyAnswers, PermanentError, RemoteProtocolError
from spes_p2p.ids import PeerId, short
from spes_p2p.swarm.calls import printable
from spes_p2p.swarm.hivemind_backend.daemon import DAEMON_GONE
from spes_p2p.swarm.hivemind_backend.dial import Address, Dialled, dial, is_listing, parse_address, said_of
from spes_p2p.swarm.hivemind_backend.hello import Met, greet
from spes_p2p.swarm.records import LISTING

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

GREETING_SECONDS = 6.0
"""How long one initial peer may take in all: a TCP dial, the handshake, one greeting."""
STRAGGLER_SECONDS = 1.0
"""Once one peer has answered, the others get this much more."""
UNREACHABLE = "is unreachable: no route or no such name"
MOST_SHOWN = 4
"""Most silent initial peers to name if others answer: an invitation may be old."""
logger = logging.getLogger(__name__)
LOOKUP_SECONDS = 3.0
MOST_LISTED = 8
_ENTRY = "dnsaddr="


async def listed(address: str, resolver: Resolver | None = None) -> tuple[str, ...]:
    """The node addresses that a /dnsaddr/ name lists; only those of one peer if it ends in a /p2p/ id.

    They stand in the TXT records of `_dnsaddr.NAME`, as libp2p has it; an entry is
    `dnsaddr=/ip4/203.0.113.7/tcp/31337/p2p/Qm...`. So whoever keeps a name can move a run's first nodes, under other
    identities too. Nothing of it is trusted: a run is known by its fingerprint.

    `resolver`: the DNS resolver (None: this machine's default). Raises ValueError, with a message that is meant to
    follow the address, if there are none.
    """
    from dns.asyncresolver import Resolver  # here, since most addresses are no names
    from dns.exception import DNSException
    from dns.rdtypes.ANY.TXT import TXT

    name, _, rest = address.removeprefix(LISTING).partition("/")
    try:
        answer = await (resolver or Resolver()).resolve(f"_dnsaddr.{name}", "TXT", lifetime=LOOKUP_SECONDS)
    except DNSException as error:
        raise ValueError(f"could not be looked up: {error}") from error
    found = [b"".join(record.strings).decode(errors="replace") for record in answer if isinstance(record, TXT)]
    wanted = f"/{rest}" if rest else ""
    texts = sorted(text.removeprefix(_ENTRY) for text in found if text.startswith(_ENTRY) and text.endswith(wanted))
    nodes = tuple(text for text in texts if not is_listing(text) and _names_a_peer(text))
    if not nodes:
        raise ValueError(f"names no node: _dnsaddr.{name} has no TXT record of the form {_ENTRY}/.../p2p/ID")
    return nodes[:MOST_LISTED]


def _names_a_peer(text: str) -> bool:
    try:
        return parse_address(text).peer is not None
    except ValueError:
        return False


@dataclass(frozen=True)
class Reached:
    """An initial peer that answered."""

    address: str
    peer: PeerId
    met: Met


@dataclass(frozen=True)
class Failed:
    """An initial peer that cannot be used."""

    address: str
    reason: str
    is_misspelt: bool = False


async def meet(
    p2p: P2P,
    addresses: Sequence[str],
    wall_clock: Callable[[], float],
    ask_about: PeerId | str = "",
    quiet: Collection[str] = (),
) -> list[Reached]:
    """The initial peers that answer and whose clocks agree with ours. `quiet`: addresses that may fail unnoticed.

    Raises NobodyAnswers with a reason for each address when none answers, PermanentError when none is an address of a
    peer, and ClockSkewed when all that answer disagree with our clock.
    """
    tasks = [asyncio.create_task(_meet(p2p, address, wall_clock, ask_about)) for address in addresses]
    for next_one in asyncio.as_completed(tasks):
        if isinstance(await next_one, Reached):
            break
    done, waiting = await asyncio.wait(tasks, timeout=STRAGGLER_SECONDS)
    outcomes = [
        task.result() if task in done else Failed(address, "has not answered yet")
        for task, address in zip(tasks, addresses)
    ]
    for task in waiting:
        task.cancel()
    reached = [outcome for outcome in outcomes if isinstance(outcome, Reached)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if not reached:
        raise _nobody(failed)
    told = [one for one in failed if one.address not in quiet]
    for one in told[:MOST_SHOWN]:
        logger.warning("initial peer %s %s; others answer", one.address, one.reason)
    if len(told) > MOST_SHOWN:
        logger.warning("%d more initial peers do not answer", len(told) - MOST_SHOWN)
    return _with_our_clock(reached)


async def _meet(p2p: P2P, text: str, wall_clock: Callable[[], float], ask_about: PeerId | str) -> Reached | Failed:
    if not is_listing(text):
        return await _meet_one(p2p, text, wall_clock, ask_about)
    try:
        addresses = await listed(text)
    except ValueError as error:
        return Failed(text, str(error))
    meeting = [asyncio.create_task(_meet_one(p2p, address, wall_clock, ask_about)) for address in addresses]
    try:
        for next_one in asyncio.as_completed(meeting):
            if isinstance(outcome := await next_one, Reached):
                return outcome
    finally:
        for task in meeting:
            task.cancel()
    count = len(addresses)
    return Failed(text, f"names {count} {'node that does' if count == 1 else 'nodes that do'} not answer")


async def _meet_one(p2p: P2P, text: str, wall_clock: Callable[[], float], ask_about: PeerId | str) -> Reached | Failed:
    try:
        address = parse_address(text)
    except ValueError as error:
        return Failed(text, f"is {error}", is_misspelt=True)
    if address.peer is None:
        return Failed(text, "lacks the peer id: it must end in /p2p/<peer id>", is_misspelt=True)
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            return await _greet(p2p, text, address, address.peer, wall_clock, ask_about)
    except TimeoutError:
        return Failed(
            text, f"is silent: the host accepts connections, but nothing answered within {GREETING_SECONDS:g} s"
        )
    except (P2PDaemonError, P2PHandlerError, RemoteProtocolError) as error:
        return Failed(text, _reason(said_of(address, str(error))))
    except DAEMON_GONE:
        return Failed(text, "was not asked: our own libp2p daemon ended")


async def _greet(
    p2p: P2P, text: str, address: Address, peer: PeerId, wall_clock: Callable[[], float], ask_about: PeerId | str
) -> Reached | Failed:
    found = await dial(address) if address.host else Dialled.ACCEPTED
    if found is Dialled.REFUSED:
        return Failed(text, "refuses connections: the host is up, but nothing listens on this port")
    if found is Dialled.SILENT:
        return Failed(text, "is silent: the host does not answer (down, or behind a firewall)")
    if found is Dialled.UNREACHABLE:
        return Failed(text, UNREACHABLE)
    try:
        target = PeerID.from_base58(peer)
    except ValueError:
        return Failed(text, f"has an invalid peer id: {peer}", is_misspelt=True)
    await p2p._client.connect(target, [address.maddr])
    return Reached(text, peer, await greet(p2p, peer, wall_clock, ask_about))


def _reason(words: str) -> str:
    if "peer id mismatch" in words:
        real = words.rpartition("remote key matches ")[2].split()[0]
        return f"has a wrong peer id: {real} answers there"
    if "protocols not supported" in words:
        return "is a libp2p peer, but not one of spes-p2p"
    if "context deadline exceeded" in words:
        return "is silent: the host accepts connections, but nothing there speaks libp2p"
    return f"failed: {printable(words.encode())}"


def _nobody(failed: list[Failed]) -> NobodyAnswers | PermanentError:
    reasons = "; ".join(f"{one.address} {one.reason}" for one in failed)
    if all(one.is_misspelt for one in failed):
        fix = "write an address as /ip4/HOST/tcp/PORT/p2p/Qm..., or give an invitation: spes1..."
        return PermanentError(f"no initial peer can be reached: {reasons}", fix=fix)
    fix = "ask for a newer invitation (who takes part prints it: spes-p2p invite --folder peer), or check your network"
    if all(one.reason == UNREACHABLE for one in failed):
        fix = "check this machine's network: it has no way to any of these addresses; then ask for a newer invitation"
    return NobodyAnswers(f"no initial peer can be reached: {reasons}", fix=fix)


def _with_our_clock(reached: list[Reached]) -> list[Reached]:
    """Drops peers whose clock differs from ours. Raises ClockSkewed if all do, since ours is then at fault."""
    agreeing = [one for one in reached if abs(one.met.ahead_seconds) <= MAX_DHT_TIME_DISCREPANCY_SECONDS]
    if not agreeing:
        raise _skewed(reached)
    for one in reached:
        if one not in agreeing:
            logger.warning("the clock of initial peer %s is %.1f s ahead of ours", one.address, one.met.ahead_seconds)
    return agreeing


def _skewed(reached: list[Reached]) -> ClockSkewed:
    ahead = statistics.median(one.met.ahead_seconds for one in reached)
    direction = "behind" if ahead > 0 else "ahead of"
    who = ", ".join(short(one.peer) for one in reached)
    return ClockSkewed(
        f"this machine's clock is {abs(ahead):.1f} s {direction} that of {who}; "
        f"at most {MAX_DHT_TIME_DISCREPANCY_SECONDS} s are allowed",
        fix="synchronise it (for example: sudo timedatectl set-ntp true); if it is right, tell the others to do so",
    )
