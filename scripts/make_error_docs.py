#!/usr/bin/env python3
"""Writes the lists of docs/troubleshooting.md: every error with a fix and most warnings, found in the source.

    python scripts/make_error_docs.py

Each error with a fix has a code, kept in spes_p2p/cli/error_codes.json, unless nearly all of it is filled in.
One whose words have changed keeps its code, where most of them are the same; else it gets a new one, and the old code
is never given again. Who rewords an error altogether changes its text there, too.

What is filled in at run time stands in angle brackets. Left out are errors without a fix, which a peer says as reasons
inside of others, and warnings whose text is not made where the event is;
what people wrote on the page has some of them. The tests compare the page with what this makes of the source.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
CODES = ROOT / "spes_p2p" / "cli" / "error_codes.json"
ALIKE = 0.7
"""An error whose text is at least so similar to one that has gone is the same error (1: equal)."""
FEWEST_LETTERS = 6
BEGIN = "<!-- made by scripts/make_error_docs.py -->"
BASE = "SpesError"
WARNINGS = {"Warning": 0, "Notice": 1}
"""Events that carry a message for people, and at which place."""
PLAIN = {"strerror": "error", "me": "peer id", "shown": "value", "text": "value", "found": "value"}
"""Words for names of the code that say nothing to others."""


@dataclass(frozen=True, order=True)
class Message:
    """One that users may meet; `kind` is the class of the error, or of the event."""

    text: str
    fix: str
    kind: str


def messages() -> list[Message]:
    """Of the whole package, each once."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "spes_p2p").rglob("*.py"))]
    errors, constants = _errors(trees), _constants(trees)
    found = set()
    for tree in trees:
        for function, call in _calls(tree):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in errors or name in WARNINGS:
                found |= set(_messages(name, call, Scope(function, tree, constants)))
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


class Scope:
    """Where a message stands: what its names stand for is looked up in the function, the module, then the package."""

    def __init__(self, function: ast.AST, module: ast.Module, package: dict[str, ast.AST]) -> None:
        self._function, self._module, self._package = function, module, package

    def values(self, name: str) -> list[ast.AST]:
        """What is assigned to `name`: in the function anything, elsewhere constants."""
        for nodes in (ast.walk(self._function), self._module.body):
            found: list[ast.AST] = [n.value for n in nodes if isinstance(n, ast.Assign) and _targets(n, name)]
            if found:
                return found
        return [self._package[name]] if name in self._package else []


