"""The pages that people read: links and named files exist, commands, fields and events are those of the program."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from spes_p2p.cli.main import COMMANDS, GROUPS, build
from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.consensus.messages import Intent, Status, Work
from spes_p2p.observe.events import KINDS
from spes_p2p.swarm.records import PeerRecord
from spes_p2p.swarm.vitals import Vitals

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WALKS = [("A batch, from the shards to the weights", 12, 13), ("A round, from the last step to the weights", 25, 25)]
"""Headings of docs/architecture.md; at most so many stops and files."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WHERE_CODE_LIES = (ROOT, ROOT / "spes_p2p", ROOT / "tests")

every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)
OF_TODAY = [page for page in PAGES if page.name not in ("CHANGELOG.md", "tried.md")]
"""Pages about the program as it is; the others also name what has gone."""
every_page_of_today = pytest.mark.parametrize("page", OF_TODAY, ids=[str(page.relative_to(ROOT)) for page in OF_TODAY])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_words(page: Path) -> set[str]:
    """What stands between backticks, on one line."""
    return set(re.findall(r"`([^`\n]+)`", text_of(page)))


def section_of(heading: str) -> str:
    """What stands under a heading of docs/architecture.md."""
    return text_of(ROOT / "docs/architecture.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def command_lines(page: Path) -> Iterator[str]:
    """Lines of code that call the program."""
    for line in text_of(page).splitlines():
        if match := re.match(r"(?: {4}|\$ )?(?:\.venv/bin/)?(spes-p2p .+)", line):
            yield match[1]
    yield from (word for word in code_words(page) if word.startswith("spes-p2p "))


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


@every_page_of_today
def test_named_files_exist(page: Path) -> None:
    for word in code_words(page):
        if re.fullmatch(r"[\w.-]+(/[\w.*-]+)*\.(py|sh|yaml|toml|md)|(configs|scripts|bootstrap|tests)/[\w./-]*", word):
            assert any(list(folder.glob(word.rstrip("/"))) for folder in WHERE_CODE_LIES), f"{word} is not there"


@every_page_of_today
def test_commands_and_flags_are_those_of_the_program(page: Path) -> None:
    program = typer.main.get_command(build(COMMANDS))
    commands = program.commands  # type: ignore[attr-defined]
    for line in command_lines(page):
        words = line.partition(" -- ")[0].split()  # behind it stands what another command takes
        if words[1].startswith("-") or words[1] in ("...", "COMMAND"):
            continue
        assert words[1] in commands, line
        command = commands[words[1]]
        if words[1] in GROUPS:
            assert len(words) == 2 or words[2] in command.commands, line
            command = command.commands[words[2]] if len(words) > 2 else command
        known = {option for parameter in command.params for option in parameter.opts}
        known |= {option for parameter in command.params for option in parameter.secondary_opts}
        unknown = {word.partition("=")[0] for word in words[2:] if word.startswith("--")} - known - {"--help"}
        assert not unknown, f"{line}: {unknown}"


@every_page_of_today
def test_config_fields_exist(page: Path) -> None:
    known = {key for key, _ in fields_of_tree()} | {"output.log"}  # a file
    sections = "|".join(Config.model_fields)
    for word in code_words(page):
        if match := re.fullmatch(rf"((?:{sections})\.[a-z_]+)(=.*)?", word):
            assert match[1] in known, f"{word} is no field"


@pytest.mark.parametrize(("heading", "most_stops", "most_files"), WALKS)
def test_a_walk_is_short_and_its_stops_exist(heading: str, most_stops: int, most_files: int) -> None:
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", section_of(heading), re.M)
    stops = [re.fullmatch(r"`([\w.]+)` in `([\w/]+\.py)`", stop) for row in rows for stop in row.split(", ")]
    assert stops
    assert all(stops), rows
    files = {found[2] for found in stops if found}
    assert len(rows) <= most_stops
    assert len(files) <= most_files
    for found in filter(None, stops):
        tree = ast.parse(text_of(ROOT / "spes_p2p" / found[2]))
        assert found[1] in set(_definitions(tree)), found[0]


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, FUNCTIONS))
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            yield node.name


def test_the_readme_names_every_command() -> None:
    names = [*(name for name in COMMANDS if name != "quickstart"), *(f"{g} {n}" for g in GROUPS for n in GROUPS[g][1])]
    assert [name for name in names if f"spes-p2p {name}" not in text_of(ROOT / "README.md")] == []
    assert "scripts/quickstart.sh" in text_of(ROOT / "README.md")


def test_the_configuration_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_config_docs.py"))
    assert script["render"]() == text_of(script["PAGE"]), "run: python scripts/make_config_docs.py"


def test_the_table_of_the_benchmark_is_as_measured() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_frontier.py"))
    assert script["page"](script["read"]()) == text_of(script["PAGE"]), "run: python scripts/make_frontier.py"


def test_every_field_of_every_event_is_explained() -> None:
    explained: dict[str, list[str]] = {}
    for row in re.findall(r"^\| (?:`(\w+)`)? ?\| ((?:`\w+`(?:, )?)+) \|", text_of(ROOT / "docs/metrics.md"), re.M):
        kind = row[0] or list(explained)[-1]
        explained.setdefault(kind, []).extend(re.findall(r"`(\w+)`", row[1]))
    fields = {kind: [field.name for field in dataclasses.fields(event)] for kind, event in KINDS.items()}
    assert {kind: sorted(names) for kind, names in explained.items()} == {k: sorted(v) for k, v in fields.items()}


