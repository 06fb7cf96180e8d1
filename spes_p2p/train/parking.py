"""Takes the tensors of a trainer off their device and brings them back, bit for bit, while a peer is paused.

Only the memory goes: each storage is emptied in place and filled again later, so that whatever shares it (rows of the
masters, the optimizer's views) is as before, and nothing has to be built again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Parked:
    """What lay on `device` of all tensors that `root` holds, kept in host memory until `bring_back`."""

    def __init__(self, root: object, device: torch.device) -> None:
        parks = device.type != "mps"  # torch cannot resize storages there: they stay
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in _tensors(root, device) if parks}
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            if storage.resizable() and storage.nbytes():
                self._kept.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)))
                storage.resize_(0)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """All of it, or nothing: raises RuntimeError where the device has too little memory now."""
        try:
            for storage, host in self._kept:
                storage.resize_(host.nbytes())
        except RuntimeError:
            for storage, _ in self._kept:
                storage.resize_(0)
            raise
        for storage, host in self._kept:
            storage.copy_(host)
        self._kept.clear()


def _tensors(root: object, device: torch.device) -> Iterator[Tensor]:
    """All tensors on `device` that are reached through our own objects, modules and plain containers."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device.type == device.type:
                yield one
            waiting += one.grad if one.is_leaf else None, vars(one)  # with the halves of a master
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif isinstance(one, nn.Module) or type(one).__module__.startswith("spes_p2p."):
            waiting.extend(getattr(one, "__dict__", {}).values())
