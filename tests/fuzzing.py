"""Every parser of what comes from others or from disks, and bytes to break it with.

Valid messages (of docs/wire_vectors.json, and a few of our own) are altered by a seeded rule, or are random bytes. A
parser may refuse them with the error that its docstring names, and with nothing else.
"""

from __future__ import annotations

import json
import random
import runpy
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgpack

from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import CODECS
from spes_p2p.config.load import bundled_config, load_config, published_config, published_yaml
from spes_p2p.consensus.messages import Commit
from spes_p2p.data.manifest import Manifest as DataManifest
from spes_p2p.data.pieces import Catalogue
from spes_p2p.errors import SpesError
from spes_p2p.exchange.requests import pack_request, unpack_request
from spes_p2p.ids import PeerId, sha256
from spes_p2p.observe.events import Error, Warning, from_json, to_json
from spes_p2p.swarm import envelope, invite, records
from spes_p2p.swarm.hivemind_backend.directory import plain
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.sync.chain import Chain, check_links
from spes_p2p.sync.organiser_words import Words, ending
from spes_p2p.sync.organiser_words import checked as checked_words
from spes_p2p.sync.recorder import pack_plain, unpack_plain
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.wire import pack, unpack
from tests.sync.chains import MadeRun

MAKER = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "make_wire_vectors.py"))
PEERS, SENT, LEASES, change = MAKER["PEERS"], MAKER["SENT"], MAKER["LEASES"], MAKER["change"]
examples: Callable[[], dict[str, Any]] = cache(MAKER["examples"])
ORGANISER = PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{ORGANISER}"
MOST_BYTES = 2**16
SLOW_SECONDS = 5.0
NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
ODD: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    False,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    b"",
    b"\0" * 64,
    [],
    [[]],
)


@dataclass(frozen=True)
class Target:
    """A parser with valid inputs. `allowed`: what it may raise. `every`: a slow one gets one seed in so many."""

    parse: Callable[[bytes], object]
    valid: Sequence[bytes]
    allowed: tuple[type[Exception], ...] = (SpesError,)
    every: int = 1


class Crash(Exception):
    """A parser raised what it should not, or took too long. Names the target, the seed of the input, and the input."""


def targets() -> dict[str, Target]:
    """All of them, by name."""
    found = {kind.__name__: Target(partial(unpack, kind), [pack(examples()[kind.__name__])]) for kind in SENT}
    found["requests"] = Target(unpack_request, list(map(pack_request, _requests())))
    found["envelopes"] = Target(
        partial(EnvelopeChecker(_Believing()).open, examples()["Envelope"].sender), [pack(examples()["Envelope"])]
    )
    found |= _records() | _chains() | _texts()
    for codec in CODECS:
        if codec != "fp32":
            parse = partial(_decode, codec)
            found[f"codec {codec}"] = Target(parse, [encode(codec, change())], (ValueError,))
    return found


class _Believing:
    """Believes every signature, so that what is signed is looked at, too."""

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        return True


def _requests() -> Iterable[Any]:
    kinds = [name for name in examples() if name.endswith("Request") and name != "PackedRequest"]
    return [examples()[name] for name in kinds]


def _records() -> dict[str, Target]:
    publisher = PEERS[0]
    now = 1_000_000.0
    sealed = envelope.seal(FakeKeys().signer(publisher), records.RUNS_KEY, pack(examples()["RunRecord"]), now + 60)

    def of_peer(data: bytes) -> object:
        return records.parse(records.PeerRecord, examples()["PeerRecord"].peer, data)

    return {
        "DHT envelopes": Target(
            lambda data: envelope.open_envelope(_Believing(), data, None, publisher, now), [sealed]
        ),
        "DHT values": Target(lambda data: plain(data, bytes), [msgpack.packb(sealed)]),
        "peer records": Target(of_peer, [pack(examples()["PeerRecord"])]),
        "catalogues": Target(
            lambda data: Catalogue.checked(data, sha256(pack(examples()["Catalogue"]))), [pack(examples()["Catalogue"])]
        ),
    }


