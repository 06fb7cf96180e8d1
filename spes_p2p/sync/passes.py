"""Passes: what the organiser signs for one peer that is yet to come, and how its node vouches for who brings one.

A pass travels in an invitation (`Invite.token`) to the one peer that it names, and from there in that peer's record in
the DHT to the organiser's node, which signs the next roll. It is used up by that: who is forgotten or banned later is
not vouched for again by the same pass. Others may read and repeat it, which changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.certificate import CheckSignature, is_signed
from spes_p2p.consensus.membership import MAX_VOUCHED
from spes_p2p.consensus.messages import Sealer, Signed
from spes_p2p.errors import RemoteProtocolError, StateError, StorageFull
from spes_p2p.files import NODE_FOLDER, in_folder, write_whole
from spes_p2p.ids import PeerId
from spes_p2p.swarm.records import MAX_TOKEN_BYTES
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import OrganiserWatch, Words, roll
from spes_p2p.wire import pack, unpack

PASSES_FILE = "passes"
"""In `run/` of the organiser's folder: a peer a line, with the number of its newest pass that was used."""
LEAST_RUN_BYTES = 16
MOST_SHOWN = 3


@dataclass(frozen=True)
class Pass:
    """`run`: the first bytes of its fingerprint, as in an invitation. Of a peer's passes a later one has a higher
    `number`.
    """  # fmt: skip

    run: bytes
    peer: PeerId
    number: int


def make_pass(run: bytes, peer: PeerId, sealer: Sealer, number: int) -> bytes:
    """With the organiser's key."""
    return pack(sealer.seal(Pass(run, peer, number)))


def read_pass(token: bytes, info: RunInfo, check: CheckSignature) -> Pass:
    """Raises RemoteProtocolError where it is for another run, or the organiser did not sign it."""
    signed = unpack(Signed[Pass], token, MAX_TOKEN_BYTES)
    said = signed.value
    if len(said.run) < LEAST_RUN_BYTES or not info.fingerprint.startswith(said.run):
        raise RemoteProtocolError("the invitation's token is for another run")
    if signed.author != info.organiser or not is_signed(signed, check):
        raise RemoteProtocolError(f"the invitation's token is not signed by the organiser {info.organiser}")
    return said


def full_roll_line(peer: PeerId, folder: Path, missing: Sequence[PeerId] = ()) -> str:
    """Why the organiser, whose node has this folder, cannot vouch for `peer`, and what helps.

    `missing`: who is vouched for, and is not in the run now.
    """
    some = ", ".join(missing[:MOST_SHOWN]) + (", ..." if len(missing) > MOST_SHOWN else "")
    return (
        f"{MAX_VOUCHED} peers are vouched for, the most there can be, so {peer} stays a stranger: withdraw the vouch "
        f"for one that no longer comes, with {in_folder('spes-p2p run vouch PEER --undo', folder, NODE_FOLDER)}"
        + (f" (not here now: {some})" if missing else "")
    )


class Doorkeeper:
    """The organiser's node as it meets passes. `path`: where it keeps which were used; `say` hears of it if it cannot.

    `waits` is told once of each peer that brings a good one and finds the roll full, and who of the roll is not there.
    """

    def __init__(
        self,
        info: RunInfo,
        check: CheckSignature,
        sealer: Sealer,
        path: Path,
        waits: Callable[[PeerId, Sequence[PeerId]], None],
        say: Callable[[str], None],
    ) -> None:
        """Raises StateError where the file is damaged."""
        self._info, self._check, self._sealer, self._path = info, check, sealer, path
        self._waits, self._say = waits, say
        self._told = set[PeerId]()
        self._used: dict[PeerId, int] = {}
        self._is_kept = True
        """Whether that is on disk."""
        self._was_full = False
        try:
            lines = (line.split() for line in path.read_text().splitlines())
            self._used = {PeerId(peer): int(number) for peer, number in lines}
        except FileNotFoundError:
            return
        except ValueError as error:
            raise StateError(
                f"{path}, which names the passes that were used, is damaged: {error}",
                fix="restore it from a backup; without it, peers that were forgotten come back by their old passes",
            ) from error

    async def admit(self, watch: OrganiserWatch, tokens: Mapping[PeerId, bytes]) -> None:
        """Vouches for those who bring a good pass by now."""
        if self.admitted(watch.known, tokens) != Words():
            await watch.look()  # what the organiser has just said at another place must be in our roll
            watch.take(self.admitted(watch.known, tokens))
            await watch.look()  # and who signs from now on must know of ours

    def admitted(self, known: Words, tokens: Mapping[PeerId, bytes]) -> Words:
        """The organiser's next roll, for those who bring a good pass by now; no words where there is nothing new.

        A pass is used once a roll that is in force names its peer: another one may take the place of ours until then.
        """
        vouched = () if known.roll is None else known.roll.value.vouched
        new = self._new(known, tokens)
        used = {peer: number for peer, number in new.items() if peer in vouched}
        self._used |= used
        self._is_kept = self._is_kept and not used
        if not self._is_kept:
            self._keep()
        wanted, room = sorted(new.keys() - used.keys()), MAX_VOUCHED - len(vouched)
        wanted, waiting = wanted[:room], wanted[room:]
        for peer in waiting:
            if peer not in self._told:
                self._waits(peer, sorted({*vouched} - tokens.keys()))
        self._told |= {*waiting}
        return roll(self._info, known, self._sealer, vouched=wanted) if wanted else Words()

    def _keep(self) -> None:
        """A full disk is no reason for this node to end: it is tried again."""
        try:
            write_whole(self._path, "".join(f"{peer} {number}\n" for peer, number in self._used.items()).encode())
            self._is_kept, self._was_full = True, False
        except StorageFull as error:
            if not self._was_full:
                self._say(f"{error}; until there is room, a restart of this node forgets which passes were used")
            self._was_full = True

    def _new(self, known: Words, tokens: Mapping[PeerId, bytes]) -> dict[PeerId, int]:
        found = {}
        for peer, token in tokens.items():
            if not token or known.is_banned(peer):
                continue
            with contextlib.suppress(RemoteProtocolError):  # anybody may bring anything
                said = read_pass(token, self._info, self._check)
                if said.peer == peer and said.number > self._used.get(peer, -1):
                    found[peer] = said.number
        return found
