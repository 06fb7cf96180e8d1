"""What mkdocs.yml needs beyond settings: pages outside of docs/, and the glossary as tooltips.

The pages at the root of the repository, and the files that pages link to there, join those of docs/ in one folder. So
links are written as a plain view of the repository needs them, and here they only lose `../` or `docs/`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE_DOCS = ("*.md", "LICENSE", "CITATION.cff", "configs/*.yaml")
EVERYDAY = {
    "address", "block", "copies", "counted", "direct", "history", "identity", "local", "owner", "peer", "piece",
    "private", "round", "run", "seed", "sequence", "split", "state", "stream", "sync", "token", "volunteer",
    "weight",
}  # fmt: skip
"""Words of the glossary that are also said in their usual sense, or in every sentence: they get no tooltip."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in BESIDE_DOCS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    beside = page.file.generated_by is not None
    linked = re.sub(r"\]\(docs/" if beside else r"\]\(\.\./", "](", markdown)
    return linked if page.file.src_uri == "glossary.md" else linked + tooltips()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps the first tooltip of each word on a page."""
    seen: set[str] = set()

    def first_only(found: re.Match[str]) -> str:
        meaning, word = found.groups()
        if meaning in seen:
            return word
        seen.add(meaning)
        return found[0]

    return re.sub(r'<abbr title="([^"]*)">([^<]*)</abbr>', first_only, html)


def tooltips() -> str:
    """Definitions for Python-Markdown's `abbr`, of the words in docs/glossary.md and their plurals."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    lines = []
    for words, meaning in rows:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", meaning)
        for word in set(words.split(", ")) - EVERYDAY - {"word", "---"}:
            lines += [f"*[{form}]: {plain}" for form in (word, f"{word}s")]
    return "\n\n" + "\n".join(lines) + "\n"
