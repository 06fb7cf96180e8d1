"""Packed dataclasses: canonical bytes, and nothing but exactly the expected value comes out again."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.wire import pack, unpack

Name = NewType("Name", str)
T = TypeVar("T")


@dataclass(frozen=True)
class Inner:
    name: Name
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if any(stop < start for start, stop in self.spans):
            raise ValueError("a span ends before it starts")


@dataclass(frozen=True)
class Outer:
    number: int
    share: float
    data: bytes
    flag: bool
    inner: Inner | None
    many: tuple[Inner, ...]


@dataclass(frozen=True)
class Holding(Generic[T]):
    value: T


@dataclass(frozen=True)
class Two:
    one: Holding[Inner]
    other: Holding[Outer] | None


EXAMPLE = Outer(-7, 0.5, b"\0\xff", True, Inner(Name("ä"), ((1, 2), (3, 3))), (Inner(Name("b")),))


def test_what_is_packed_comes_out_again_and_has_the_same_bytes() -> None:
    two = Two(Holding(Inner(Name("x"))), Holding(EXAMPLE))
    assert unpack(Two, pack(two)) == two
    assert pack(unpack(Two, pack(two))) == pack(two)
    assert pack(EXAMPLE) == msgpack.packb(
        [-7, 0.5, b"\0\xff", True, ["ä", [[1, 2], [3, 3]]], [["b", []]]], use_bin_type=True
    )


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ([1, 0.5, b"", True, None], r"Outer: expected 6 fields"),
        ([1, 0.5, b"", 1, None, []], r"Outer\.flag: expected bool, got 1"),
        ([True, 0.5, b"", True, None, []], r"Outer\.number: expected int, got True"),
        ([2**63, 0.5, b"", True, None, []], r"Outer\.number: 9223372036854775808 does not fit in 64 bits"),
        ([1, float("inf"), b"", True, None, []], r"Outer\.share: inf is not finite"),
        ([1, 1, b"", True, None, []], r"Outer\.share: expected float, got 1"),
        ([1, 0.5, "text", True, None, []], r"Outer\.data: expected bytes"),
        ([1, 0.5, b"", True, ["a", [[1, 2, 3]]], []], r"Outer\.inner\.spans: expected 2 items, got 3"),
        ([1, 0.5, b"", True, ["a", [[2, 1]]], []], r"Outer\.inner: a span ends before it starts"),
        ([1, 0.5, b"", True, None, "a"], r"Outer\.many: expected a list, got 'a'"),
        ([1, 0.5, b"", True, None, {"a": 1}], r"not a msgpack value where Outer was expected: .*map"),
        ([1, 0.5, b"", True, None, {}], r"not a msgpack value where Outer was expected: maps are not allowed"),
        (msgpack.ExtType(1, b"x"), r"not a msgpack value where Outer was expected"),
        ("hello", r"Outer: expected 6 fields of Outer, got 'hello'"),
    ],
)
def test_anything_else_is_refused_and_the_place_named(plain: object, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        unpack(Outer, msgpack.packb(plain, use_bin_type=True))


@dataclass(frozen=True)
class Flat:
    count: int
    share: float
    names: tuple[Name, ...]
    flag: bool


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ([2**63, 0.5, [], True], r"Flat\.count: 9223372036854775808 does not fit in 64 bits"),
        ([1, float("nan"), [], True], r"Flat\.share: nan is not finite"),
        ([1, 0.5, ["a", b"b"], True], r"Flat\.names: expected str, got b'b'"),
        ([1, 0.5, "ab", True], r"Flat\.names: expected a list, got 'ab'"),
        ([1, 0.5, [], 1], r"Flat\.flag: expected bool, got 1"),
        ([True, 0.5, [], True], r"Flat\.count: expected int, got True"),
    ],
)
def test_so_it_is_where_every_field_has_one_type(plain: object, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        unpack(Flat, msgpack.packb(plain, use_bin_type=True))
    good = Flat(-(2**63), 0.5, (Name("a"), Name("b")), True)
    assert unpack(Flat, pack(good)) == good
    assert hash(unpack(Flat, pack(good))) == hash(good)


def test_bytes_that_are_too_many_are_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="larger than the 10 allowed"):
        unpack(Outer, pack(EXAMPLE), max_bytes=10)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        value = unpack(Outer, data)
    except RemoteProtocolError:
        return
    assert unpack(Outer, pack(value)) == value


@given(st.integers(0, len(pack(EXAMPLE)) - 1), st.integers(0, 255))
def test_a_changed_byte_is_a_value_or_refused(at: int, byte: int) -> None:
    data = bytearray(pack(EXAMPLE))
    data[at] = byte
    try:
        value = unpack(Outer, bytes(data))
    except RemoteProtocolError:
        return
    assert isinstance(value, Outer)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x96" + b"\xdd\x00\x0f\x00\x00" + b"\x90" * 0xF0000,
        b"\xdd\x00\x0f\x00\x00" + b"\x80" * 0xF0000,
        b"\xdf\x00\x07\x00\x00" + b"\x01\xc0" * 0x70000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
    ids=["empty lists", "empty maps", "a large map", "a huge length", "huge bytes", "deep nesting"],
)
def test_a_small_message_takes_no_large_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack(Outer, bomb)
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert pack(unpack(Outer, data))


@dataclass(frozen=True)
class Numbers:
    many: tuple[int, ...]


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ([1, 2**63], "9223372036854775808 does not fit in 64 bits"),
        ([1, True], "expected int, got True"),
        ([1, 0.5], "expected int, got 0.5"),
        (7, "expected a list, got 7"),
    ],
)
def test_lists_of_numbers_are_looked_at_one_by_one(plain: object, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"Numbers\.many: {complaint}"):
        unpack(Numbers, msgpack.packb([plain]))
    for good in (Numbers(()), Numbers((-(2**63), 2**63 - 1))):
        assert unpack(Numbers, pack(good)) == good


@pytest.mark.parametrize("depth", [900, 1000, 1020])
def test_lists_nested_too_deeply_to_be_shown_are_refused(depth: int) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(str, b"\x91" * depth + b"\x01")
