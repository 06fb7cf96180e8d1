"""Attacks on what goes into a round: values that were not trained, and work that was not done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spes_p2p.consensus.messages import Work
from spes_p2p.data.loader import Batch
from spes_p2p.state.layout import Values
from tests.simulation.attackers.attack import Attack, Scene

UNNOTICED = 10.0
"""How many times an honest change the large ones are: half of what reducers refuse (`NORM_LIMIT`)."""
ALIE_DEVIATIONS = 1.5
"""Standard deviations from the honest mean, as in the experiments of arXiv 1902.06156."""
SPOILT = 100.0
"""How many times its own change a sole owner goes the other way: nobody compares it with another's."""
DISGUISE = 0.7
"""The honest part of a disguised change, in parts of the noise: then its cosine with the honest mean is 0.57."""


class NotFinite(Attack):
    """Hands in NaN."""

    name = "nan"

    def values(self, scene: Scene) -> Values:
        return np.full_like(scene.base, np.nan)


class Thousandfold(Attack):
    """Hands in its change times 1,000."""

    name = "times-1000"

    def values(self, scene: Scene) -> Values:
        return scene.base + np.float32(1000) * scene.change


class SignFlip(Attack):
    """Hands in the opposite of what it trained."""

    name = "sign-flip"

    def values(self, scene: Scene) -> Values:
        return scene.base - scene.change


class Noise(Attack):
    """Hands in Gaussian noise, as large as can go unnoticed."""

    name = "noise"

    def values(self, scene: Scene) -> Values:
        return _noise(scene)


class ALittleIsEnough(Attack):
    """ALIE (arXiv 1902.06156): the honest mean, moved by as little as the honest differ from each other anyway."""

    name = "alie"

    def values(self, scene: Scene) -> Values:
        changes = scene.honest_changes
        return scene.base + changes.mean(0) - np.float32(ALIE_DEVIATIONS) * changes.std(0)


class InnerProduct(Attack):
    """Inner-product manipulation (arXiv 1903.03936): the honest mean, turned around and made large."""

    name = "inner-product"

    def values(self, scene: Scene) -> Values:
        return scene.base - np.float32(UNNOTICED) * scene.honest_changes.mean(0)


class Disguised(Attack):
    """Noise, as large as can go unnoticed, with as much of what the honest learn as makes it look like one of them."""

    name = "disguised"

    def values(self, scene: Scene) -> Values:
        honest = scene.honest_changes.mean(0)
        noise = scene.rng.standard_normal(len(honest), np.float32)
        far = UNNOTICED * float(np.linalg.norm(honest))
        noise *= np.float32(far / float(np.linalg.norm(noise)))
        return scene.base + np.float32(UNNOTICED * DISGUISE) * honest + noise


class Idle(Attack):
    """Trains nothing, and claims as many tokens and steps as the rules let anybody."""

    name = "claimed-work"

    def values(self, scene: Scene) -> Values:
        return scene.base

    def work(self, work: Work, most_steps: int) -> Work:
        each = max(1, work.steps)
        return replace(
            work,
            steps=most_steps,
            tokens=work.tokens * most_steps // each,
            sequences=work.sequences * most_steps // each,
        )


class ClaimedFlip(Idle):
    """Claims as much as it may, and hands in the opposite of what it trained."""

    name = "claimed-flip"

    def values(self, scene: Scene) -> Values:
        return scene.base - scene.change


class LabelFlip(Attack):
    """Trains honestly, on text in which the first token of the vocabulary stands for the last one, and so on."""

    name = "label-flip"

    def batch(self, batch: Batch, vocab_size: int) -> Batch:
        return replace(batch, tokens=vocab_size - 1 - batch.tokens)


class SoleOwner(Attack):
    """Spoils the columns that nobody else owns, and is honest in all else."""

    name = "sole-owner"
    overrides = ("swarm.target_replicas=1",)
    claims_column = True

    def values(self, scene: Scene) -> Values:
        return scene.trained if scene.honest else scene.base - np.float32(SPOILT) * scene.change


class SoleFlip(SoleOwner):
    """The same, but goes the other way no further than honest training would have gone its own."""

    name = "sole-flip"

    def values(self, scene: Scene) -> Values:
        return scene.trained if scene.honest else scene.base - scene.change


class SoleNoise(SoleOwner):
    """Hands in noise for its columns, as large as would go unnoticed where others trained them, too."""

    name = "sole-noise"

    def values(self, scene: Scene) -> Values:
        return scene.trained if scene.honest else _noise(scene)


class Copy(Attack):
    """Hands in what another peer trained."""

    name = "copy"

    def values(self, scene: Scene) -> Values:
        return scene.honest[0].copy() if scene.honest else scene.base


def _noise(scene: Scene) -> Values:
    noise = scene.rng.standard_normal(len(scene.base), np.float32)
    size = UNNOTICED * float(np.linalg.norm(scene.change)) / float(np.linalg.norm(noise))
    return scene.base + np.float32(size) * noise
