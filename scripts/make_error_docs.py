#!/usr/bin/env python3
"""Writes the lists of docs/troubleshooting.md: every error and most warnings of the package, found in its source.

    python scripts/make_error_docs.py

What is filled in at run time stands in angle brackets. Left out are warnings whose text is not made where the event is;
what people wrote on the page has some of them. The tests compare the page with what this makes of the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN = "<!-- made by scripts/make_error_docs.py -->"
BASE = "SpesError"
WARNINGS = {"Warning": 0, "Notice": 1}
"""Events that carry a message for people, and at which place."""
AREAS = {
    "cli": "Commands", "api": "Commands", "config": "Config", "data": "Data", "consensus": "The run",
    "exchange": "The run",
    "swarm": "Network", "sync": "The run",
    "state": "State on disk", "checkpoint": "Checkpoints", "interop": "Models", "peer": "A peer or a bootstrap node",
    "train": "Training", "model": "Training", "experts": "Training", "ownership": "The run", "planning": "Planning",
    "observe": "Metrics", "dashboard": "Dashboard", "testing": "Quickstart and tests", "codecs": "The run",
    "wire": "The run", "ids": "The run", "errors": "The run", "limits": "The run", "files": "State on disk",
    "locks": "State on disk",
    "failpoints": "Quickstart and tests", "__init__": "Commands",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Message:
    """One that users may meet; `kind` is the class of the error, or of the event."""

    area: str
    text: str
    fix: str
    kind: str


def messages() -> list[Message]:
    """Of the whole package, each once."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "spes_p2p").rglob("*.py"))}
    errors = _errors(trees.values())
    found = set()
    for path, tree in trees.items():
        area = AREAS[path.relative_to(ROOT / "spes_p2p").parts[0].removesuffix(".py")]
        for function, call in _calls(tree):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in errors or name in WARNINGS:
                found |= set(_messages(area, name, call, function))
    return sorted(found)


def _errors(trees: Iterable[ast.Module]) -> set[str]:
    """SpesError and all classes that derive from it, by their names."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {BASE}
    while more := {name for name, inherited in bases.items() if inherited & known} - known:
        known |= more
    return known


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call with the innermost function around it."""

    def walk(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function)

    yield from walk(tree, tree)


def _messages(area: str, name: str, call: ast.Call, function: ast.AST) -> Iterator[Message]:
    at = WARNINGS.get(name, 0)
    if len(call.args) <= at:
        return
    fix = next((one.value for one in call.keywords if one.arg == "fix"), None)
    if fix is None and name not in WARNINGS and len(call.args) > 1:
        fix = call.args[1]
    fixes = " or ".join(_texts(fix, function)) if fix is not None else ""
    for text in _texts(call.args[at], function):
        if re.search(r"[A-Za-z]{2}", re.sub(r"<[^>]*>", "", text)):  # else all of it comes from elsewhere
            yield Message(area, text, fixes, name)


def _texts(node: ast.AST | None, function: ast.AST, depth: int = 0) -> list[str]:
    """What an expression may say; several where it chooses."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, function, depth) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, function, depth) for b in _texts(right, function, depth)]
        case ast.IfExp(body=one, orelse=other):
            return _texts(one, function, depth) + _texts(other, function, depth)
        case ast.Name(id=name) if depth < 3:
            given = [
                assigned.value
                for assigned in ast.walk(function)
                if isinstance(assigned, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id == name for target in assigned.targets)
            ]
            texts = [text for value in given for text in _texts(value, function, depth + 1)]
            return texts or [_hole(node)]
        case None:
            return []
        case _:
            return [_hole(node)]


def _part(part: ast.AST, function: ast.AST, depth: int) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return _hole(part.value) if isinstance(part, ast.FormattedValue) else _hole(part)


def _hole(node: ast.AST) -> str:
    """A word for what is filled in: the last name in the expression."""
    names = [one.attr if isinstance(one, ast.Attribute) else one.id for one in ast.walk(node)
             if isinstance(one, ast.Attribute | ast.Name)]  # fmt: skip
    word = names[0].strip("_").replace("_", " ").lower() if names else ".."
    return f"<{word}>"


def render() -> str:
    """The page: what people wrote of it, and the lists."""
    written = PAGE.read_text().partition(BEGIN)[0]
    lines = [f"{written}{BEGIN}"]
    found = messages()
    for title, chosen in (
        ("Every error", [one for one in found if one.kind not in WARNINGS]),
        ("Most warnings", [one for one in found if one.kind in WARNINGS]),
    ):
        lines += ["", f"## {title}"]
        if title == "Most warnings":
            lines += ["", "What they mean, and those that are missing here: [frequent warnings](#frequent-warnings)."]
        for area in dict.fromkeys(one.area for one in chosen):
            lines += ["", f"### {title.split()[1].rstrip('s').capitalize()}s: {area}", ""]
            with_fix = title == "Every error"
            lines += ["| message | fix |", "| --- | --- |"] if with_fix else ["| message |", "| --- |"]
            for one in (one for one in chosen if one.area == area):
                lines.append(f"| {_cell(one.text)} | {_cell(one.fix)} |" if with_fix else f"| {_cell(one.text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """As Markdown shows it literally, in one line of a table."""
    plain = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return re.sub(r"([<>*\[\]])", r"\\\1", plain)


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"{PAGE}: {len(messages())} messages")
