"""Frozen dataclasses to bytes and back: msgpack arrays in the order of the fields, strictly checked.

Everything that is signed, hashed or sent is packed here, so that the same content has the same bytes everywhere.
Decoding trusts nothing: field count, types, and sizes are checked against the annotations, and any mismatch is a
RemoteProtocolError. Supported annotations: int (signed 64 bit), float (finite), bool, str, bytes, nested
dataclasses (generic ones with their argument), `tuple[X, ...]`, `tuple[X, Y]`, and `X | None`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

import msgpack

from spes_p2p.errors import RemoteProtocolError

T = TypeVar("T")
MAX_MESSAGE_BYTES = 64 * 2**20
_INT64 = 2**63


def pack(value: Any) -> bytes:
    """The canonical bytes of a dataclass instance (or a tuple of packable values)."""
    return msgpack.packb(_plain(value), use_bin_type=True)


def unpack(kind: type[T], data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """The `kind` that `data` encodes.

    Raises RemoteProtocolError where the bytes are not exactly one such value or exceed `max_bytes`.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"{kind.__name__} of {len(data)} bytes is larger than the {max_bytes} allowed")
    try:
        plain = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a msgpack value where {kind.__name__} was expected: {error}") from error
    return typing.cast(T, _typed(kind, plain, kind.__name__))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@cache
def _field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _typed(kind: Any, plain: Any, where: str) -> Any:
    if isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind), plain, where)
    origin = get_origin(kind)
    if origin is not None and dataclasses.is_dataclass(origin):
        return _record(typing.cast(type, origin), plain, where, get_args(kind))
    if origin is tuple:
        return _items(get_args(kind), plain, where)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(kind) if option is not type(None)]
        return None if plain is None else _typed(inner[0], plain, where)
    return _scalar(kind, plain, where)


def _record(kind: type, plain: Any, where: str, arguments: tuple[Any, ...] = ()) -> Any:
    fields = _field_types(kind)
    if not isinstance(plain, list) or len(plain) != len(fields):
        raise RemoteProtocolError(f"{where}: expected {len(fields)} fields of {kind.__name__}, got {_brief(plain)}")
    bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=True))
    values = [
        _typed(bound.get(annotation, annotation), item, f"{where}.{name}")
        for (name, annotation), item in zip(fields, plain, strict=True)
    ]
    try:
        return kind(*values)
    except ValueError as error:  # raised by a __post_init__ that checks a range
        raise RemoteProtocolError(f"{where}: {error}") from error


def _items(arguments: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise RemoteProtocolError(f"{where}: expected a list, got {_brief(plain)}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_typed(arguments[0], item, where) for item in plain)
    if len(plain) != len(arguments):
        raise RemoteProtocolError(f"{where}: expected {len(arguments)} items, got {len(plain)}")
    return tuple(_typed(argument, item, where) for argument, item in zip(arguments, plain, strict=True))


def _scalar(kind: Any, plain: Any, where: str) -> Any:
    if type(plain) is not kind:
        raise RemoteProtocolError(f"{where}: expected {kind.__name__}, got {_brief(plain)}")
    if kind is int and not -_INT64 <= plain < _INT64:
        raise RemoteProtocolError(f"{where}: {plain} does not fit in 64 bits")
    if kind is float and not math.isfinite(plain):
        raise RemoteProtocolError(f"{where}: {plain} is not finite")
    return plain


def _brief(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) < 60 else f"{type(plain).__name__} of {len(text)} characters"
