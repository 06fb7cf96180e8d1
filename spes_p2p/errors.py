"""The error tree of the project: every error that a user can meet, each with the fix.

A known error carries what was wrong (with the value) and how to fix it; the CLI prints both, without a
traceback. Any other exception is a bug of ours and keeps its traceback.

    SpesError
    ├── ConfigError          the user's YAML, overrides or flags
    │   └── PermanentError     the same command would fail again, however often it is started
    ├── DataError            corpus, tokenizer, shards
    │   └── DataNotReady         pieces of the dataset that have not come from other peers yet
    ├── CheckpointError      a saved file is missing, cut short or does not fit
    ├── StateError           the committed state on disk is damaged or does not fit
    │   └── TileDamaged      some of its values do not hash to what was committed
    ├── StorageFull          no space left where we write
    ├── StorageBroken        a disk that is read-only, not ours, or broken
    ├── NetworkError         we could not reach somebody
    │   ├── NobodyAnswers    none of the addresses by which a run can be found
    │   ├── PeerRefused      the host answered and refused: nobody listens there
    │   ├── PeerClosed       the connection was cut in the middle
    │   ├── PeerSilent       no answer within the time allowed
    │   └── LinkTooSlow      our own link cannot follow the run
    ├── IdentityInUse        another process runs with our libp2p identity
    ├── ClockSkewed          our wall clock is too far from the swarm's for the DHT
    ├── RemoteProtocolError  the other side broke the protocol (their fault)
    └── LocalProtocolError   we asked for something the protocol does not allow (our fault)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpesError(Exception):
    """Base of all known errors. `str(error)` names the value and what is wrong with it; `fix` says how to fix it."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class ConfigError(SpesError):
    """A wrong value, an unknown key, or settings that do not go together."""


class PermanentError(ConfigError):
    """The same command can never succeed: another config than the run's, another run's folder, a run that is over."""


class DataError(SpesError):
    """Text, tokenizer or token shards that cannot be used."""


class DataNotReady(DataError):
    """Tokens that were to be read have not come from other peers yet."""


class CheckpointError(SpesError):
    """A checkpoint that is missing, cut short, or of another run."""


class StateError(SpesError):
    """A committed state on disk that is damaged or does not fit the run."""


class TileDamaged(StateError):
    """Values on disk that do not hash to what was committed."""


class StorageFull(SpesError):
    """The disk is full; what was written before stays valid."""


class StorageBroken(SpesError):
    """Files of ours cannot be read or written, and not for lack of room; what was written before stays valid."""


class NetworkError(SpesError):
    """A peer could not be reached, or a stream broke."""


class NobodyAnswers(NetworkError):
    """None of the addresses by which a run can be found leads to a node that answers."""


class DaemonEnded(NetworkError):
    """The libp2p daemon of this process ended by itself, or something ended it."""


class PeerRefused(NetworkError):
    """The host of the peer refuses connections: the process is gone."""


class PeerClosed(NetworkError):
    """The connection ended in the middle of an exchange."""


class PeerSilent(NetworkError):
    """No byte arrived within the time allowed."""


class LinkTooSlow(NetworkError):
    """Sending this peer's share of a round takes longer over this machine's link than the round itself."""


class IdentityInUse(SpesError):
    """Another live process uses the same libp2p identity."""


class ClockSkewed(SpesError):
    """This machine's clock differs from the swarm's by more than the DHT accepts."""


class RemoteProtocolError(SpesError):
    """A message from another peer that the protocol does not allow."""


class LocalProtocolError(SpesError):
    """A call of ours that the protocol does not allow: a bug on our side."""


class Stopped(Exception):
    """Somebody asked the program to end before its work was done; nothing is wrong."""


@contextmanager
def for_good() -> Iterator[None]:
    """Around what looks at fixed words alone: they stay wrong, so that a ConfigError is a PermanentError."""
    try:
        yield
    except ConfigError as error:
        raise PermanentError(str(error), fix=error.fix) from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its class name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
