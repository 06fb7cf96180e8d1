"""Activations that are computed again in the backward pass instead of kept until then.

`recomputed` keeps a function's inputs alone. `recomputed_but_products` also keeps what is costly: the results of matrix
products and of attention; norms, rotations, casts and the routing are made again from those. Both give the values and
gradients that the plain call gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")

_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recomputed(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), all of it once more in the backward pass."""
    return cast(Result, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))


def recomputed_but_products(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), once more in the backward pass save for matrix products and attention."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return cast(Result, result)


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