def test_the_layers_are_those_that_are_checked() -> None:
    linter = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["importlinter"]
    checked = [sorted(re.findall(r"\w+", layer)) for layer in linter["contracts"][0]["layers"]]
    told: dict[str, list[str]] = {}
    for number, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", section_of("Layers"), re.M):
        told.setdefault(number, []).extend(re.findall(r"\w+", names))
    assert [sorted(names) for names in told.values()] == checked


def test_every_promise_has_a_test_that_runs_by_default() -> None:
    """And those whole files that only `--thorough` runs are marked as such."""
    promises = text_of(ROOT / "docs" / "reliability.md").partition("### Which test holds which promise")[2]
    rows = [row for row in promises.partition("\n## ")[0].splitlines() if "`tests/" in row]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`(†?)", row)
        thorough = [re.search(r"^pytestmark = [^\]]*thorough", text_of(ROOT / path), re.MULTILINE) for path, _ in named]
        assert [bool(mark) for _, mark in named] == [bool(found) for found in thorough], row
        assert not all(thorough), f"only --thorough holds the promise: {row}"


def test_every_error_and_warning_is_in_the_documentation() -> None:
    """Errors that have a fix."""
    script = runpy.run_path(str(ROOT / "scripts" / "make_error_docs.py"))
    pages = script["render"]()
    for page, text in pages.items():
        assert text == text_of(page), "run: python scripts/make_error_docs.py"
    rows = re.findall(r"^\| E\d+ \| (.+) \| (.*) \|$", pages[script["PAGE"]], re.M)
    assert len(rows) > 150
    assert all(fix for _, fix in rows)


def _said() -> str:
    """All that the program may say: its strings, with {} where something is filled in; docstrings are not said."""
    found: list[str] = []
    for source in sorted((ROOT / "spes_p2p").rglob("*.py")):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                )
    return "\n".join(found)


def test_frequent_errors_and_warnings_are_those_that_the_program_says() -> None:
    """Most of each quoted message, three words at a time: the rest may be filled in."""
    said, page = _said(), text_of(ROOT / "docs" / "troubleshooting.md")
    quoted = re.findall(r"^\| (?:\(.+?\) )?(`.+?) \|", page, re.M)
    messages = [message for cell in quoted for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 50
    for message in messages:
        runs = [run.split() for run in re.split(r"\.\.\.|\b[A-Z]+\b|\b\d+\b|[:;,()/]", message)]
        threes = [" ".join(run[at : at + 3]) for run in runs for at in range(max(1, len(run) - 2)) if len(run) > 1]
        assert 2 * sum(three in said for three in threes) >= len(threes), message


TOLD: dict[type, dict[str, str]] = {
    PeerRecord: {
        "its peer id": "peer",
        "your addresses": "addresses",
        "the version of the program": "version",
        "which rounds": "round",
        "steps": "step",
        "tokens": "tokens",
        "speed": "tokens_per_second",
        "its expert columns": "owned",
        "whether others can dial them": "client_mode",
        "since when it takes part": "joined_at_seconds",
        "the time on its clock": "written_at_seconds",
        "which pieces of the run's data": "data_pieces held",
        "how it fares": "vitals",
    },
    Vitals: {
        "what it does right now": "phase",
        "the name of your GPU": "device",
        "losses": "loss round_loss held_out_loss",
        "which rounds": "timed_round held_out_round",
        "the time on its clock": "applied_at_seconds",
        "seconds of each phase": "phase_seconds",
        "bytes": "bytes_sent bytes_received",
        "spreads tokens": "load_percent highest_load_percent lowest_load_percent",
        "warnings and errors": "warnings",
    },
    Status: {
        "its peer id": "peer",
        "which rounds": "round counted roll",
        "values it has": "head reports staged lacks",
        "how it fares": "work",
        "what it has": "intent",
        "what it votes": "ballots",
        "part in the agreement": "plan proposal",
        "whom it cannot hear": "unheard silent",
        "bytes": "moved",
    },
    Work: {
        "what it does right now": "ready ready_in_seconds",
        "tokens": "tokens sequences",
        "steps": "steps",
        "seconds of each": "seconds",
        "speed": "expected_tokens",
    },
    Intent: {
        "takes part": "joining serving",
        "wants to leave": "leaving",
        "has room for": "max_columns",
        "which it wants": "claims",
        "gives up": "releases",
        "whether others can dial": "link_class",
        "how fast its link sends": "uplink_bytes_per_second",
        "what it votes": "can_vote",
    },
}
"""What a peer tells everybody: words of the page for volunteers, and the fields of the records that they stand for."""
OF_THE_PROTOCOL = {"run_id", "role", "token", "fingerprint", "incarnation", "sequence", "life"}
"""Names, numbers and signatures that say nothing of a person or a machine."""


def test_volunteers_read_all_that_their_peer_tells_everybody() -> None:
    page = text_of(ROOT / "docs" / "quickstart-volunteer.md").partition("### What others see")[2].partition("\n### ")[0]
    words = " ".join(page.split())
    for record, told in TOLD.items():
        fields = {field.name for field in dataclasses.fields(record)} - OF_THE_PROTOCOL
        known = {name for names in told.values() for name in names.split()}
        assert fields == known, f"{record.__name__}: what is new or gone belongs on the page, and here"
        assert [phrase for phrase in told if phrase not in words] == []