def _targets(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _constants(trees: Iterable[ast.Module]) -> dict[str, ast.AST]:
    """Texts that the package's modules define for each other."""
    return {
        target.id: node.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr | ast.Constant | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_")
    }


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call with the innermost function around it."""

    def walk(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function)

    yield from walk(tree, tree)


def _messages(name: str, call: ast.Call, scope: Scope) -> Iterator[Message]:
    at = WARNINGS.get(name, 0)
    if len(call.args) <= at:
        return
    fix = next((one.value for one in call.keywords if one.arg == "fix"), None)
    if fix is None and name not in WARNINGS and len(call.args) > 1:
        fix = call.args[1]
    fixes = " or ".join(_texts(fix, scope)) if fix is not None else ""
    for text in _texts(call.args[at], scope):
        if re.search(r"[A-Za-z]{2}", re.sub(r"<[^>]*>", "", text)):  # else all of it comes from elsewhere
            yield Message(text, fixes, name)


def _texts(node: ast.AST | None, scope: Scope, depth: int = 0) -> list[str]:
    """What an expression may say; several where it chooses."""
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return [str(value)]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, scope, depth) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, scope, depth) for b in _texts(right, scope, depth)]
        case ast.IfExp(body=one, orelse=other):
            return _texts(one, scope, depth) + _texts(other, scope, depth)
        case ast.Name(id=name) if depth < 3:
            texts = [text for value in scope.values(name) for text in _texts(value, scope, depth + 1)]
            return texts or [_hole(node)]
        case None:
            return []
        case _:
            return [_hole(node)]


def _part(part: ast.AST, scope: Scope, depth: int) -> str:
    """A constant where there is one, else a word for what is filled in."""
    match part:
        case ast.Constant(value=value):
            return str(value)
        case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper() and depth < 3:
            texts = [text for value in scope.values(name) for text in _texts(value, scope, depth + 1)]
            return texts[0] if len(texts) == 1 else _hole(part)
        case _:
            return _hole(part)


def _hole(node: ast.AST) -> str:
    return f"<{_word(node)}>"


def _word(node: ast.AST) -> str:
    """What people would call the value of an expression: its last name, through calls that only change its form."""
    match node:
        case ast.FormattedValue(value=value) | ast.Subscript(value=value) | ast.Await(value=value):
            return _word(value)
        case ast.Call(func=ast.Name(id="len"), args=[counted]):
            return f"number of {_word(counted)}".removesuffix(" of value")
        case ast.Call(func=ast.Name(id="getattr")):
            return "value"
        case ast.Call(func=ast.Name(id="first_line")):
            return "error"
        case ast.Call(args=[ast.GeneratorExp(elt=value) | ast.ListComp(elt=value), *_]) | ast.Call(args=[value, *_]):
            return _word(value)
        case ast.Call(func=ast.Attribute(value=value)) if (
            not isinstance(value, ast.Constant) and _word(value) != "self"
        ):
            return _word(value)
        case ast.Call(func=function):
            return _word(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return PLAIN.get(name, name.strip("_").replace("_", " ").lower())
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            return _word(one) if _word(one) != "value" else _word(other)
        case ast.BoolOp(values=[one, *_]) | ast.GeneratorExp(elt=one) | ast.Starred(value=one):
            return _word(one)
        case _:
            return "value"


def codes(texts: Iterable[str], before: dict[str, str]) -> dict[str, str]:
    """Code to text, for all of `texts` and for what had a code `before`; `<>` stands for what is filled in."""
    known, now = dict(before), dict.fromkeys(map(shape, texts))
    wanted = [text for text in now if text not in set(known.values())]
    gone = {code: text for code, text in known.items() if text not in now}
    for text in wanted:
        alike = {code: SequenceMatcher(None, text, old, autojunk=False).ratio() for code, old in gone.items()}
        best = max(alike, key=alike.__getitem__, default="")
        if not best or alike[best] < ALIKE:
            best = f"E{1 + max((int(code[1:]) for code in known), default=100)}"
        known[best] = text
        gone.pop(best, None)
    return known


def shape(text: str) -> str:
    """What all errors say that are made there, in one line."""
    return re.sub(r"<[^<>]*>", "<>", " ".join(text.split()))


def render() -> dict[Path, str]:
    """The page: what people wrote of it, and the lists; and the file of codes."""
    found = messages()
    errors = [one for one in found if one.kind not in WARNINGS and one.fix]
    shown = [one.text for one in errors if len(re.findall("[A-Za-z]", shape(one.text))) >= FEWEST_LETTERS]
    by_code = codes(shown, json.loads(CODES.read_text()) if CODES.exists() else {})
    code_of = {text: code for code, text in by_code.items()}
    told = sorted((code_of.get(shape(one.text), ""), _cell(one.text), _cell(one.fix)) for one in errors)
    warnings = [[_cell(one.text), _cell(one.fix)] for one in found if one.kind in WARNINGS]
    lines = [
        *("", "## Every error", "", "By code.", "", *_table(["code", "message", "fix"], told)),
        *("", "## Most warnings", "", *_table(["message", "fix"], warnings)),
    ]
    page = "\n".join([PAGE.read_text().partition(BEGIN)[0] + BEGIN, *lines]) + "\n"
    return {PAGE: page, CODES: json.dumps(by_code, indent=0, ensure_ascii=False) + "\n"}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """As Markdown shows it literally, in one line of a table."""
    plain = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return re.sub(r"([<>*\[\]])", r"\\\1", plain)


if __name__ == "__main__":
    for page, text in render().items():
        page.write_text(text)
    print(f"{PAGE}: {len(messages())} messages")
