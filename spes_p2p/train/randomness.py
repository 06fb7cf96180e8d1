"""The state of torch's random numbers on the host and on one device. Nothing in our own model is random while it
trains, but a model of somebody else's may have dropout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RandomState = Mapping[str, Tensor | None]


def random_state(device: torch.device) -> dict[str, Tensor | None]:
    """A copy; nothing waits for the device."""
    is_gpu = device.type == "cuda"
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(device) if is_gpu else None}


def restore_random_state(device: torch.device, state: RandomState) -> None:
    """What was drawn since is drawn again; what the state does not have stays."""
    if (host := state["cpu"]) is not None:
        torch.set_rng_state(host)
    if (own := state["device"]) is not None and device.type == "cuda":
        torch.cuda.set_rng_state(own, device)
