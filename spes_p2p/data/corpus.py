"""A small real corpus that every machine already has: the Python sources of the standard library.

Enough text for a first run without a download. The text differs between Python versions, so peers that share a dataset
share the files, not this recipe.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from spes_p2p.errors import DataError
from spes_p2p.files import storing, whole_file

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings"}
"""Folders that hold other projects, or tables and test data rather than text."""


def build_stdlib_corpus(output_dir: Path, max_bytes: int = 4_000_000, files: int = 4) -> list[Path]:
    """Writes the standard library's sources as `stdlib-0.jsonl`, ... and returns these files.

    Sources are taken in the order of their names, one document each, dealt to `files` files in turn, until their text
    is `max_bytes` long (the last one is cut there). Raises DataError where this Python has no sources, StorageFull when
    the disk is full.
    """
    documents = list(_documents(Path(sysconfig.get_path("stdlib")), max_bytes))
    if not documents:
        raise DataError("this Python has no sources of its standard library", fix="give your own text with --data")
    with storing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    paths = [output_dir / f"stdlib-{index}.jsonl" for index in range(files)]
    for index, path in enumerate(paths):
        with whole_file(path) as file:
            file.writelines(json.dumps(document).encode() + b"\n" for document in documents[index::files])
    return paths


def _documents(folder: Path, max_bytes: int) -> Iterator[dict[str, str]]:
    left = max_bytes
    for path in _sources(folder):
        data = path.read_bytes()[:left]
        try:
            text = data.decode()
        except UnicodeDecodeError:  # a few sources declare another encoding
            continue
        left -= len(data)
        yield {"text": text, "source": path.relative_to(folder).as_posix()}
        if not left:
            return


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT:
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path
