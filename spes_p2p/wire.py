"""Frozen dataclasses to bytes and back: msgpack arrays in the order of the fields, strictly checked.

Everything that is signed, hashed or sent is packed here, so that the same content has the same bytes everywhere.
Decoding trusts nothing: field count, types, and sizes are checked against the annotations, and any mismatch is a
RemoteProtocolError. Supported annotations: int (signed 64 bit), float (finite), bool, str, bytes, a StrEnum, nested
dataclasses (generic ones with their argument), `tuple[X, ...]`, `tuple[X, Y]`, and `X | None`; a PeerId is a str of at
most MAX_PEER_ID characters. What else a field may hold is said by a record that is `Bounded` (`bounds.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin

import msgpack

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import MAX_PEER_ID, PeerId

T = TypeVar("T")
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_LISTS = 2**18
"""Lists in one message: an empty one is a byte on the wire and sixty in memory."""
_INT64 = 2**63
_Reader = Callable[[Any], Any]


def pack(value: Any) -> bytes:
    """The canonical bytes of a dataclass instance (or a tuple of packable values)."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_fields_of)
    return packed


def unpack(kind: type[T], data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """The `kind` that `data` encodes.

    Raises RemoteProtocolError where the bytes are not exactly one such value or exceed `max_bytes`. Takes at most some
    ten times the memory of the bytes themselves, whatever they are, and MAX_LISTS empty lists.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"{kind.__name__} of {len(data)} bytes is larger than the {max_bytes} allowed")
    try:
        lists = _counted() if len(data) > MAX_LISTS else None  # each takes a byte at least
        plain = msgpack.unpackb(
            data, raw=False, list_hook=lists, object_pairs_hook=_no_map, max_map_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a msgpack value where {kind.__name__} was expected: {error}") from error
    return _read(kind, plain)


def unpack_first(kind: type[T], data: bytes) -> T:
    """The first field of a packed record, a `kind`; the others are not looked at. For what was checked as a whole once.

    Raises RemoteProtocolError where the bytes do not begin so.
    """
    unpacker = msgpack.Unpacker(raw=False, object_pairs_hook=_no_map, max_map_len=0, max_ext_len=0)
    try:
        unpacker.feed(data)
        unpacker.read_array_header()
        plain = unpacker.unpack()
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a record that begins with {kind.__name__}: {error}") from error
    return _read(kind, plain)


def _read(kind: type[T], plain: Any) -> T:
    try:
        return typing.cast(T, _reader(typing.cast(Any, kind))(plain))
    except _Mismatch as error:
        raise RemoteProtocolError(f"{'.'.join([kind.__name__, *reversed(error.path)])}: {error}") from error


def _counted() -> Callable[[list[Any]], list[Any]]:
    lists = itertools.count(1)

    def check(items: list[Any]) -> list[Any]:
        if next(lists) > MAX_LISTS:
            raise ValueError(f"more than {MAX_LISTS} lists")
        return items

    return check


def _no_map(pairs: Any) -> Any:
    raise ValueError("maps are not allowed")


class _Mismatch(Exception):
    """Something other than what was expected; `path` lists the fields that lead to it, innermost first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} cannot be packed")
    return tuple(field.name for field in dataclasses.fields(kind))


def _fields_of(value: Any) -> Any:
    return _getter_of(typing.cast(Any, type(value)))(value)


@cache
def _getter_of(kind: type) -> Callable[[Any], Any]:
    """What gives all fields of an instance at once."""
    names = _names_of(kind)
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


@cache
def _reader(kind: Any) -> _Reader:
    """The function that checks a plain value against an annotation and builds what it stands for."""
    if kind is PeerId:
        return _peer_id
    if isinstance(kind, typing.NewType):
        return _reader(kind.__supertype__)
    if dataclasses.is_dataclass(kind):
        return _record_reader(typing.cast(type, kind), ())
    origin = get_origin(kind)
    if origin is not None and dataclasses.is_dataclass(origin):
        return _record_reader(typing.cast(type, origin), get_args(kind))
    if origin is tuple:
        return _tuple_reader(get_args(kind))
    if origin in (Union, types.UnionType):
        (inner,) = (_reader(option) for option in get_args(kind) if option is not type(None))
        return lambda plain: None if plain is None else inner(plain)
    if issubclass(kind, StrEnum):
        return _enum_reader(kind)
    return _scalar_reader(kind)


