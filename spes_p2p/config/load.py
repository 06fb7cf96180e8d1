"""YAML text and dotted overrides to a checked Config, and back; every mistake becomes a ConfigError that says the fix.

What a joining peer may override, and the fingerprint, are in `fingerprint`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.config.sections import is_private
from spes_p2p.errors import ConfigError

MOST_CHARACTERS = 2**16
"""Of a config's text: the longest that comes with spes-p2p has a tenth of that."""
MOST_DEPTH = 8
"""Of lists and sections in it; a schedule has four."""
MOST_DIGITS = 64
"""Of a number."""
_NUMBERS = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MOST_MISTAKES_SHOWN = 3
_WANTED = {
    "bool_type": "to true or false",
    "int_type": "to a whole number",
    "float_type": "to a number",
    "finite_number": "to a finite number",
    "string_type": "to a text",
    "greater_than": "above {gt}",
    "greater_than_equal": "to at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "to at most {le}",
    "literal_error": "to one of {expected}",
}
"""What pydantic's kinds of errors ask for, and how it calls the limits."""


class Removed(NamedTuple):
    """A field that is gone. `default`: with this value, as YAML has it, it changed nothing. `fix`: what to do."""

    default: Any
    fix: str = ""

    def fix_of(self, key: str) -> str:
        return self.fix or f"remove the line {key.rpartition('.')[2]}; docs/tried.md says what became of it"


REMOVED: dict[str, Removed] = {
    "model.foreign_offload": Removed(False),
    "optimizer.gradient_dtype": Removed("fp32"),
    "optimizer.sharding": Removed("none"),
    "swarm.final_rounds": Removed(20),
    "sync.residual_decay": Removed(1.0),
    "sync.dense_rounds": Removed(0),
    "sync.fragments": Removed(1),
    "sync.overlap_steps": Removed(0),
    "sync.outer_steps": Removed(0),
    "model.own_layout": Removed("", "fork the model: docs/api.md says which files"),
    "model.guest_rank": Removed(0),
    "sync.guest_codec": Removed("bf16"),
    "sync.merge_kind": Removed("paper"),
    "sync.aggregate": Removed(
        "mean", "with swarm.trusted=vouched strangers count as far as they agree with trusted peers"
    ),
    "swarm.electors": Removed("all", "it is called swarm.trusted now"),
    "sync.trial_sequences": Removed(16),
    "sync.audited_share": Removed(0.08),
}
"""By dotted key, one row for each field that was taken out. Who takes a field out of the schema adds its row here.

A file or an override of this machine that names one is refused with one error that says so, whatever the value. A
run's published text (`published_config`: what checkpoints hold, too) may have it at its old default, since older
versions wrote every field down: it is left out, and such a checkpoint still exports. At any other value the run did
something that this program cannot do, so it is refused there as well. Where a whole section goes, each of its fields
has a row. A default that was taken from another field was a value, too: then the row's default is that of `configs/`.
"""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The run in the YAML file `path`, with dotted `overrides` such as `model.num_experts=8` on top.

    Raises ConfigError where the file is missing or is not a correct config.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"the config file {path} does not exist", fix="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}", fix="give a YAML text file") from error
    return config_from_text(text, overrides, origin=str(path))


def config_from_text(text: str, overrides: Sequence[str] = (), origin: str = "the config") -> Config:
    """As `load_config`, from YAML text of this machine; `origin` names it in errors."""
    tree = _parse(text, origin)
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} has no sections", fix="begin it with `run:`, `model:`, ...")
    _set(tree, overrides)
    return config_from_tree(tree)


def published_config(text: str, origin: str) -> Config:
    """The config in the text that a run's organiser published: the only door for text from the network.

    It comes from a peer, or from a checkpoint that was made in that run. Agreed fields are the run's: `check_run` holds
    them against its fingerprint. What peers may choose is advice, which `sections` bounds: it names no file, address or
    program. Private fields are refused by name: what they say comes from this machine alone, by its command line, its
    own file and the defaults. Raises ConfigError.
    """
    tree = _parse(text, origin)
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} has no sections", fix="ask the organiser for the run's config")
    for key, removed in REMOVED.items():
        _leave_out(tree, key, removed, origin)
    for key, field in fields_of_tree():
        section, name = key.split(".")
        if is_private(field) and isinstance(tree.get(section), dict) and name in tree[section]:
            raise ConfigError(
                f"{origin} sets {key}, which is for the owner of each machine alone to say",
                fix="do not join this run: an honest organiser's spes-p2p never publishes that",
            )
    return config_from_tree(tree)


