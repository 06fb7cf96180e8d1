"""What the dashboard remembers of a run, in one SQLite file: rounds, samples of peers, held-out losses, events.

One run a file. Reading and writing is safe from several threads; every write is whole on disk when it returns. Samples
that are a day old are thinned to one in ten minutes, so that weeks of a run stay small. What is drawn from it is made
in `web.py`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spes_p2p.errors import ConfigError, StorageFull

FORMAT = "1"
SLOT_SECONDS = 5.0
"""At most one sample of a peer in this time."""
KEPT_SECONDS = 24 * 3600.0
THINNED_SLOTS = 120
MOST_EVENTS = 20_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
  round INTEGER PRIMARY KEY, name TEXT, at REAL, kind TEXT, step INTEGER, tokens INTEGER, round_tokens INTEGER,
  roster INTEGER, members INTEGER, alpha REAL, stale INTEGER);
CREATE TABLE IF NOT EXISTS peer_rounds (
  round INTEGER, peer TEXT, at REAL, seconds TEXT, loss REAL, tokens INTEGER,
  PRIMARY KEY (round, peer)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
  peer TEXT, slot INTEGER, at REAL, loss REAL, tokens_per_second REAL, sent INTEGER, received INTEGER, tokens INTEGER,
  PRIMARY KEY (peer, slot)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held_out (round INTEGER PRIMARY KEY, at REAL, loss REAL, peer TEXT);
CREATE TABLE IF NOT EXISTS loads (
  round INTEGER PRIMARY KEY, at REAL, weight REAL, peers TEXT, mean TEXT, highest TEXT, lowest TEXT);
CREATE TABLE IF NOT EXISTS peers (peer TEXT PRIMARY KEY, shown TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, at REAL, kind TEXT, who TEXT, message TEXT);
CREATE INDEX IF NOT EXISTS samples_by_time ON samples (at);
"""


class Load(NamedTuple):
    """The load of each expert over an even share: mean over the layers, and in the layer of the most and the least."""

    mean: tuple[float, ...]
    highest: tuple[float, ...]
    lowest: tuple[float, ...]


