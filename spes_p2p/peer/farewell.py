"""A peer's last words: what became of what it trained, where it is kept, and a receipt for it where one can be had."""

from __future__ import annotations

import time

from spes_p2p.consensus.ledger import Account
from spes_p2p.errors import SpesError
from spes_p2p.files import write_whole
from spes_p2p.observe.metrics import count_text
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.kept_invite import DEFAULT_FOLDER, RECEIPT_FILE
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.stopping import EXIT_SECONDS

RECEIPT_SECONDS = 3.0
"""Most time at the end for who signs a receipt; less where a person waits for the peer to leave."""
CLOSE_SECONDS = 1.0
"""What is kept back for the rest of the way out."""


class Farewell:
    """Made when the peer is in, whose account in the run's ledger is counted from then on."""

    def __init__(self, connection: Connection, options: PeerOptions) -> None:
        self._connection = connection
        self._folder = options.folder
        self._before = self._account()

    def _account(self) -> Account:
        chain = self._connection.disk.chain
        return chain.ledger(chain.length - 1).of(self._connection.peer_id)

    def receipt(self) -> str:
        """Makes a receipt, where the organiser's machine answers soon; a line that says so, or how to get one.

        Nothing where nothing of this peer is counted.
        """
        connection, gate = self._connection, self._connection.gate
        if not self._account().rounds:
            return ""
        left = gate.stopped_at + EXIT_SECONDS - CLOSE_SECONDS - time.monotonic() if gate.stopping else RECEIPT_SECONDS
        try:
            data = connection.receipts.make(connection.disk.chain, min(left, RECEIPT_SECONDS))
            write_whole(self._folder / RECEIPT_FILE, data)
        except (SpesError, TimeoutError, OSError):
            return (
                "for proof of your work type, while the organiser's machine is up: "
                f"spes-p2p receipt --output {self._folder}"
            )
        return f"the receipt for your work is {self._folder / RECEIPT_FILE}"

    def words(self, trained: int, kept: int) -> str:
        """The last line. `trained`: tokens since this start; `kept`: those that a later life hands in."""
        connection = self._connection
        last, tip = connection.last_round, connection.driver.core.tip.round
        counted = _of_tokens(trained, kept, self._before, self._account())
        what = f"{counted} Everything is kept in the folder {self._folder};"
        if last is not None and tip >= last:
            model = f"spes-p2p export --checkpoint {self._folder} --output MODEL"
            return f"The run is over. {what} get its model with: {model}"
        where = "" if self._folder == DEFAULT_FOLDER else f" --output {self._folder}"
        return f"You have left. {what} go on with: spes-p2p join{where}"


def _of_tokens(trained: int, kept: int, before: Account, now: Account) -> str:
    counted = max(0, min(trained, now.tokens - before.tokens))
    if not trained:
        fate = "Nothing was trained since this start"
    elif counted == trained:
        fate = f"{count_text(trained)} tokens trained here, all counted"
    else:
        rest = "; the rest is handed in when you come back" if 0 < trained - counted <= kept else ""
        fate = f"{count_text(trained)} tokens trained here, {count_text(counted)} of them counted{rest}"
    return f"{fate}; {count_text(now.tokens)} since you first joined." if now.tokens > counted else f"{fate}."
