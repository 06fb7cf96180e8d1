"""`spes-p2p plan`: tables for 80 columns, JSON with the same numbers, errors with their fix, and nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from spes_p2p.cli.main import build

PLAN = build({"plan": "spes_p2p.cli.plan:plan", "status": "spes_p2p.cli.status:status"})


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(PLAN, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(PLAN, ["plan", *arguments])
    assert result.exit_code == 1, result.output
    return result.stderr


def test_a_person_can_read_it_at_80_columns() -> None:
    text = plan("--config", "spes-7b", "--gpu", "RTX4090", "--uplink", "20Mbit", "--downlink", "100Mbit")
    assert max(map(len, text.splitlines())) <= 80
    for words in ("7.3B parameters", "8 of 32 columns", "masters", "highest need", "as configured", "24.7 GB", "fp32"):
        assert words in text
    assert "8 expert columns do not fit into" in text
    assert "is a guess" in text
    assert "The state takes 29.3 GB on disk" in text


def test_without_gpu_and_link_it_says_what_to_give() -> None:
    text = plan("--config", "tiny")
    for flag in ("--gpu-memory", "--uplink", "--tokens-per-second"):
        assert flag in text


def test_the_table_says_that_it_shows_one_moment() -> None:
    text = " ".join(plan("--config", "tiny").split())
    assert "memory of a GPU when it needs most, 8 x 128 tokens at once" in text
    assert "gradients 0 MiB those that exist at that moment" in text


def test_json_has_bytes_and_the_sentence() -> None:
    told = json.loads(plan("--config", "spes-7b", "--gpu-memory", "24GiB", "--peers", "4", "--json"))
    assert told["parameters"]["total"] == 7_333_287_936
    assert told["sync"]["fp32"]["bytes_up"] == pytest.approx(24.7e9, rel=0.002)
    assert told["sync"]["fp32"]["seconds"] is None
    assert told["memory"]["total"] > told["memory"]["allocated"] == sum(told["memory"]["parts"].values())
    assert told["stored_state"] == 4 * told["parameters"]["total"]
    assert told["fits"]["nearest"]["owned"] < 8
    assert told["sentence"].startswith("8 expert columns do not fit")


def test_overrides_and_flags_change_the_answer() -> None:
    def total(*arguments: str) -> int:
        return int(json.loads(plan("--config", "spes-1b", "--json", *arguments))["memory"]["total"])

    assert total("--experts-per-peer", "16") > total() > total("model.num_layers=6")


def test_a_file_of_ones_own(tmp_path: object) -> None:
    assert "run.yaml does not exist" in refusal("--config", f"{tmp_path}/run.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu-memory", "24"), "--gpu-memory '24' is not a number of bytes\nFix: write it with its unit, as 24GiB"),
        (("--uplink", "20MB"), "--uplink '20MB' is not a link speed\nFix: write it as 20Mbit"),
        (("--gpu", "RTX409"), "did you mean RTX4090?"),
        (("--experts-per-peer", "99"), "--experts-per-peer is 99, but the run has"),
        (("model.layers=3",), "unknown key model.layers\nFix: did you mean model.num_layers?"),
    ],
)
def test_mistakes_are_told_with_a_fix(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal("--config", "tiny", *arguments)


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from spes_p2p.cli.main import COMMANDS, build; "
        "build({'plan': COMMANDS['plan'], 'status': COMMANDS['status']})"
        "(['plan', '--config', 'tiny', '--gpu', 'H100'], standalone_mode=False); "
        "print('loaded:', sorted({'torch', 'transformers', 'hivemind', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("loaded: []\n"), result.stdout + result.stderr


HOME = ("--gpu", "RTX3060", "--uplink", "20Mbit", "--downlink", "100Mbit", "--peers", "8")


def test_links_that_are_too_slow_are_said() -> None:
    text = plan("--config", "small", *HOME)
    assert max(map(len, text.splitlines())) <= 80
    assert "Too slow: 95% of the time goes into syncing. The config home has" in " ".join(text.split())


def test_a_codec_is_marked_that_is_chosen() -> None:
    fast = ("--uplink", "10Gbit", "--downlink", "10Gbit", "--tokens-per-second", "1", "--peers", "8")
    settings = ("sync.codec=int8", "sync.expert_codec=int8", "swarm.target_replicas=1", "swarm.experts_per_peer=1")
    text = plan("--config", "tiny", *settings, *fast)
    assert "Too slow" not in text
    assert text.count("(chosen)") == text.count("int8 (chosen)") == 1


def test_what_it_cannot_count_is_an_error() -> None:
    odd = refusal("--config", "tiny", "--local-ranks", "3")
    assert "--local-ranks is 3, which does not divide optimizer.batch_sequences (8)" in odd


def test_a_rank_has_its_part_of_the_batch() -> None:
    told = json.loads(plan("--config", "small", "--gpu-memory", "80GiB", "--local-ranks", "4", "--json"))
    assert told["fits"]["rungs"][0]["largest_micro_batch"] == 4, "of 16 sequences"


def test_columns_without_an_owner_are_counted() -> None:
    assert "one sync, per peer: 1 peer, every 1 step, owners for 2 of 8 columns" in plan(
        "--config", "small", "--peers", "1", "sync.steps_per_round=1"
    )
    assert "4 peers, every 50 steps, 1 owner per column" in plan("--config", "small")


def test_it_says_how_many_peers_to_vouch_for_in_a_run_with_strangers() -> None:
    words = "it takes 4 trusted peers with 8 columns each to own all 32"
    assert words in " ".join(plan("--config", "spes-7b", "swarm.trusted=vouched").split())
    assert "trusted" not in plan("--config", "spes-7b")
