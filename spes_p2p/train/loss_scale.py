"""The factor on the loss that keeps small gradients above zero in fp16; 1 in every other dtype.

As torch's GradScaler has it: halved where a gradient is not finite, doubled after many that are. A step whose gradient
was too large is made again rather than left out, so that a round has as many steps as elsewhere. All ranks see the same
norm, and so have the same scale.
"""

from __future__ import annotations

import torch

FIRST = 2.0**16
STEPS_TO_DOUBLE = 2000


class LossScale:
    """`value` is what the next loss is multiplied by."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._changes = dtype == torch.float16
        self.value = FIRST if self._changes else 1.0
        self._good = 0

    def shrink(self) -> bool:
        """After a gradient that was not finite; False where a smaller scale cannot be the cure."""
        if not self._changes or self.value <= 1.0:
            return False
        self.value, self._good = self.value / 2, 0
        return True

    def give_up(self, before: float) -> None:
        """After a step that was skipped, since no scale made its gradient finite: it was not the scale's fault.

        `before`: the scale that the step began with. Halved once, as GradScaler would, rather than left at 1, from
        where it needs ten thousands of steps to come back.
        """
        if self.value < before:
            self.value = before / 2

    def note_good(self) -> None:
        """After a step that was made."""
        self._good += 1
        if self._changes and self._good == STEPS_TO_DOUBLE:
            self.value, self._good = 2 * self.value, 0
