"""Amounts as people write them: `24GiB`, `20Mbit`, and back to short text."""

from __future__ import annotations

import re

from spes_p2p.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 2**40}
_BITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]*)\s*", re.ASCII)


def parse_bytes(text: str, flag: str) -> int:
    """`24GiB`, `24GB`, `24576MiB` to bytes. Raises ConfigError that names `flag` for anything else, and for nothing."""
    amount, unit = _split(text)
    match = re.fullmatch(r"([kKmMgGtT]?)(i?)[bB]", unit)
    factor = _BYTES.get(match[1].upper() + match[2]) if match else None
    if amount is None or factor is None or amount <= 0:
        raise ConfigError(f"{flag} {text!r} is not a number of bytes", fix="write it with its unit, as 24GiB or 24GB")
    return round(amount * factor)


def parse_rate(text: str, flag: str) -> float:
    """`20Mbit`, `1Gbit/s`, `2.5MB/s` to bytes a second. Raises ConfigError that names `flag` for anything else."""
    amount, unit = _split(text)
    bits = re.fullmatch(r"([kKmMgG]?)(?:bit|bits|bps|bit/s|bits/s)", unit)
    whole = re.fullmatch(r"([kKmMgG]?)(i?)B/s", unit)
    factor = None
    if bits:
        factor = _BITS[bits[1].upper()] / 8
    elif whole:
        factor = _BYTES.get(whole[1].upper() + whole[2])
    if amount is None or factor is None or amount <= 0:
        raise ConfigError(f"{flag} {text!r} is not a link speed", fix="write it as 20Mbit (per second) or 2.5MB/s")
    return amount * factor


def gib_text(count: float) -> str:
    """Bytes as GiB with one digit, small amounts as MiB."""
    return f"{count / GIB:.1f} GiB" if count >= 0.95 * GIB else f"{count / MIB:.0f} MiB"


def _split(text: str) -> tuple[float | None, str]:
    match = _AMOUNT.fullmatch(text)
    return (float(match[1]), match[2]) if match else (None, "")
