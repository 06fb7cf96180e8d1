"""Amounts as people write them."""

from __future__ import annotations

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.planning.gpus import GPUS, gpu_named
from spes_p2p.planning.units import GIB, gib_text, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * GIB), ("24 GB", 24e9), ("24gb", 24e9), ("1.5GiB", 1.5 * GIB), ("512MiB", GIB / 2), ("7B", 7)],
)
def test_bytes(text: str, count: float) -> None:
    assert parse_bytes(text, "--gpu-memory") == count


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [("20Mbit", 2.5e6), ("20 Mbit/s", 2.5e6), ("1Gbps", 125e6), ("2.5MB/s", 2.5e6), ("1MiB/s", 2**20), ("8bit", 1)],
)
def test_rates(text: str, bytes_a_second: float) -> None:
    assert parse_rate(text, "--uplink") == bytes_a_second


@pytest.mark.parametrize("text", ["", "24", "GiB", "24Gbit", "-3GiB", "0GiB", "24 lots", "1e9B", "٣GiB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory '.*' is not a number of bytes") as caught:
        parse_bytes(text, "--gpu-memory")
    assert "24GiB" in caught.value.fix


@pytest.mark.parametrize("text", ["", "20", "20MB", "Mbit", "0Mbit", "20 Mbit an hour"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--uplink '.*' is not a link speed"):
        parse_rate(text, "--uplink")


def test_short_text() -> None:
    assert [gib_text(count) for count in (24 * GIB, 0.94 * GIB, 0)] == ["24.0 GiB", "963 MiB", "0 MiB"]


def test_gpus_by_name() -> None:
    assert gpu_named("rtx 4090") == GPUS["RTX4090"]
    with pytest.raises(ConfigError, match="not in the table of GPUs") as caught:
        gpu_named("RTX4091")
    assert "RTX4090" in caught.value.fix
