"""How large the project is: lines of code by package, modules, tests, fields, words. It fails nothing.

    python scripts/size.py                  # this tree
    python scripts/size.py --tree OTHER     # another checkout, counted in the same way

A line of code has something besides blanks, comments and docstrings. Simulation that an older tree keeps in
`spes_p2p/testing` counts as part of the package there, since it was installed with it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str) -> int:
    """Lines on which some token stands that is neither a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def config_fields(tree: Path) -> int:
    """Fields of a run's config, by the rows of its page."""
    page = (tree / "docs" / "configuration.md").read_text(encoding="utf-8")
    return len(set(re.findall(r"^\| `([a-z_]+\.[a-z_0-9]+)`", page, re.MULTILINE)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    tree = parser.parse_args().tree
    package = tree / "spes_p2p"
    code: Counter[str] = Counter()
    every = sources(package)
    for path in every:
        inside = path.relative_to(package)
        code[inside.parts[0] if len(inside.parts) > 1 else "(top)"] += lines_of_code(path.read_text(encoding="utf-8"))
    for name, lines in sorted(code.items()):
        print(f"{name:>14} {lines:6,}")
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(tree / "tests"))
    print(
        f"spes_p2p: {sum(code.values()):,} lines of code in {len(every)} modules; tests: {tests:,} lines;"
        f" config fields: {config_fields(tree)};"
        f" README: {words([tree / 'README.md']):,} words; docs: {words(sorted((tree / 'docs').glob('*.md'))):,} words"
    )


if __name__ == "__main__":
    main()