def _leave_out(tree: dict[Any, Any], key: str, removed: Removed, origin: str) -> None:
    """A field that is gone, if it is there at its old default. Raises ConfigError for another value."""
    section, name = key.split(".")
    fields = tree.get(section)
    if not isinstance(fields, dict) or name not in fields:
        return
    if (value := fields.pop(name)) != removed.default:
        raise ConfigError(
            f"{origin} has {key}={_brief(value)}, which this version of spes-p2p cannot do any more",
            fix="use the version that the run was made with; docs/tried.md says which one had this last",
        )
    if not fields:
        del tree[section]


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Checks a tree of plain values against the schema."""
    try:
        return Config.model_validate(_tuples(dict(tree)))
    except ValidationError as error:
        raise _explained(error.errors(), tree) from error


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """The config with dotted `overrides` on top. Raises ConfigError."""
    tree = config.model_dump()
    _set(tree, overrides)
    return config_from_tree(tree)


def check_alone(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a dotted override whose value is wrong in every config."""
    tree: dict[str, Any] = {}
    _set(tree, overrides)
    try:
        Config.model_validate(_tuples(tree))
    except ValidationError as error:
        wrong = [details for details in error.errors() if details["type"] != "missing" or len(details["loc"]) > 2]
        if wrong:
            raise _explained(wrong, tree) from error


def config_to_yaml(config: Config) -> str:
    """All fields, defaults too; `config_from_text` gives the same Config back."""
    return _dump(config.model_dump(mode="json"))


def published_yaml(config: Config, for_people: bool = False) -> str:
    """The config as an organiser publishes it: without what concerns only the organiser's own machine.

    `for_people`: a line for each key; else the text that a run's fingerprint covers.
    """
    tree = config.model_dump(mode="json")
    for key, field in fields_of_tree():
        if is_private(field):
            section, name = key.split(".")
            del tree[section][name]
    return _dump({name: section for name, section in tree.items() if section}, is_flow=False if for_people else None)


def extends(text: str, older: str) -> bool:
    """Whether a published config says all that an older one says, and at most has keys besides that are new."""
    new, old = _parse(text, "the config"), _parse(older, "the older config")
    return all({**new.get(name, {}), **section} == new.get(name) for name, section in old.items())


def bundled_config(name: str) -> Path:
    """Path of a config that comes with spes-p2p (`tiny`, `small`, ...), in a clone or in an installation."""
    for folder in _bundled_folders():
        if (path := folder / f"{name}.yaml").is_file():
            return path
    near = difflib.get_close_matches(name, bundled_names(), n=1)
    fix = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(bundled_names())}"
    raise ConfigError(f"spes-p2p has no bundled config named {name}", fix=fix)


def bundled_names() -> list[str]:
    """The names that `bundled_config` knows, sorted."""
    return sorted({path.stem for folder in _bundled_folders() for path in folder.glob("*.yaml")})


def _bundled_folders() -> list[Path]:
    roots = [Path(__file__).parents[2] / "configs", Path(sys.prefix) / "share/spes-p2p/configs"]
    return [folder for root in roots for folder in (root, root / "baselines")]


