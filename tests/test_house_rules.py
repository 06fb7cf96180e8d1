"""The size of what a reader must hold in mind: methods of a class, lines of a module, by the sources themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import spes_p2p

ROOT = Path(spes_p2p.__file__).parent
MOST_METHODS, MOST_LINES = 20, 450


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text()


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)


def test_a_class_has_twenty_methods_at_most() -> None:
    large = [
        f"{path}: {node.name} has {methods(node)}"
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and methods(node) > MOST_METHODS
    ]
    assert not large


def test_a_module_has_450_lines_at_most() -> None:
    long = [f"{path}: {lines}" for path, text in sources() if (lines := len(text.splitlines())) > MOST_LINES]
    assert not long
