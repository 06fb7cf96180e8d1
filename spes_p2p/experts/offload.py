"""Foreign experts in pinned host memory, brought to the GPU one layer ahead of their use.

A forward pass asks the layers in order, a backward pass in reverse: whoever was asked before whom tells the direction,
and the next layer's matrices are copied on a stream of their own while this layer computes. Each part has two buffers
on the device, so the copy and the computing never touch the same one. Without CUDA the copies are made when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Buffer:
    """One of the two places on the device of a part."""

    tensors: tuple[Tensor, ...] = ()
    holds: object = None
    arrived: Any = None
    """Event of the copy stream: the bytes are here."""
    read: Any = None
    """Event of the computing stream: nobody needs the bytes any more."""


@dataclass
class HostPrefetcher:
    """Brings what layers have on the host to `device`; one for all layers of a model, registered in their order."""

    device: torch.device
    _layers: list[Any] = field(default_factory=list)
    _sources: list[Mapping[Any, tuple[Tensor, ...]]] = field(default_factory=list)
    _buffers: dict[Any, list[_Buffer]] = field(default_factory=dict)
    _last: dict[Any, int] = field(default_factory=dict)
    _stream: Any = None

    @property
    def pins(self) -> bool:
        """Whether host memory should be pinned."""
        return self.device.type == "cuda"

    def register(self, layer: object, source: Mapping[Any, tuple[Tensor, ...]]) -> None:
        """Registers a layer. `source`: its host tensors by part, which it may replace later (see `forget`)."""
        self._layers.append(layer)
        self._sources.append(source)

    def fetch(self, layer: object, part: Any) -> tuple[Tensor, ...]:
        """The layer's tensors on the device; call `done` when what reads them has been launched."""
        at = next(index for index, one in enumerate(self._layers) if one is layer)
        before, self._last[part] = self._last.get(part, -1), at
        buffer = self._holding(part, at) or self._bring(part, at)
        if buffer.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.arrived)
        ahead = at + (1 if at > before else -1)
        if 0 <= ahead < len(self._layers) and self._holding(part, ahead) is None:
            self._bring(part, ahead, keep=buffer)
        return buffer.tensors

    def done(self, layer: object, part: Any) -> None:
        """The layer's tensors may be overwritten once all that was launched so far has run."""
        if self.device.type == "cuda":
            for buffer in self._buffers[part]:
                if buffer.holds is layer:
                    buffer.read = torch.cuda.current_stream(self.device).record_event()

    def forget(self, layer: object, part: Any) -> None:
        """The layer's tensors have changed on the host."""
        for buffer in self._buffers.get(part, ()):
            if buffer.holds is layer:
                buffer.holds = None

    def _holding(self, part: Any, at: int) -> _Buffer | None:
        return next((one for one in self._buffers.get(part, ()) if one.holds is self._layers[at]), None)

    def _bring(self, part: Any, at: int, keep: _Buffer | None = None) -> _Buffer:
        """Starts the copy into the buffer that is not `keep`."""
        pair = self._buffers.setdefault(part, [_Buffer(), _Buffer()])
        buffer = pair[1] if keep is pair[0] else pair[0]
        source = self._sources[at][part]
        if [tensor.shape for tensor in buffer.tensors] != [tensor.shape for tensor in source]:
            if buffer.arrived is not None:  # the old memory may be given to somebody: not before the copy has ended
                torch.cuda.current_stream(self.device).wait_event(buffer.arrived)
            buffer.tensors = ()  # the old ones make room for the new
            buffer.tensors, buffer.read = tuple(torch.empty_like(one, device=self.device) for one in source), None
        buffer.holds = self._layers[at]
        if self.device.type == "cuda":
            self._copy_ahead(buffer, source)
        else:
            self._copy(buffer, source)
        return buffer

    def _copy_ahead(self, buffer: _Buffer, source: tuple[Tensor, ...]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if buffer.read is None:  # a new buffer: its memory may have been freed by work that still runs
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self._stream.wait_event(buffer.read)
        with torch.cuda.stream(self._stream):
            self._copy(buffer, source)
            buffer.arrived = self._stream.record_event()

    @staticmethod
    def _copy(buffer: _Buffer, source: tuple[Tensor, ...]) -> None:
        for target, tensor in zip(buffer.tensors, source, strict=True):
            target.copy_(tensor, non_blocking=True)