class History:
    """`path` ":memory:" keeps nothing. Raises ConfigError where the file is something else."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self._lock = threading.RLock()
        self.path = path
        self.version = 0
        """Counts the writes, for those who wait for news."""
        try:
            self._base = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._base.row_factory = sqlite3.Row
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(_SCHEMA)
            # writes nothing, but a file that may only be read is refused: its page would show what was, for ever
            self._base.execute("UPDATE meta SET value = value WHERE FALSE")
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path} cannot be used as the dashboard's history: {error}", fix="choose another file with --database"
            ) from error
        if self.get("format", FORMAT) != FORMAT:
            raise ConfigError(
                f"{path} was written by another version of spes-p2p", fix="choose another file with --database"
            )
        if self.get("format") is None:
            self.put("format", FORMAT)

    def close(self) -> None:
        with self._lock:
            self._base.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all writes of the block are kept, or none. Raises StorageFull."""
        with self._lock:
            self.run("BEGIN IMMEDIATE")
            try:
                yield
                self.run("COMMIT")
            except BaseException:
                if self._base.in_transaction:  # SQLite itself gives up some of those that failed
                    self._base.execute("ROLLBACK")
                raise
            self.version += 1

    def rows(self, query: str, arguments: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._base.execute(query, arguments).fetchall()

    def run(self, query: str, arguments: Sequence[Any] = ()) -> None:
        """Writes. Raises StorageFull."""
        with self._lock:
            try:
                self._base.execute(query, arguments)
            except sqlite3.OperationalError as error:
                fix = "free some space on that disk, or end what else writes to this file"
                raise StorageFull(f"{self.path}: {error}", fix=fix) from error

    # ---- single values ----

    def get(self, key: str, default: Any = None) -> Any:
        found = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(found[0][0]) if found else default

    def put(self, key: str, value: Any) -> None:
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def check_is_of(self, run_id: str, fingerprint: str) -> None:
        """Raises ConfigError if it belongs to another run. Of the fingerprint the first digits will do."""
        kept = self.get("run")
        if kept is not None and not kept["fingerprint"].startswith(fingerprint.lower()):
            raise ConfigError(
                f"{self.path} holds the history of run {kept['run_id']} with fingerprint "
                f"{kept['fingerprint'][:16]}, not that of run {run_id} with {fingerprint[:16]}",
                fix="name another file with --database",
            )

    def claim(self, run_id: str, fingerprint: str) -> None:
        """Ties this file to a run. Raises ConfigError if it already belongs to another one, StorageFull."""
        self.check_is_of(run_id, fingerprint)
        if self.get("run") is None:
            self.put("run", {"run_id": run_id, "fingerprint": fingerprint})

    # ---- what is kept ----

    def add_round(self, **row: Any) -> None:
        """Adds a round and removes all from it on, which belonged to another history."""
        for table in ("rounds", "peer_rounds", "held_out", "loads"):
            self.run(f"DELETE FROM {table} WHERE round >= ?", (row["round"],))
        self._insert("rounds", row)

    def add_peer_round(self, **row: Any) -> None:
        self._insert("peer_rounds", {**row, "seconds": json.dumps(row["seconds"])})

    def add_held_out(self, **row: Any) -> None:
        """Records the held-out loss of a round; the first value reported for a round is kept."""
        self._insert("held_out", row, "IGNORE")

    def add_load(self, round: int, peer: str, at: float, weight: float, load: Load) -> None:
        """Adds one peer's report of the experts' load in a round; only its first report counts.

        Kept are the weighted mean over the peers so far, and the extremes. A report with a different number of experts
        than the others is ignored.
        """
        before = self.rows("SELECT * FROM loads WHERE round = ?", (round,))
        peers: list[str] = json.loads(before[0]["peers"]) if before else []
        if peer in peers:
            return
        mean, highest, lowest = load
        if before:
            known = Load(*(tuple(json.loads(before[0][name])) for name in Load._fields))
            if len(known.mean) != len(mean):
                return
            whole = before[0]["weight"] + weight
            mean = tuple(one + (new - one) * weight / whole for one, new in zip(known.mean, mean))
            highest, lowest = tuple(map(max, known.highest, highest)), tuple(map(min, known.lowest, lowest))
            at, weight = before[0]["at"], whole
        row = {"round": round, "at": at, "weight": weight, "peers": json.dumps([*peers, peer])}
        texts = {name: json.dumps(part) for name, part in zip(Load._fields, (mean, highest, lowest))}
        self._insert("loads", {**row, **texts})

    def add_sample(self, **row: Any) -> None:
        self._insert("samples", {**row, "slot": int(row["at"] // SLOT_SECONDS)})

    def set_peer(self, peer: str, shown: dict[str, Any]) -> None:
        self._insert("peers", {"peer": peer, "shown": json.dumps(shown)})

    def add_event(self, at: float, kind: str, who: str, message: str) -> None:
        self._insert("events", {"at": at, "kind": kind, "who": who, "message": message})

    def peers(self) -> dict[str, dict[str, Any]]:
        return {row["peer"]: json.loads(row["shown"]) for row in self.rows("SELECT * FROM peers")}

    def thin(self, now: float) -> None:
        """Forgets most samples that are older than a day, and the oldest of very many events."""
        self.run("DELETE FROM samples WHERE at < ? AND slot % ? != 0", (now - KEPT_SECONDS, THINNED_SLOTS))
        self.run("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (MOST_EVENTS,))

    def _insert(self, table: str, row: dict[str, Any], otherwise: str = "REPLACE") -> None:
        names, signs = ", ".join(row), ", ".join("?" * len(row))
        self.run(f"INSERT OR {otherwise} INTO {table} ({names}) VALUES ({signs})", tuple(row.values()))