def _enum_reader(kind: type[StrEnum]) -> _Reader:
    def read(plain: Any) -> Any:
        try:
            return kind(plain)
        except ValueError as error:
            raise _Mismatch(f"{_brief(plain)} is no {kind.__name__}") from error

    return read


def _record_reader(kind: type, arguments: tuple[Any, ...]) -> _Reader:
    hints, names = typing.get_type_hints(kind), _names_of(kind)
    bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=True))
    kinds = [bound.get(hints[name], hints[name]) for name in names]
    readers = list(enumerate(_reader(kind) for kind in kinds))
    is_plain = not (hasattr(kind, "__post_init__") or hasattr(kind, "__slots__"))
    usual = tuple(_type_of(kind) for kind in kinds)
    unclear = [(at, read) for at, read in readers if usual[at] not in (bool, str, bytes) or read is _peer_id]

    def read(plain: Any) -> Any:
        if type(plain) is not list or len(plain) != len(names):
            raise _Mismatch(f"expected {len(names)} fields of {kind.__name__}, got {_brief(plain)}")
        values, at = plain.copy(), 0
        try:
            for at, reader in unclear if tuple(map(type, plain)) == usual else readers:
                values[at] = reader(plain[at])
        except _Mismatch as error:
            error.path.append(names[at])
            raise
        if is_plain:
            made: Any = object.__new__(kind)
            made.__dict__.update(zip(names, values))  # the __init__ of a frozen class sets each field by a call
            return made
        try:
            return kind(*values)
        except ValueError as error:  # raised by a __post_init__ that checks a range
            raise _Mismatch(str(error)) from error

    return read


def _type_of(kind: Any) -> type | None:
    """The one type that the plain value of an annotation can have; None where there are several."""
    if isinstance(kind, typing.NewType):
        return _type_of(kind.__supertype__)
    if get_origin(kind) in (Union, types.UnionType):
        return None
    return kind if kind in (bool, str, bytes, int, float) else list


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        one, usual = _reader(arguments[0]), {_type_of(arguments[0])}
        if usual <= {bool, str, bytes} and one is not _peer_id:
            return lambda plain: tuple(plain if set(map(type, _list(plain))) <= usual else map(one, plain))
        if usual == {int}:  # msgpack has none below -2**63
            return lambda plain: tuple(
                plain if set(map(type, _list(plain))) <= usual and max(plain, default=0) < _INT64 else map(one, plain)
            )
        return lambda plain: tuple([one(item) for item in _list(plain)])
    readers = [_reader(argument) for argument in arguments]

    def read(plain: Any) -> Any:
        if len(_list(plain)) != len(readers):
            raise _Mismatch(f"expected {len(readers)} items, got {len(plain)}")
        return tuple([reader(item) for reader, item in zip(readers, plain)])

    return read


def _list(plain: Any) -> list[Any]:
    if type(plain) is not list:
        raise _Mismatch(f"expected a list, got {_brief(plain)}")
    return plain


def _peer_id(plain: Any) -> Any:
    """Checks a peer id. Its length is bounded because ids stay in the chain for as long as the run exists."""
    if type(plain) is str and len(plain) <= MAX_PEER_ID:
        return plain
    raise _Mismatch(f"expected a peer id of at most {MAX_PEER_ID} characters, got {_brief(plain)}")


def _scalar_reader(kind: Any) -> _Reader:
    def read(plain: Any) -> Any:
        if type(plain) is not kind:
            raise _Mismatch(f"expected {kind.__name__}, got {_brief(plain)}")
        return plain

    def read_int(plain: Any) -> Any:
        if type(plain) is int and -_INT64 <= plain < _INT64:
            return plain
        raise _Mismatch(f"{read(plain)} does not fit in 64 bits")

    def read_float(plain: Any) -> Any:
        if type(plain) is float and math.isfinite(plain):
            return plain
        raise _Mismatch(f"{read(plain)} is not finite")

    return {int: read_int, float: read_float}.get(kind, read)


def _brief(plain: Any) -> str:
    try:
        text = repr(plain)
    except RecursionError:
        return "lists nested too deeply"
    return text if len(text) < 60 else f"{type(plain).__name__} of {len(text)} characters"
