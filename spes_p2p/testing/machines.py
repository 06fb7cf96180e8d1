"""State machines with a part exchanged: a fault that a test plants, or a peer that lies."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.parts import PartClasses


def machine_with(part: type) -> type[Consensus]:
    """The state machine with `part` in the place of the one that it changes; or itself, where it is a machine."""
    if issubclass(part, Consensus):
        return part
    [slot] = [slot.name for slot in fields(PartClasses) if issubclass(part, getattr(PartClasses(), slot.name))]
    changed: dict[str, Any] = {slot: part}
    classes = replace(PartClasses(), **changed)
    return type(part.__name__, (Consensus,), {"PART_CLASSES": classes})