def parse_override(override: str) -> tuple[str, Any]:
    """`model.num_experts=8` to ("model.num_experts", 8); the value is YAML, a text also as it stands.

    The key must exist.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"override {override!r} has no value", fix="write it as section.name=value")
    if not key:
        raise ConfigError(f"override {override!r} has no name", fix="write it as section.name=value")
    known = dict(fields_of_tree())
    if key not in known:
        raise _unknown(key)
    if known[key].annotation is str and text.strip()[:1] not in ("'", '"'):
        return key, text.strip()  # a folder may be called 2024, [old] or My data #1
    return key, _parse(text, f"the value of {key}")


def _set(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    for key, value in map(parse_override, overrides):
        section, name = key.split(".")
        if isinstance(tree.get(section) or {}, dict):  # else a wrong section: the schema check says it
            tree[section] = {**(tree.get(section) or {}), name: value}


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-4 as a number, and refuses what takes more time or memory than its text has.

    That is: anchors and aliases, by which a few lines stand for gigabytes; deep nesting; numbers of many digits; and
    keys that appear twice. Tags and dates, which no field has, are what they are written as: refused, and a text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # before what it begins is read
        if event.anchor is not None:
            raise _refused(f"the anchor or alias {event.anchor[:80]!r}; write the value in each place", event)
        if getattr(event, "tag", None) is not None:
            raise _refused(f"the tag {event.tag[:80]!r}", event)
        if self._depth > MOST_DEPTH:
            raise _refused(f"lists and sections more than {MOST_DEPTH} deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, count in counts.items() if count > 1), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise ConfigError(f"key {twice} appears twice in the section at line {line}", fix="remove one of them")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
            raise _refused(f"a number of {len(node.value)} digits, over {MOST_DIGITS}", node)
        return super().construct_scalar(node)


def _refused(what: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, f"a config may not have {what}", at.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, origin: str) -> Any:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{origin} has {len(text)} characters, over {MOST_CHARACTERS}",
            fix="leave out comments, or values by default",
        )
    try:
        return deepcopy(_read(text))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{origin} is not valid YAML: {_place_and_problem(error)}", fix="correct that line"
        ) from error
    except ValueError as error:  # 0x_
        raise ConfigError(f"{origin} has a value that cannot be read: {error}", fix="correct that value") from error


def _place_and_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


@lru_cache(maxsize=64)
def _read(text: str) -> Any:
    """Parses YAML with a cache, since the same few texts are read again and again, at some 10 ms each."""
    return yaml.load(text, Loader=_Loader)


def _dump(tree: dict[str, Any], is_flow: bool | None = None) -> str:
    """`is_flow` None: what holds no lists or sections stands on one line."""
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=is_flow, allow_unicode=True)


def _unknown(key: str) -> ConfigError:
    """Names the nearest known key: in the same section, else in another; by its name, else by its description."""
    if key in REMOVED:
        return ConfigError(f"{key} is gone: this version of spes-p2p does not have it", fix=REMOVED[key].fix_of(key))
    leaves = [name for name, _ in fields_of_tree()]
    section, _, name = key.rpartition(".")
    siblings = [leaf for leaf in leaves if leaf.startswith(f"{section}.")] if section else list(Config.model_fields)
    if key in Config.model_fields:  # a section, which is nearest to itself
        fields = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        return ConfigError(f"unknown key {key}", fix=f"known: {', '.join(fields)}")
    near = _named_like(name, siblings) or _described(name, siblings) or _named_like(name, leaves)
    near = near or _described(name, leaves) or (None if siblings else _named_like(key, leaves, is_whole=True))
    known = siblings or list(Config.model_fields)
    return ConfigError(f"unknown key {key}", fix=f"did you mean {near}?" if near else f"known: {', '.join(known)}")


def _named_like(name: str, keys: Sequence[str], is_whole: bool = False) -> str | None:
    """Without the section (not `is_whole`), which would make every field in it look alike."""
    by_name = {key if is_whole else key.rpartition(".")[2]: key for key in keys}
    near = difflib.get_close_matches(name, by_name, n=1)
    return by_name[near[0]] if near else None


def _described(name: str, keys: Sequence[str]) -> str | None:
    """The key whose description has these words (learning_rate), and says least besides."""
    texts = {key: field.description or "" for key, field in fields_of_tree() if key in keys}
    words = re.compile(rf"\b{re.escape(name.replace('_', ' '))}\b")
    found = [key for key, text in texts.items() if len(name) > 3 and words.search(text)]
    return min(found, key=lambda key: len(texts[key]), default=None)


def _explained(found: Sequence[Any], tree: Mapping[str, Any]) -> ConfigError:
    """One sentence for each wrong key, unknown ones first."""
    by_key: dict[str, list[Any]] = {}
    for details in sorted(found, key=lambda details: details["type"] != "extra_forbidden"):
        by_key.setdefault(".".join(map(str, details["loc"][:2])), []).append(details)
    shown: list[ConfigError] = []
    more = 0
    for key, errors in by_key.items():
        is_meant = any(mistake.fix == f"did you mean {key}?" for mistake in shown)  # written, but misspelt
        if is_meant or _is_filled_in(key, errors, tree):
            continue
        if len(shown) < _MOST_MISTAKES_SHOWN:
            shown.append(_mistake(key, errors, tree))
        else:
            more += 1  # to say what is wrong takes a while, and a stranger may have made thousands
    message = "; ".join(map(str, shown))
    if more:
        message += f"; and {more} more mistakes"
    return ConfigError(message, fix=_joined([mistake.fix for mistake in shown]))


def _joined(fixes: list[str]) -> str:
    """In one line; what follows a question begins a sentence."""
    text = fixes[0]
    for fix in fixes[1:]:
        text += f" {fix[0].upper()}{fix[1:]}" if text.endswith("?") else f"; {fix}"
    return text


def _is_filled_in(key: str, errors: list[Any], tree: Mapping[str, Any]) -> bool:
    """Whether nobody wrote that value: it is, or would be, taken from another key, whose mistake it is.

    Where it is missing, pydantic does not say why; a field that is taken from another one says so in its description.
    """
    section, _, name = key.partition(".")
    keys = tree.get(section)
    if not name or not isinstance(keys, Mapping) or name in keys:
        return False
    return errors[0]["type"] != "missing" or "(default: " in str(dict(fields_of_tree())[key].description)


def _mistake(key: str, errors: list[Any], tree: Mapping[str, Any]) -> ConfigError:
    kind, section = errors[0]["type"], key.partition(".")[0]
    if kind == "extra_forbidden":
        return _unknown(key)
    if kind == "missing" and len(errors[0]["loc"]) <= 2:
        return ConfigError(f"{key} is missing", fix=f"add {key} to the config")
    if key == section:
        return ConfigError(f"{key} is {_brief(tree[key])}, not a section", fix=f"put the keys of {key} under it")
    value = tree[section][key.partition(".")[2]]
    if value is None:
        return ConfigError(f"{key} has no value", fix=f"give {key} a value, or leave it out")
    return ConfigError(f"{key} is {_brief(value)}, not an allowed value", fix=_as_allowed(key, errors, value))


def _as_allowed(key: str, errors: list[Any], value: Any) -> str:
    """What to set a key to. Of a list, one of several types, or a pattern: what the field means."""
    kind, place, limits = errors[0]["type"], errors[0]["loc"], errors[0].get("ctx", {})
    if len(errors) == 1 and len(place) == 2 and kind in _WANTED:
        return f"set {key} {_WANTED[kind].format_map({name: _plain(limit) for name, limit in limits.items()})}"
    is_text = kind == "string_pattern_mismatch" and isinstance(value, str)  # else it is a text in a list
    odd = next(filter(_is_odd, value), "") if is_text else ""
    return f"change {key}{odd and f', without {odd!r}'}: {str(dict(fields_of_tree())[key].description).rstrip('.')}"


def _plain(limit: Any) -> str:
    """`'auto', True or False` to `auto, true, false`, as people write them; 0.0 to 0."""
    return (
        limit.replace("'", "").replace(" or ", ", ").lower()
        if isinstance(limit, str)
        else f"{limit}".removesuffix(".0")
    )


def _is_odd(character: str) -> bool:
    """Whether nothing that a pattern asks for has it: names and hexadecimal numbers."""
    return not (character.isascii() and (character.isalnum() or character in "._-"))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__} of {len(text)} characters"


def _tuples(value: Any) -> Any:
    """The schema has tuples (frozen configs can be compared and hashed) where YAML has lists."""
    if isinstance(value, dict):
        return {str(key): _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
