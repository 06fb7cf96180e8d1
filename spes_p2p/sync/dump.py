"""Writes what went into a round and what came out, for debugging and for checks against an independent computation.

`round-%06d/before.safetensors` holds this peer's values going in, `after.safetensors` the committed state, `round.json`
who took part and how. Tensors stand under their Hugging Face names, in fp32.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.files import storing
from spes_p2p.ids import PeerId
from spes_p2p.ownership.assign import columns_of
from spes_p2p.state.layout import BlockSource, Layout
from spes_p2p.sync.outer import Nesterov


@dataclasses.dataclass(eq=False)
class RoundDump:
    """Dumps of one peer under `directory`. Raises StorageFull."""

    _directory: Path
    _layout: Layout
    _peer: PeerId
    _merge_top_k: int
    _outer: Nesterov | None = None

    def __post_init__(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(
        self, manifest: Manifest, parent: Manifest, inputs: BlockSource, blocks: Iterable[int], state: BlockSource
    ) -> None:
        """`inputs` has `blocks` as they went in; `state` is the committed state of `manifest`."""
        folder = self._directory / f"round-{manifest.round:06d}"
        with storing(folder, 4 * self._layout.num_values):
            folder.mkdir(exist_ok=True)
            save_file(self._tensors(inputs, blocks), folder / "before.safetensors")
            every = range(len(self._layout.blocks))
            save_file(self._tensors(state, every), folder / "after.safetensors")
            (folder / "round.json").write_text(json.dumps(self._describe(manifest, parent), indent=2) + "\n")

    def _tensors(self, source: BlockSource, blocks: Iterable[int]) -> dict[str, np.ndarray[Any, Any]]:
        return {
            placed.tensor.name: np.array(self._layout.view(source.block(index), placed.tensor.name))
            for index in blocks
            for placed in self._layout.blocks[index].tensors
        }

    def _describe(self, manifest: Manifest, parent: Manifest) -> dict[str, Any]:
        return {
            "peer_id": self._peer,
            "round": manifest.round,
            "step": manifest.step,
            "step_before": parent.step,
            "roster": [
                {
                    "peer_id": entry.peer,
                    "weight": entry.tokens,
                    "steps": entry.steps,
                    "owned": list(columns_of(parent.ownership, entry.peer)),
                }
                for entry in manifest.roster
            ],
            "slices": [dataclasses.asdict(piece) for piece in manifest.slices],
            "merge_alpha": manifest.merge.alpha if manifest.merge else 0.0,
            "merge_top_k": self._merge_top_k,
            "codec": self._layout.codec_of(0),
            "expert_codec": self._layout.codec_of(1),
            "outer": None if self._outer is None else dataclasses.asdict(self._outer),
            "model_hash": manifest.state_root.hex(),
        }