def _chains() -> dict[str, Target]:
    run = MadeRun()
    before = run.genesis(sha256(b"state 0"))
    genesis, child = pack(before), pack(run.certified(run.child(before.manifest, sha256(b"state 1"), sha256(b"wire"))))

    def follow(data: bytes) -> None:
        check_links((unpack(Commit, data),), before, run.info, run.rules, _Believing().verify)

    def first(data: bytes) -> None:
        check_links((unpack(Commit, data),), None, run.info, run.rules, _Believing().verify)

    def on_disk(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "00000000.commit").write_bytes(data)
            Chain(Path(folder)).commit(0)

    said = pack(ending(run.info, 3, run.sealer(run.info.organiser)))

    def words(data: bytes) -> None:
        checked_words(data, run.info, _Believing().verify)

    return {
        "the organiser's words": Target(words, [pack(Words()), said]),
        "commits": Target(follow, [child]),
        "genesis": Target(first, [genesis]),
        "chain files": Target(on_disk, [genesis, child], every=10),
        "recorded states": Target(unpack_plain, [pack_plain([before, LEASES, {"a": 1}])]),
    }


def _texts() -> dict[str, Target]:
    word = invite.encode(invite.Invite("tiny", b"f" * 16, ORGANISER, (ADDRESS,)))
    data_manifest = {
        "format_version": 1, "dtype": "uint16", "tokenizer": "t", "tokenizer_fingerprint": "f", "vocab_size": 9,
        "eos_id": 0, "documents": 1, "tokens": 2, "bad_lines": 0, "inputs": [], "shards": [],
    }  # fmt: skip
    lines = [to_json(1.0, event).encode() for event in (Warning("a text"), Error("a text", "a fix"))]
    return {
        "invitations": Target(lambda data: invite.decode(data.decode("latin-1")), [word.encode()]),
        "config": Target(
            lambda data: published_config(data.decode("latin-1"), "the config"),
            [published_yaml(load_config(bundled_config("tiny"))).encode()],
            every=10,
        ),
        "events": Target(from_json, lines, (ValueError,)),
        "dataset manifests": Target(
            lambda data: DataManifest.parse(data, "manifest.json"), [json.dumps(data_manifest).encode()]
        ),
    }


def _decode(codec: Any, data: bytes) -> object:
    return decode(codec, data, len(change()))


def altered(rng: random.Random, valid: Sequence[bytes]) -> bytes:
    """One input: random, or a valid one with a few changes of bytes or of the values that it packs."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    data = rng.choice(valid)
    for _ in range(rng.randrange(1, 4)):
        data = rng.choice((_other_value, _other_value, _other_byte, _cut, _doubled, _nested))(rng, data)
    return data[:MOST_BYTES]


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """Packed values with one of them exchanged: such messages get past the checks of their shape."""
    try:
        tree = msgpack.unpackb(data, raw=False)
        places = list(_places(tree))
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):  # no longer packed, or nested too deeply
        return _other_byte(rng, data)
    if not places:
        return data
    holder, at = rng.choice(places)
    likes = [one for one in ODD if type(one) is type(holder[at])] if rng.random() < 0.8 else ODD
    holder[at] = rng.choice(likes or ODD)
    return msgpack.packb(tree, use_bin_type=True)


def _places(tree: Any) -> Iterable[tuple[list[Any], int]]:
    if type(tree) is list:
        for at, item in enumerate(tree):
            yield tree, at
            yield from _places(item)


def _other_byte(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(1) + data[at + rng.randrange(2) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _doubled(rng: random.Random, data: bytes) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:]


def _nested(rng: random.Random, data: bytes) -> bytes:
    """Deep lists, of msgpack or of a text; long numbers."""
    piece = rng.choice(
        (b"\x91" * 3000, b"\x91" * 1000, b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"- " * 500)
    )
    at = rng.choice((0, rng.randrange(len(data) + 1)))
    return data[:at] + piece + data[at:]


def attack(name: str, target: Target, seed: int) -> bool:
    """Gives `target` the input of this seed; whether it was taken. Raises Crash."""
    data = altered(random.Random(f"{name} {seed}"), target.valid)
    began = time.process_time()
    try:
        target.parse(data)
    except target.allowed:
        return False
    except Exception as error:
        raise Crash(f"{name}, seed {seed}: {type(error).__name__}: {error} of {data[:200]!r}") from error
    finally:
        if time.process_time() - began > SLOW_SECONDS:
            raise Crash(f"{name}, seed {seed}: more than {SLOW_SECONDS:g} s for {data[:200]!r}")
    return True


def run(seconds: float, first: int = 0) -> Counter[str]:
    """Attacks all targets in turn for so long; how many inputs each had. Raises Crash."""
    done, seed, end = Counter[str](), first, time.monotonic() + seconds
    chosen = targets()
    while time.monotonic() < end:
        for name, target in chosen.items():
            if seed % target.every == 0:
                attack(name, target, seed)
                done[name] += 1
        seed += 1
    return done
