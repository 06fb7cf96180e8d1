"""`start_run`: a new run from a few answers: a commented config that was checked, and the organiser's key."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.config.load import bundled_config, changed, config_from_text, load_config
from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.data.loader import check_enough
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.web_url import checked_urls
from spes_p2p.errors import ConfigError
from spes_p2p.files import NODE_FOLDER, check_is_new, in_folder, make_folder, write_new
from spes_p2p.ids import PeerId
from spes_p2p.interop.hf import state_layout, vocabulary_tiles
from spes_p2p.peer.folder import CHAIN, RUN
from spes_p2p.peer.herald import expected_coverage, router_warning
from spes_p2p.peer.web_data import open_on_web
from spes_p2p.planning.report import Question, answer
from spes_p2p.planning.traffic import Link
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile
from spes_p2p.sync.node import check_sizes

DECIDED = ("scheduler.name", "sync.codec", "swarm.trusted", "swarm.faults")
"""What nobody can change once a run has begun, and many an organiser wants to know of."""
FOR_STRANGERS = ("swarm.trusted=vouched",)
"""What keeps a run going right whoever of the strangers lies (docs/security.md)."""


@dataclass(frozen=True)
class NewRun:
    """What an organiser answered. `template`: a bundled config; `data`: folder of token shards; `data_urls`: where the
    same lies on the web; neither: peers' own.

    `gpu_bytes`: of what volunteers have; `up`, `down`: bytes a second of their links. None: not said.
    """

    name: str
    template: str
    data: str
    peers: int
    experts_per_peer: int
    steps_per_round: int | None = None
    gpu_bytes: int | None = None
    up: float | None = None
    down: float | None = None
    overrides: tuple[str, ...] = ()
    data_urls: tuple[str, ...] = ()
    tokens_per_second: float | None = None
    """Of the volunteers' GPUs."""
    strangers: bool = False
    """Anybody may train, and some may lie."""


@dataclass(frozen=True)
class StartedRun:
    """The file, the organiser's peer id, and what there is to say of the plan."""

    path: Path
    organiser: PeerId
    words: tuple[str, ...]


def start_run(run: NewRun, path: Path, node: Path) -> StartedRun:
    """Writes `path`, and makes the key of the bootstrap node in the folder `node`.

    Raises ConfigError where the answers do not go together, `path` is there, or another run is in `node`; DataError,
    IdentityInUse.
    """
    check_is_new(path)
    if any((node / RUN / CHAIN).glob("*.commit")):
        raise ConfigError(
            f"another run has begun in the folder {node}", fix="give this one a folder of its own with --output DIR"
        )
    template = bundled_config(run.template)
    defences = FOR_STRANGERS if run.strangers else ()
    given = [*_overrides(run), *defences, *run.overrides]
    words = list[str]()
    if run.data or run.data_urls:
        found, tokens = _look_at_data(run, template, words.append)
        config = load_config(template, [*found, *given])
        check_enough(tokens, config)
    else:
        config = load_config(template, ["data.source=local", *given])
    if "sync.vocabulary_rounds" not in _keys_of(run.overrides) and not vocabulary_tiles(state_layout(config)):
        config = changed(config, ("sync.vocabulary_rounds=1",))  # few tokens: no tile is theirs alone
    check_sizes(config, state_layout(config))
    heading = f"Made by `spes-p2p run init` from the template {run.template}; docs/configuration.md lists all fields."
    make_folder(node)
    identity = IdentityFile(node / "identity.key")
    identity.release()
    asked = ("run.run_id", "swarm.min_peers", "swarm.experts_per_peer")
    keys = (*chosen_keys(template), *DECIDED, *asked, *_keys_of(defences))
    write_new(path, commented_yaml(config, keys, heading).encode())
    return StartedRun(path, identity.signer.peer_id, (*words, *_words(run, config, node)))


def _keys_of(overrides: Iterable[str]) -> set[str]:
    """What they set."""
    return {override.partition("=")[0].strip() for override in overrides}


def _overrides(run: NewRun) -> list[str]:
    found = [
        f"run.run_id={run.name}",
        f"swarm.min_peers={run.peers}",
        f"swarm.experts_per_peer={run.experts_per_peer}",
    ]
    if run.steps_per_round is not None:
        found.append(f"sync.steps_per_round={run.steps_per_round}")
    return found


