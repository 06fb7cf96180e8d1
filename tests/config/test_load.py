"""Reading configs: overrides, unknown keys, and every wrong value answered with the value and the fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spes_p2p.config.load import (
    REMOVED,
    Removed,
    bundled_config,
    config_from_text,
    config_to_yaml,
    load_config,
    parse_override,
    published_config,
    published_yaml,
)
from spes_p2p.config.schema import Config, fields_of_tree, steps_per_round_at
from spes_p2p.config.sections import MOST_PEERS
from spes_p2p.consensus.membership import MAX_MEMBERS
from spes_p2p.errors import ConfigError

TINY = bundled_config("tiny")


def tiny(*overrides: str) -> Config:
    return load_config(TINY, overrides)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("model.num_expert=8", "unknown key model.num_expert", "did you mean model.num_experts?"),
        ("num_experts=8", "unknown key num_experts", "did you mean model.num_experts?"),
        ("optimizer.codec=int8", "unknown key optimizer.codec", "did you mean sync.codec?"),
        ("optimizer.learning_rate=1e-3", "unknown key optimizer.learning_rate", "did you mean optimizer.lr?"),
        ("model.learning_rate=1e-3", "unknown key model.learning_rate", "did you mean optimizer.lr?"),
        ("learning_rate=1e-3", "unknown key learning_rate", "did you mean optimizer.lr?"),
        ("=1", "override '=1' has no name", "section.name=value"),
        ("modle.d_model=8", "unknown key modle.d_model", "did you mean model.d_model?"),
        ("zzz=8", "unknown key zzz", "run, model, data"),
        ("model.num_experts", "has no value", "section.name=value"),
        ("model.num_experts='8'", "model.num_experts is '8'", "set model.num_experts to a whole number"),
        ("model.num_experts=true", "model.num_experts is True", "a whole number"),
        ("model.qk_norm=some", "model.qk_norm is 'some'", "set model.qk_norm to one of none, full, head"),
        ("model.torch_compile=yes please", "model.torch_compile is 'yes please'", "to one of auto, true, false"),
        ("output.tensorboard=maybe", "output.tensorboard is 'maybe'", "set output.tensorboard to true or false"),
        ("optimizer.lr=-1", "optimizer.lr is -1", "set optimizer.lr above 0"),
        ("optimizer.lr=.inf", "optimizer.lr is inf", "to a finite number"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas has 1.0", "below 1"),
        ("run.run_id=a/b", "run.run_id is 'a/b'", "change run.run_id, without '/': "),
        (
            "run.run_id=my run",
            "run.run_id is 'my run'",
            "without ' ': Name of the run, in the DHT and in folders: at most 64 ",
        ),
        ("run.run_id=.run", "run.run_id is '.run'", "change run.run_id: Name of the run"),
        ("run.seed=9223372036854775808", "run.seed is 9223372036854775808", "set run.seed below 9223372036854775808"),
        ("sync.codec=int3", "sync.codec is 'int3'", "to one of fp32, bf16, int8, int4, ternary"),
        ("sync.merge_alpha=1.5", "sync.merge_alpha is 1.5", "set sync.merge_alpha to at most 1"),
        ("sync.merge_top_k=0", "sync.merge_top_k is 0", "set sync.merge_top_k to at least 1"),
        ("model.d_model=130", "model.d_model is 130, not divisible by model.num_heads (4)", "model.head_dim"),
        ("model.num_kv_heads=3", "not divisible by model.num_kv_heads (3)", "divisor"),
        ("model.head_dim=31", "model.head_dim is 31", "even"),
        ("model.top_k=9", "model.top_k is 9, more than model.num_experts (8)", "at most 8"),
        ("model.embedding_rows=256", "model.embedding_rows is 256, fewer than model.vocab_size (257)", "vocab_size"),
        ("optimizer.micro_batch_sequences=3", "not divisible by optimizer.micro_batch_sequences (3)", "divisor of 8"),
        ("model.document_end=257", "model.vocab_size is 257: no token has this id", "eos_id"),
        ("model.document_end=-1", "model.document_end is -1", "at least 0"),
        ("data.sequence_length=1", "data.sequence_length is 1", "set data.sequence_length to at least 2"),
        ("scheduler.warmup_steps=1000", "not below scheduler.total_steps (1000)", "shorten"),
        (f"scheduler.total_steps={10**29}", f"scheduler.total_steps is {10**29}", "to at most 1000000000000"),
        ("optimizer.batch_sequences=9999999", "optimizer.batch_sequences is 9999999", "to at most 1048576"),
        ("data.block_sequences=9999999", "data.block_sequences is 9999999", "to at most 1048576"),
        ("data.sequence_length=99999999", "data.sequence_length is 99999999", "to at most 16777216"),
        (f"model.num_layers={10**23}", f"model.num_layers is {10**23}", "set model.num_layers to at most 1024"),
        (f"model.vocab_size={10**23}", "model.vocab_size is 1e+23", "set model.vocab_size to at most 1e+12"),
        ("optimizer.lr=1e30", "optimizer.lr is 1e+30", "set optimizer.lr to at most 1e+12"),
        ("optimizer.eps=1e-300", "optimizer.eps is 1e-300", "set optimizer.eps to at least 1e-30"),
        ("swarm.min_peers=1025", "swarm.min_peers is 1025", "set swarm.min_peers to at most 1024"),
        ("sync.steps_per_round=1000001", "sync.steps_per_round is 1000001", "to at most 1000000"),
        ("sync.steps_per_round=[[9, 9], [0, 1000001]]", "sync.steps_per_round is 1000001", "to at most 1000000"),
        ("scheduler.name=linear", "scheduler.name is 'linear'", "set scheduler.name to one of cosine, wsd"),
        ("model.num_experts=100000", "model.num_experts is 100000", "set model.num_experts to at most 4096"),
        ("model.num_layers=1025", "model.num_layers is 1025", "set model.num_layers to at most 1024"),
        ("model.expert_ffn=9999999999", "has 92,160,000,253,184 parameters, over 1,099,511,627,776", "too large"),
        ("model.head_dim=9999999998", "head_dim=9999999998, expert_ffn=128", "which of these numbers is too large"),
        ("sync.tile_values=1", "1,442,048 tiles of 1 values, over 65,536", "raise sync.tile_values"),
        ("swarm.heartbeat_seconds=1e-9", "swarm.heartbeat_seconds is 1e-09", "to at least 0.05"),
        ("eval.sequences=100000", "eval.sequences is 100000", "set eval.sequences to at most 16384"),
        ("data.copies=5000", "data.copies is 5000", "set data.copies to at most 1024"),
        ("data.tokenizer=/etc/passwd", "data.tokenizer is '/etc/passwd'", "a name on the Hugging Face hub"),
        ("data.tokenizer=../here", "data.tokenizer is '../here'", "a name on the Hugging Face hub"),
        ("swarm.experts_per_peer=9", "swarm.experts_per_peer is 9, more than model.num_experts (8)", "at most 8"),
        ("sync.steps_per_round=0", "sync.steps_per_round is 0", "[[until step, H], ..., [0, H]]"),
        ("sync.steps_per_round=[[100, 5]]", "must not end", "[0, H]"),
        ("sync.steps_per_round=[[100, 5], [50, 9], [0, 9]]", "must increase", "order it by step"),
        ("sync.steps_per_round=[[0, 5], [0, 9]]", "must increase", "order it by step"),
    ],
)
def test_wrong_value_is_refused_with_the_value_and_the_fix(override: str, message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(override)
    assert message in str(error.value)
    assert fix in error.value.fix


def test_a_run_begins_with_as_many_peers_as_a_manifest_may_name() -> None:
    assert MOST_PEERS == MAX_MEMBERS


@pytest.mark.parametrize("wrong", ["scheduler.total_steps=1e29", "model.d_model=", "optimizer.batch_sequences=many"])
def test_what_would_follow_from_a_wrong_value_is_not_missing(wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(wrong)
    assert "missing" not in str(error.value)
    assert str(error.value).startswith(wrong.partition("=")[0])


def test_a_misspelt_key_is_one_mistake_although_the_one_that_was_meant_is_missing() -> None:
    text = TINY.read_text().replace("\n  top_k:", "\n  topk:")
    with pytest.raises(ConfigError) as error:
        config_from_text(text)
    assert (str(error.value), error.value.fix) == ("unknown key model.topk", "did you mean model.top_k?")
    with pytest.raises(ConfigError) as error:
        config_from_text(text, ["optimizer.lr=0", "model.num_layers=0"])
    assert error.value.fix == "did you mean model.top_k? Set model.num_layers to at least 1; set optimizer.lr above 0"


def test_a_codec_that_does_not_exist_is_one_mistake_although_the_experts_would_take_it_too() -> None:
    with pytest.raises(ConfigError) as error:
        tiny("sync.codec=int7")
    assert str(error.value) == "sync.codec is 'int7', not an allowed value"


def test_a_mistyped_bundled_config_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no bundled config named tinny") as error:
        bundled_config("tinny")
    assert error.value.fix == "did you mean tiny?"
    with pytest.raises(ConfigError) as error:
        bundled_config("zzzzzz")
    assert "home, small, spes-1b" in error.value.fix


def test_a_decay_that_begins_in_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay_steps is 990: it would begin at step 10, before the end") as error:
        tiny("scheduler.name=wsd", "scheduler.decay_steps=990")
    assert error.value.fix == "set it to at most 980"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML: line 1: "),
        ("model:\n  d_model\n  top_k: 2", "the config is not valid YAML: line 3: mapping values are not allowed here"),
        ("run: {run_id: a\0b}", "is not valid YAML: "),
        ("[" * 5000, "line 1: a config may not have lists and sections more than 8 deep"),
        ("a: " + "[" * 9 + "]" * 9, "line 1: a config may not have lists and sections more than 8 deep"),
        ("run: " + "9" * 65, "line 1: a config may not have a number of 65 digits, over 64"),
        ("run: 0x" + "f" * 5000, "line 1: a config may not have a number of 5002 digits, over 64"),
        ("run: 1" + ":1" * 5000, "line 1: a config may not have a number of 10001 digits, over 64"),
        ("run: " + "x" * 2**16, "the config has 65541 characters, over 65536"),
        ("run: 2026-02-31", "run is '2026-02-31', not a section"),
        ("run: 0x_", "has a value that cannot be read: invalid literal"),
        ("run: !!timestamp soon", "line 1: a config may not have the tag 'tag:yaml.org,2002:timestamp'"),
        ("!!python/object:os.system {}", "line 1: a config may not have the tag 'tag:yaml.org,2002:python/object:os"),
        ("run: 0001-01-01 00:00:00 +23:59", "run is '0001-01-01 00:00:00 +23:59', not a section"),
        ("3", "has no sections"),
        ("model: 3", "model is 3, not a section"),
        ("model:\n  d_model: 3\n  d_model: 4", "d_model appears twice"),
        ("3: 4", "unknown key 3"),
        ("optimizer: {lr: 0.001, batch_sequences: null}", "optimizer.batch_sequences has no value"),
        ("{}", "model is missing; data is missing; optimizer is missing; and 3 more mistakes"),
    ],
)
def test_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_text(text)
    assert message in str(error.value)
    assert error.value.fix


def test_missing_file_and_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the config file .*none\.yaml does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_overrides_are_typed_as_yaml_and_text_fields_stay_text() -> None:
    config = tiny(
        "optimizer.lr=1e-4", "model.norm_topk=true", "data.path=2024", "sync.steps_per_round=[[9, 2], [0, 5]]"
    )
    assert config.optimizer.lr == 1e-4
    assert config.model.norm_topk is True
    assert config.data.path == "2024"
    assert config.sync.steps_per_round == ((9, 2), (0, 5))


@pytest.mark.parametrize("folder", ["/my data #1", "[old] shards", "@home", "*", "a: b: c", "~", "%x", "- a", "it's"])
def test_a_folder_may_be_called_anything(folder: str) -> None:
    """`--data` comes as an override, too."""
    assert tiny(f"data.path={folder}").data.path == folder
    assert tiny(f"data.path={json.dumps(folder)}").data.path == folder


def test_derived_defaults_follow_overrides() -> None:
    config = tiny("model.d_model=256", "model.vocab_size=300", "optimizer.batch_sequences=6")
    assert (config.model.head_dim, config.model.num_kv_heads) == (64, 4)
    assert config.model.embedding_rows == 300
    assert config.optimizer.micro_batch_sequences == 6


def test_schedule_gives_the_steps_of_a_round_that_starts_at_a_step() -> None:
    config = tiny("sync.steps_per_round=[[100, 5], [300, 10], [0, 50]]")
    assert [steps_per_round_at(config, step) for step in (0, 99, 100, 299, 300, 10**9)] == [5, 5, 10, 10, 50, 50]
    assert steps_per_round_at(tiny("sync.steps_per_round=7"), 10**9) == 7


def test_yaml_round_trip_keeps_every_value() -> None:
    config = tiny("optimizer.lr=0.1234567890123", "data.path=here: there", "sync.steps_per_round=[[9, 2], [0, 5]]")
    assert config_from_text(config_to_yaml(config)) == config


def test_published_config_leaves_out_the_organisers_own_settings() -> None:
    config = tiny("data.path=/home/me/shards", "output.log_every_steps=5", "optimizer.micro_batch_sequences=2")
    text = published_yaml(config)
    assert "/home/me" not in text
    assert "\noutput:" not in text
    assert config_from_text(text).optimizer.micro_batch_sequences == 2


def test_every_field_is_explained() -> None:
    assert [key for key, field in fields_of_tree() if not field.description] == []


def test_no_time_out_has_to_be_guessed() -> None:
    """Deadlines are learnt (`consensus/timing.py`); nobody sets one."""
    words = ("timeout", "deadline", "grace", "patience", "wait", "seconds")
    asked = [path for path, _ in fields_of_tree() if any(word in path for word in words)]
    assert asked == ["swarm.heartbeat_seconds", "swarm.renew_after_seconds"]  # a choice: a wait against a renewal


def test_unknown_bundled_config_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        bundled_config("huge")
    assert "tiny" in error.value.fix


def test_reading_a_config_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, spes_p2p.config.fingerprint; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("text", ["run: &a\n  seed: *a\n", "&a\nrun: *a\n", "sync:\n  steps_per_round: &a [*a]\n"])
def test_an_alias_of_what_it_stands_in_is_refused_as_bad_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML: line"):
        config_from_text(text)


def test_a_section_in_the_place_of_a_field_lists_its_fields() -> None:
    with pytest.raises(ConfigError, match="unknown key scheduler") as caught:
        parse_override("scheduler=1")
    assert caught.value.fix.startswith("known: scheduler.")


@pytest.fixture
def a_removed_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "sync.was_here", Removed(1))


def _with(text: str, key: str, value: object) -> str:
    section, name = key.split(".")
    return text.replace(f"\n{section}:\n", f"\n{section}:\n  {name}: {json.dumps(value)}\n")


@pytest.mark.usefixtures("a_removed_field")
def test_a_removed_field_of_this_machine_is_refused_by_name_whatever_its_value() -> None:
    for key, removed in REMOVED.items():
        for wrong in (
            lambda key=key, removed=removed: config_from_text(_with(TINY.read_text(), key, removed.default)),
            lambda key=key: config_from_text(_with(TINY.read_text(), key, "other")),
            lambda key=key: tiny(f"{key}=1"),
        ):
            with pytest.raises(ConfigError) as error:
                wrong()
            assert str(error.value) == f"{key} is gone: this version of spes-p2p does not have it"
            assert error.value.fix


@pytest.mark.usefixtures("a_removed_field")
def test_a_published_config_of_an_older_version_loads_where_what_is_gone_had_its_default() -> None:
    text = published_yaml(tiny(), for_people=True)
    every = text
    for key, removed in REMOVED.items():
        every = _with(every, key, removed.default)
    assert every != text
    assert published_config(every, "the run's") == published_config(text, "the run's") == tiny()
    for key in REMOVED:
        with pytest.raises(ConfigError, match=f"the run's has {key}='other', which this version") as error:
            published_config(_with(text, key, "other"), "the run's")
        assert "docs/tried.md" in error.value.fix


def test_what_older_versions_published_at_its_defaults_is_read_as_it_was() -> None:
    """So that their checkpoints export: each field that is gone since has its row."""
    older = Path(__file__).with_name("published_by_cd602221.yaml").read_text()
    assert published_config(older, "the run's") == tiny()


def test_every_field_that_is_gone_has_its_row_with_the_default_that_it_had() -> None:
    """Private ones, too, which nobody ever published."""
    older = yaml.safe_load(Path(__file__).with_name("fields_of_cd602221.yaml").read_text())
    had = dict.fromkeys(older["given"]) | older["defaults"]
    gone = had.keys() - {key for key, _ in fields_of_tree()}
    assert (len(had), {key: had[key] for key in gone}) == (101, {key: REMOVED[key].default for key in gone})


@pytest.mark.usefixtures("a_removed_field")
def test_what_is_removed_is_not_in_the_schema() -> None:
    fields = {key for key, _ in fields_of_tree()}
    assert [key for key in REMOVED if key in fields or len(key.split(".")) != 2] == []
