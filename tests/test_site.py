"""The site that mkdocs makes of the documentation: all links lead somewhere, and nothing foreign is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = r"<(?:script|img|iframe|source|object|embed)\b[^>]*?\b(?:src|srcset|data)=[\"']?([^\"' >]+)"
LINKED = r"<link\b[^>]*?\bhref=[\"']?([^\"' >]+)"
IMPORTED = r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as CONTRIBUTING.md says: a page that is in no menu, a dead link or a dead anchor ends it."""
    folder = tmp_path_factory.mktemp("site")
    # no --quiet: it hides warnings from --strict, too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return folder


def test_a_reader_loads_nothing_from_other_hosts(site: Path) -> None:
    def loads() -> Iterator[str]:
        for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
            text = path.read_text(encoding="utf-8")
            for pattern in (LOADED, LINKED, IMPORTED):
                yield from (f"{path.name}: {target}" for target in re.findall(pattern, text))

    found = list(loads())
    assert len(found) > 100
    assert [one for one in found if re.search(r": (https?:)?//", one)] == []


def test_pages_and_files_beside_docs_are_there(site: Path) -> None:
    for name in ("CONTRIBUTING.html", "SECURITY.html", "CHANGELOG.html", "LICENSE", "configs/home.yaml"):
        assert (site / name).is_file(), name
    assert 'href="quickstart-volunteer.html"' in (site / "index.html").read_text()
    assert 'href="LICENSE"' in (site / "questions.html").read_text()


def test_a_word_of_the_glossary_is_explained_where_a_page_first_says_it(site: Path) -> None:
    assert len(re.findall(r'<abbr title="Manifest 0, which', (site / "protocol.html").read_text())) == 1
    assert "<abbr" not in (site / "glossary.html").read_text()
