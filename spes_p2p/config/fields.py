"""How a config field is declared: agreed by all peers of a run, or local to one peer; and the base of all sections.

An agreed field is part of the run's fingerprint. A local one may differ from peer to peer; a private local one is not
even published with the run, since it says something about the organiser's machine alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Schedule = tuple[tuple[Natural, Positive], ...]


class Section(BaseModel):
    """A part of the config tree: frozen, no unknown keys, no silent conversions, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


def agreed(description: str, default: Any = ..., **limits: Any) -> Any:
    """Declares a field that must be the same on all peers (`limits`: ge, gt, le, lt, pattern, ...)."""
    return Field(default, description=description, **limits)


def local(description: str, default: Any = ..., private: bool = False, **limits: Any) -> Any:
    """Declares a field that each peer may choose; a `private` one is left out of the config that is published."""
    extra: dict[str, Any] = {"local": True, "private": private}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def is_local(field: FieldInfo) -> bool:
    return _mark(field, "local")


def is_private(field: FieldInfo) -> bool:
    return _mark(field, "private")


def _mark(field: FieldInfo, name: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(name))
