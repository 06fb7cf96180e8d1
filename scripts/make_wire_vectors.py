#!/usr/bin/env python3
"""Writes docs/wire_vectors.json: what peers send and sign, with its exact bytes, for programs that speak to them.

    python scripts/make_wire_vectors.py

Each message is filled by a rule (`Example`), so the file changes only where the wire format does; the tests compare it
with what the code makes. A change of it needs another WIRE_VERSION (`consensus/manifest.py`) once a release is out.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import numpy as np

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import CODECS
from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.manifest import WIRE_VERSION, Manifest
from spes_p2p.consensus.messages import (
    Commit,
    DecayOrder,
    Plan,
    Precommit,
    Prevote,
    Proposal,
    Renewal,
    Report,
    Status,
    Votes,
    signing_bytes,
)
from spes_p2p.data.leases import Leases
from spes_p2p.data.pieces import CATALOGUE_VERSION, Catalogue
from spes_p2p.exchange.requests import ChainPart, PackedRequest, Request
from spes_p2p.ids import Hash, PeerId, sha256
from spes_p2p.swarm.records import HeadRecord, PeerRecord, RunRecord
from spes_p2p.swarm.vitals import PeerWarning
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.organiser_words import Ending
from spes_p2p.wire import pack

FILE = Path(__file__).parents[1] / "docs" / "wire_vectors.json"
SENT = (
    Status, Plan, Report, Proposal, Prevote, Precommit, Votes, Content, Renewal,
    Manifest, Commit, Envelope, PackedRequest,
    *get_args(Request), ChainPart, RunInfo, Catalogue, RunRecord, PeerRecord, HeadRecord, Ending, DecayOrder,
)  # fmt: skip
PEERS = tuple(PeerId(f"Qm{letter * 44}") for letter in "abc")
LEASES = Leases(12, ((0, 2),), ((PEERS[0], ((4, 8), (10, 12))),))
FIXED: dict[str, Any] = {  # where not every value will do
    "run_id": "tiny", "role": "peer", "version": "0.1.0", "wire_version": WIRE_VERSION, "dtype": "uint16",
    "piece_bytes": 8192, "addresses": ("/ip4/203.0.113.7/tcp/31337",), "leases": LEASES, "owned": (0, 2),
    "phase": "training", "device": "cpu", "phase_seconds": (1.0, 0.5, 2.0, 0.25, 0.125),
}  # fmt: skip
OWN_FIXED: dict[Any, dict[str, Any]] = {Catalogue: {"version": CATALOGUE_VERSION}, PeerWarning: {"kind": "warning"}}


class Example:
    """Makes one value of each type: numbers and hashes count up, peers take turns, lists have two entries."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, kind: Any, bound: dict[Any, Any] | None = None) -> Any:
        kind = (bound or {}).get(kind, kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if dataclasses.is_dataclass(origin or kind):
            return self._record(origin or kind, arguments)
        if origin is tuple:
            inner = arguments if arguments[-1] is not Ellipsis else (arguments[0], arguments[0])
            return tuple(self.of(one, bound) for one in inner)
        if origin in (Union, types.UnionType):
            return self.of(next(one for one in arguments if one is not type(None)), bound)
        self._count += 1
        return self._plain(kind)

    def _record(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        hints = typing.get_type_hints(kind)
        bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=True))
        fixed = FIXED | OWN_FIXED.get(kind, {})
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(*(fixed[name] if name in fixed else self.of(hints[name], bound) for name in names))

    def _plain(self, kind: Any) -> Any:
        made: dict[Any, Callable[[int], Any]] = {
            PeerId: lambda n: PEERS[n % len(PEERS)],
            Hash: lambda n: sha256(bytes([n % 256])),
            bool: lambda n: True,
            int: lambda n: n,
            float: lambda n: n / 4,
            str: lambda n: f"text {n}",
            bytes: lambda n: bytes([n % 256, (n + 1) % 256]),
        }
        return made[kind](self._count)


def readable(value: Any) -> Any:
    """As JSON: bytes in hexadecimal, records with the names of their fields."""
    if dataclasses.is_dataclass(value):
        return {field.name: readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [readable(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def examples() -> dict[str, Any]:
    """One of each that is sent, by its name."""
    return {kind.__name__: Example().of(kind) for kind in SENT}


def vectors() -> dict[str, Any]:
    messages = {
        name: {
            "fields": readable(value),
            "packed": pack(value).hex(),
            "sha256": sha256(pack(value)).hex(),
            "signed": sha256(signing_bytes(value)).hex(),
        }
        for name, value in examples().items()
    }
    return {"wire_version": WIRE_VERSION, "messages": messages, "codecs": codecs()}


def change() -> np.ndarray[Any, np.dtype[np.float32]]:
    """300 values of many sizes and both signs, exact in fp32."""
    at = np.arange(300)
    return ((at * 37 % 101 - 50) * 2.0 ** (at % 7 - 10)).astype(np.float32)


def codecs() -> dict[str, Any]:
    """Of the values of `change`: what travels, and the SHA-256 of the fp32 values that arrive."""
    values = change()
    found = dict[str, Any]()
    for codec in CODECS:
        data = values.tobytes() if codec == "fp32" else encode(codec, values)
        arrived = values if codec == "fp32" else decode(codec, data, len(values))
        found[codec] = {"data": data.hex(), "arrives_sha256": sha256(arrived.astype("<f4").tobytes()).hex()}
    return found


def main() -> None:
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n")
    print(f"{FILE}: {len(SENT)} messages, {len(CODECS)} codecs")


if __name__ == "__main__":
    main()
