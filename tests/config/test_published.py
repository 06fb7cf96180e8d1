"""The config of a run comes from a stranger: what it may say, how large it may be, and what reading it costs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
import yaml
from pydantic.fields import FieldInfo

import spes_p2p
from spes_p2p.config import load
from spes_p2p.config.load import bundled_config, load_config, published_config, published_yaml
from spes_p2p.config.schema import Config, fields_of_tree
from spes_p2p.config.sections import is_local, is_private
from spes_p2p.errors import ConfigError

TINY = load_config(bundled_config("tiny"))
PRIVATE = [key for key, field in fields_of_tree() if is_private(field)]
ADVICE = [(key, field) for key, field in fields_of_tree() if is_local(field) and not is_private(field)]
PLACES = "/etc/shells", "../shells", "~/.ssh/id_rsa", "file:///etc/shells", "http://127.0.0.1:8080/", "a\nb", "a b"


def having(key: str, value: Any) -> str:
    """What TINY's organiser publishes, with another value of one field."""
    tree = yaml.safe_load(published_yaml(TINY))
    section, name = key.split(".")
    tree[section] = {**tree.get(section, {}), name: value}
    return yaml.safe_dump(tree)


def read(text: str) -> Config:
    return published_config(text, "the run's config")


def leaves(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[type, tuple[Any, ...]]]:
    """The plain types in an annotation, each with what is said beside it; one of a few words is none of them."""
    if get_origin(annotation) is Literal:
        return
    inner = get_args(annotation)
    if not inner:
        yield annotation, metadata
        return
    if hasattr(annotation, "__metadata__"):
        inner, metadata = inner[:1], (*metadata, *annotation.__metadata__)
    for one in inner:
        if one is not Ellipsis:
            yield from leaves(one, metadata)


def said(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Of what stands beside a type: a Field holds further marks."""
    for mark in metadata:
        yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)


def test_what_an_honest_organiser_publishes_is_taken_and_has_nothing_private() -> None:
    config = load_config(bundled_config("tiny"), ["data.path=/home/me", "output.wandb=true", "data.copies=7"])
    taken = read(published_yaml(config))
    assert taken.data.copies == 7
    assert (taken.data.path, taken.output.wandb) == ("", False)


@pytest.mark.parametrize("key", PRIVATE)
@pytest.mark.parametrize("is_default", [True, False])
def test_every_private_field_is_refused_by_name(key: str, is_default: bool) -> None:
    section, name = key.split(".")
    value = TINY.model_dump(mode="json")[section][name] if is_default else "/etc/shells"
    with pytest.raises(ConfigError, match=f"the run's config sets {key}, which is for the owner") as error:
        read(having(key, value))
    assert "do not join this run" in error.value.fix


@pytest.mark.parametrize(("key", "field"), ADVICE)
def test_all_advice_is_bounded(key: str, field: FieldInfo) -> None:
    """A new field that peers may choose needs a bound, or is private."""
    for kind, metadata in leaves(field.annotation, tuple(field.metadata)):
        marks = list(said(metadata))
        if kind in (int, float):
            assert any(isinstance(mark, annotated_types.Le | annotated_types.Lt) for mark in marks), key
        elif kind is str:
            assert any(getattr(mark, "pattern", None) for mark in marks), key
        else:
            assert kind in (bool, type(None)), key


def test_no_text_of_a_run_can_be_a_place_on_a_machine() -> None:
    """Agreed or advice: whatever text it has follows a pattern, which fits no path and no URL."""
    texts = 0
    for key, field in fields_of_tree():
        if is_private(field):
            continue
        for kind, metadata in leaves(field.annotation, tuple(field.metadata)):
            if kind is not str:
                continue
            texts += 1
            assert any(getattr(mark, "pattern", None) for mark in said(metadata)), key
        if field.annotation is str:
            for place in PLACES:
                with pytest.raises(ConfigError, match=key):
                    read(having(key, place))
    assert texts >= 4
    for place in ("/etc/shells", "../shells", "a\nb", "```"):
        with pytest.raises(ConfigError, match=r"data\.datasets"):
            read(having("data.datasets", [[place, 1, "ab" * 32]]))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
"""A billion values in half a kilobyte."""


@pytest.mark.parametrize(
    "text", [BOMB, "run: &run {seed: 1}\nmodel: *run", "run: {seed: &s 1}", "<<: &x {a: 1}", "? &key a\n: 1"]
)
def test_anchors_and_aliases_are_refused_before_anything_is_made_of_them(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def construct(*_: Any) -> None:
        raise AssertionError("a value is made")

    monkeypatch.setattr(yaml.constructor.BaseConstructor, "construct_object", construct)
    with pytest.raises(ConfigError, match=r"not valid YAML: line 1: a config may not have the anchor or alias '"):
        read(text)


def test_thousands_of_mistakes_are_counted_and_three_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    explained, unknown = list[str](), load._unknown

    def explain(key: str) -> ConfigError:
        explained.append(key)
        return unknown(key)

    monkeypatch.setattr(load, "_unknown", explain)
    tree = yaml.safe_load(published_yaml(TINY))
    tree["model"] = {f"a{n}": 1 for n in range(4000)} | tree["model"]
    text = yaml.safe_dump(tree, sort_keys=False)
    with pytest.raises(ConfigError, match=r"unknown key model\.a0; .*; and 3997 more mistakes"):
        read(text)
    assert explained == ["model.a0", "model.a1", "model.a2"]


def test_nothing_that_comes_from_others_is_read_as_this_machines_own() -> None:
    """`published_config` is the only door: what reads a config as its own gets a file of this machine."""
    root = Path(spes_p2p.__file__).parent
    own = {"config/load.py", "peer/run_file.py", "train/worker.py"}
    """The files of this machine, the one that was written just now, and what this process tells its ranks."""
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "config_from_text"
    }
    assert users == own
