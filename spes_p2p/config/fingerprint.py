"""What all peers of a run must agree on: its hash, where two configs differ, and what a joining peer may choose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from spes_p2p.config.load import changed, check_alone, parse_override
from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.config.sections import is_local
from spes_p2p.errors import PermanentError, for_good
from spes_p2p.ids import Hash, sha256

_DOMAIN = b"spes-p2p config 1\n"


class Difference(NamedTuple):
    """An agreed field that two configs have different values of."""

    key: str
    ours: Any
    theirs: Any


def fingerprint(config: Config) -> Hash:
    """SHA-256 of the agreed fields: JSON with sorted dotted keys, no spaces, floats in their shortest exact form."""
    text = json.dumps(_agreed_values(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(_DOMAIN, text.encode())


def differences(ours: Config, theirs: Config) -> list[Difference]:
    """The agreed fields in which two configs differ, in the order of the schema."""
    mine, other = _agreed_values(ours), _agreed_values(theirs)
    return [Difference(key, mine[key], other[key]) for key in mine if mine[key] != other[key]]


def local_keys() -> tuple[str, ...]:
    """Dotted keys that a joining peer may choose for itself."""
    return tuple(key for key, field in fields_of_tree() if is_local(field))


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides of agreed fields, overrides of local ones): the first are the organiser's, the second each peer's."""
    chosen = set(local_keys())
    parts: tuple[list[str], list[str]] = ([], [])
    for override in overrides:
        parts[parse_override(override)[0] in chosen].append(override)
    return parts


def check_peer_overrides(overrides: Sequence[str]) -> None:
    """What can be said of a peer's own choices before the run is known. Raises PermanentError."""
    with for_good():
        check_alone(split_overrides(overrides)[1])


def apply_peer_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The run's config with a peer's own choices on top. Raises PermanentError, also for a field that is agreed."""
    refused, _ = split_overrides(overrides)
    if refused:
        key, value = parse_override(refused[0])
        section, name = key.split(".")
        raise PermanentError(
            f"{key}={value} cannot be set for one peer: all peers of run {config.run.run_id} use "
            f"{getattr(getattr(config, section), name)}",
            fix=f"leave it out, or start a run of your own; a peer may choose: {', '.join(local_keys())}",
        )
    with for_good():
        return changed(config, overrides)


def _agreed_values(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    keys = (key for key, field in fields_of_tree() if not is_local(field))
    return {key: tree[key.split(".")[0]][key.split(".")[1]] for key in keys}