def _look_at_data(run: NewRun, template: Path, say: Callable[[str], None]) -> tuple[list[str], int]:
    """What the config says of the data, and how many tokens it has."""
    urls = checked_urls(run.data_urls)
    if run.data:
        known = load_config(template)
        dataset = Dataset.open(run.data, known.data.raw_dtype, known.model.vocab_size)
        overrides, urls = [f"data.path={run.data}"], urls or checked_urls(dataset.urls)
        ids, tokens = dataset.vocab_size, dataset.tokens
    else:
        found = asyncio.run(open_on_web(urls, say))
        overrides, ids, tokens = [], found.manifest.vocab_size, found.grid.tokens
    if urls:
        overrides.append(f"data.urls={json.dumps(urls)}")
    if ids is not None:
        overrides.append(f"model.vocab_size={ids}")
    return overrides, tokens


def _question(run: NewRun, config: Config) -> Question:
    return Question(
        config, config.swarm.experts_per_peer, run.peers, memory_bytes=run.gpu_bytes, link=Link(run.up, run.down),
        tokens_per_second=run.tokens_per_second,
    )  # fmt: skip


def _words(run: NewRun, config: Config, node: Path) -> list[str]:
    """What the plan says of the volunteers' machines."""
    question = _question(run, config)
    found = answer(question)
    warnings = [expected_coverage(config) or "", router_warning(config) or ""]
    words = [*warnings, found.sentence(), found.too_slow(), found.trusted()]
    cost = found.costs[0]
    if cost.seconds is not None:
        words.append(f"a sync of {run.peers} such peers takes {cost.seconds:.0f} s with codec {cost.codec}")
    if run.gpu_bytes is None:
        words.append("not checked whether the run fits into the volunteers' GPUs: give --gpu-memory 24GiB, say")
    if cost.seconds is None:
        words.append("not checked how long a sync takes: give --uplink 20Mbit --downlink 100Mbit, say")
    return [word for word in (*words, _words_of_rate(config), *_words_of_strangers(config, node)) if word]


def _words_of_rate(config: Config) -> str:
    """How the learning rate goes, which nobody can change later."""
    schedule, lowest = config.scheduler, config.scheduler.min_ratio * config.optimizer.lr
    if schedule.name == "cosine":
        return (
            f"the learning rate comes to its lowest ({lowest:.1e}) at step {schedule.total_steps:,}, which is "
            "scheduler.total_steps; to let it fall when you say so (spes-p2p run decay), set scheduler.name=wsd"
        )
    return (
        f"the learning rate stays until step {schedule.total_steps - schedule.decay_steps:,} and comes to its lowest "
        f"({lowest:.1e}) at step {schedule.total_steps:,}, or earlier with: spes-p2p run decay"
    )


def _words_of_strangers(config: Config, node: Path) -> list[str]:
    """What an organiser has to do where peers may lie."""
    if config.swarm.trusted != "vouched":
        return []
    commands = [in_folder(f"spes-p2p {words} PEER", node, NODE_FOLDER) for words in ("invite --for", "run vouch")]
    return [
        f"everybody is a stranger until you vouch for it ({', '.join(commands)}); trusted peers alone vote, lead and "
        "reduce, and four of them tell well which strangers agree with them"
    ]


WIDTH = 118


def chosen_keys(path: Path) -> tuple[str, ...]:
    """Dotted keys that a config file sets."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(f"{section}.{name}" for section, fields in tree.items() for name in fields or {})


def commented_yaml(config: Config, keys: Collection[str], heading: str) -> str:
    """YAML with these fields of `config`, and those that differ from their defaults; the same config when it is read.

    `heading`: a sentence for the top.
    """
    lines, section = _comment(heading, ""), ""
    values = config.model_dump(mode="json")
    for key, field in fields_of_tree():
        part, name = key.split(".")
        value = values[part][name]
        if key not in keys and not field.is_required() and value == _plain(field.default):
            continue
        if part != section:
            section = part
            lines += ["", f"{part}:"]
        lines += _comment(field.description or "", "  ")
        lines.append(f"  {name}: {_inline(value)}")
    text = "\n".join(lines) + "\n"
    assert config_from_text(text) == config
    return text


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _plain(value: Any) -> Any:
    """Tuples as they are dumped."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
