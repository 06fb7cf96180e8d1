"""Each check of the doctor says what is wrong and what mends it; `join` refuses with the same words."""

from __future__ import annotations

import dataclasses

import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.errors import SpesError
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.peer.checks import (
    HOME_LINK,
    Check,
    Disk,
    Gpu,
    Machine,
    disk_check,
    fit_check,
    machine_checks,
    raise_failures,
    reach_check,
    sync_check,
)
from spes_p2p.planning.budget import Device
from spes_p2p.planning.disk import DiskNeed
from spes_p2p.planning.traffic import sync_costs
from spes_p2p.planning.units import GIB

SEVEN = load_config(bundled_config("spes-7b"))
CARD = Gpu("NVIDIA RTX 4090", 23 * GIB, 24 * GIB)
HERE = Machine("Linux 6.1 (x86_64)", (3, 12, 1), "torch 2.13.0", "13.0", "NVIDIA driver 580.1", (CARD,), GIB, GIB, 8)


def levels(machine: Machine) -> dict[str, str]:
    return {check.name: check.level for check in machine_checks(machine)}


def only(machine: Machine, name: str) -> Check:
    (found,) = [check for check in machine_checks(machine) if check.name == name]
    return found


def test_a_good_machine_is_fine_and_every_other_line_has_a_fix() -> None:
    assert levels(HERE) == {"python": "ok", "torch": "ok", "gpu": "ok", "memory": "ok"}
    assert not any(check.fix for check in machine_checks(HERE))


@pytest.mark.parametrize(
    ("change", "name", "level", "words"),
    [
        ({"python": (3, 10, 0)}, "python", "failure", "install Python 3.11"),
        ({"system": "Darwin 24 (arm64)"}, "python", "warning", "only Linux is tested"),
        ({"gpus": (), "cuda": None}, "torch", "warning", "torch has no CUDA"),
        ({"gpus": ()}, "torch", "warning", "update the NVIDIA driver"),
        ({"gpus": (), "driver": "", "cuda": None}, "torch", "ok", "without CUDA"),
        ({"gpus": ()}, "gpu", "warning", "training runs on the CPU"),
        ({"gpus": (dataclasses.replace(CARD, free_bytes=9 * GIB),)}, "gpu", "warning", "close the other programs"),
    ],
)
def test_what_is_wrong_with_a_machine(change: dict[str, object], name: str, level: str, words: str) -> None:
    check = only(dataclasses.replace(HERE, **change), name)  # type: ignore[arg-type]
    assert check.level == level
    assert words in f"{check.text} {check.fix}"


def test_disk_is_compared_with_what_the_run_takes() -> None:
    need = DiskNeed.of(SEVEN, 8)
    assert disk_check(SEVEN, 8, Disk("/", need.most)).level == "ok"
    assert disk_check(SEVEN, 8, Disk("/", need.most - 1)).level == "warning"
    assert disk_check(SEVEN, 8, Disk("/", 0, need.most)).level == "ok", "what the folder holds is not needed again"
    failed = disk_check(SEVEN, 8, Disk("/mnt/x", need.least - 1))
    assert (failed.level, "/mnt/x" in failed.text, "--output" in failed.fix) == ("failure", True, True)


def test_fit_says_how_many_columns_there_is_room_for() -> None:
    roomy, tight = Device(80 * GIB, 80 * GIB), Device(2 * GIB, 24 * GIB)
    assert fit_check(SEVEN, roomy, 8, "", fits=True).level == "ok"
    assert "32 expert columns" in fit_check(SEVEN, roomy, 8, "", fits=True).text
    assert fit_check(SEVEN, tight, 8, "8 expert columns need more", fits=False).level == "failure"
    assert fit_check(SEVEN, roomy, 99, "", fits=True).level == "warning"


def test_reach_is_never_a_failure() -> None:
    found = [reach_check(True, "/ip4/1.2.3.4/tcp/5"), reach_check(None, "")]
    assert [check.level for check in found] == ["ok", "ok"]
    hidden = reach_check(False, "")
    assert hidden.level == "warning"
    assert hidden.text.startswith("none")
    assert "--port" in hidden.fix


def test_what_a_sync_takes_of_a_home_link_is_told() -> None:
    cost = sync_costs(SEVEN, 4, 8, HOME_LINK, None)[0]
    check = sync_check(SEVEN, 8, peers=4)
    assert check.level == "ok"
    assert check.text.startswith(f"one of 4 peers sends {bytes_text(cost.bytes_up)} and receives ")
    assert check.text.endswith(" at 20 Mbit/s up and 100 down")


def test_the_first_failure_is_raised_with_its_words() -> None:
    said: list[str] = []
    checks = [Check("gpu", "warning", "none", "buy one"), Check("disk", "failure", "full", "free some")]
    with pytest.raises(SpesError, match="disk: full") as caught:
        raise_failures(checks, said.append)
    assert (caught.value.fix, said) == ("free some", ["warning: gpu: none / fix: buy one"])
