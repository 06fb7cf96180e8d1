"""Writes docs/configuration.md from the schema of the config; `--check` only says whether the file is up to date.

Every word about a field stands where the field is defined (`spes_p2p/config/sections.py`); here is only how it looks.

    python scripts/make_config_docs.py
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone that is not installed

from pydantic.fields import FieldInfo  # noqa: E402

from spes_p2p.config.schema import Config  # noqa: E402
from spes_p2p.config.sections import Section, is_local, is_private  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/make_config_docs.py. Change spes_p2p/config/sections.py, then run it again. -->

A run is one YAML file with the sections below. `configs/` has complete ones: [`tiny`](../configs/tiny.yaml),
[`small`](../configs/small.yaml), [`home`](../configs/home.yaml), and the published SPES shapes. Fields without a
default must be given; a section whose fields all have one may be left out. A key that does not exist is refused, and
the message names the nearest one that does. In the tables, E is the number of experts and H the number of inner steps
of a round. Where no limit is said a number is at most 10^12, and one that is neither whole nor 0 at least 10^-30.

Any field can be changed on the command line with its dotted name; the value is YAML:

    spes-p2p bootstrap --config tiny --data shards swarm.min_peers=2 "sync.steps_per_round=[[40, 10], [0, 20]]"

**Whose is it?** The last but one column says who decides:

| word | meaning |
| --- | --- |
| agreed | The organiser's. All peers have the same value; it is part of the fingerprint that names the run. |
| local | Each peer's own. The organiser's value is published with the run and is the default of those who join. |
| private | Each peer's own too, but the organiser's value stays on the organiser's machine. |

A volunteer needs no file: `spes-p2p join` takes the config from the swarm and checks it against its fingerprint. Local
and private fields can be given to `join` in the same dotted form, for example `output.tensorboard=true`. An agreed one
is refused there. What an organiser publishes is looked at first: a run whose config has a private field is refused, and
local ones are bounded and name no file, address or program.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type)
        assert issubclass(section.annotation, Section)
        parts.append("\n".join(_section(name, section.annotation)) + "\n")
    return "\n".join(parts)


def _section(name: str, section: type[Section]) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    yield "| field | type | default | whose | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for leaf, field in section.model_fields.items():
        default, meaning = _default(field)
        cells = (f"`{name}.{leaf}`", _type(field), default, _whose(field), meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _whose(field: FieldInfo) -> str:
    if not is_local(field):
        return "agreed"
    return "private" if is_private(field) else "local"


def _default(field: FieldInfo) -> tuple[str, str]:
    """(default, meaning). A default that follows from another field stands at the end of the description."""
    meaning = field.description or ""
    if not field.is_required():
        return f"`{_plain(field.default)}`", meaning
    start, found, rule = meaning.partition(" (default: ")
    if found:
        return f"`{rule.removesuffix('.').removesuffix(')')}`", start + "."
    return "", meaning


def _plain(value: Any) -> str:
    """As YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return '""' if value == "" else f"{value:g}" if isinstance(value, float) and value < 1e-3 else str(value)


def _type(field: FieldInfo) -> str:
    return _name(field.annotation, _limits(field.metadata))


def _name(kind: Any, limits: str) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        (limited,) = (arguments[1],)
        return _name(arguments[0], limits or _limits(limited.metadata if isinstance(limited, FieldInfo) else []))
    if origin is Literal:
        return " or ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(one, "") for one in arguments)
    if origin is tuple:
        inner = arguments[:1] if Ellipsis in arguments else arguments
        texts = ", ".join(_name(one, "") for one in inner)
        return f"list of {texts}" if Ellipsis in arguments else f"[{texts}]"
    return {type(None): "null", int: "integer", float: "number", bool: "true or false", str: "text"}[kind] + limits


def _limits(metadata: list[Any]) -> str:
    """Bounds as people write them; patterns and strictness are left to the error message."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    known = [(name, getattr(one, name)) for name in signs for one in metadata if hasattr(one, name)]
    return " " + ", ".join(f"{signs[name]} {_bound(value)}" for name, value in known) if known else ""


def _bound(value: float) -> str:
    whole = int(value)
    return (
        f"2^{whole.bit_length() - 1}" if whole == value and whole > 1000 and whole & (whole - 1) == 0 else f"{value:g}"
    )


def main(arguments: list[str]) -> int:
    page = render()
    if "--check" in arguments:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print(f"{PAGE.relative_to(ROOT)} is {'up to date' if fresh else 'old: python scripts/make_config_docs.py'}")
        return 0 if fresh else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
