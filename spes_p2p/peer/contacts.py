"""The addresses of a run's nodes that one node knows, kept in its folder: as the newest invitation for others, and for
itself when it restarts and those who invited it are gone.

Two small text files, rewritten when their content changes. No decision rests on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.files import write_whole
from spes_p2p.ids import PeerId
from spes_p2p.peer.kept_invite import INVITE_FILE
from spes_p2p.peer.options import PeerOptions
from spes_p2p.swarm.invite import ADDRESSES_EACH, Invite, encode, invited_to, is_name, leads_to_a_node, to_be_shown
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.sync.genesis import RunInfo

ADDRESSES_FILE = "addresses.txt"
"""The run's fingerprint, then an address a line, the newest first."""
MOST_ADDRESSES = 32


def invite_of(info: RunInfo, addresses: tuple[str, ...]) -> str:
    """The invitation to a run, with these addresses."""
    return encode(Invite(info.run_id, info.fingerprint, info.organiser, addresses))


def kept_addresses(folder: Path, fingerprint: str | None = None) -> tuple[str, ...]:
    """Those that the node of this folder knew, the newest first; none where it was in another run.

    `fingerprint`: the first digits of the run's, in hexadecimal; None for any run.
    """
    try:
        name, *addresses = (folder / ADDRESSES_FILE).read_text().split()
    except (OSError, ValueError):  # it knew none
        return ()
    wanted = (fingerprint or "").lower()
    return _sound(addresses)[:MOST_ADDRESSES] if name.startswith(wanted) else ()


def first_addresses(options: PeerOptions) -> tuple[str, ...]:
    """Where this peer looks for its run: what was given, then what it knew in an earlier life.

    Raises ConfigError where that is nothing.
    """
    before = kept_addresses(options.folder, options.fingerprint)
    if not (addresses := tuple(dict.fromkeys((*options.network.initial_peers, *before)))):
        raise ConfigError(
            "no invitation was given", fix="give the invitation that the organiser printed: spes-p2p join spes1..."
        )
    return addresses


def _sound(addresses: Iterable[str]) -> tuple[str, ...]:
    """Those by which a node can be found, each once: what somebody mistyped would fail whenever this node returns."""
    return tuple(filter(leads_to_a_node, dict.fromkeys(addresses)))


class Contacts:
    """Made when a node is in a run's DHT; `word` is the newest invitation."""

    def __init__(self, folder: Path, info: RunInfo, me: PeerId, given: Iterable[str]) -> None:
        """`given`: the addresses by which this node came."""
        self._folder, self._info, self._me = folder, info, me
        before = kept_addresses(folder, info.fingerprint.hex())
        self._known = _sound((*before, *given))[:MOST_ADDRESSES]
        self._written: tuple[str, tuple[str, ...]] | None = None
        self.word = ""

    def learnt(self, records: Iterable[PeerRecord]) -> bool:
        """What the nodes of the run say of themselves now; whether that makes another invitation."""
        there = list(records)
        addresses = invited_to(there, self._info.organiser, self._known)
        before, self.word = self.word, invite_of(self._info, addresses or self._known)
        others = (one for one in there if one.peer != self._me and not one.client_mode)
        newest = [address for one in others for address in to_be_shown(one.addresses)[:ADDRESSES_EACH]]
        # names stay, whoever is behind them now
        names = [address for address in self._known if is_name(address)]
        self._known = _sound((*newest, *names, *self._known))[:MOST_ADDRESSES]
        with contextlib.suppress(StorageFull):  # which is told by who writes the state; the next change tries again
            self._keep()
        return self.word != before

    def _keep(self) -> None:
        if self._written == (self.word, self._known):
            return
        write_whole(self._folder / INVITE_FILE, f"{self.word}\n".encode())
        lines = (self._info.fingerprint.hex(), *self._known, "")
        write_whole(self._folder / ADDRESSES_FILE, "\n".join(lines).encode())
        self._written = self.word, self._known
