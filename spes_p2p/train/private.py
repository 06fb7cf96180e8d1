"""What a peer must save beside the committed state to go on exactly: values in training, moments, counts.

`private_state` gives a tree of plain values and the very tensors that are trained, on their device, so that saving them
one after the other takes no memory; it is the same at every rank. `load_private_state` takes a tree back, on rank 0
from the tree and on the others by broadcast. Foreign experts are not in it: they come with the committed state, which
must have been adopted first. Values and moments are saved as they are kept; a peer that keeps them otherwise turns
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spes_p2p.errors import CheckpointError
from spes_p2p.experts.masters import Halves
from spes_p2p.train.ddp import broadcast_array
from spes_p2p.train.learner import Learner
from spes_p2p.train.moment_store import Stored, form_of, names_of
from spes_p2p.train.optim import Group, values_of

FORMAT = 2
HALVES = "upper", "lower"
"""Of values that are kept so (experts/masters.py), in the place of `value`."""
_FIX = "remove this checkpoint: the peer continues from an older one, or with fresh optimizer moments"


def private_state(learner: Learner) -> dict[str, Any]:
    """The tree; see `load_private_state`. The next step changes it: save it, or copy it, before."""
    return {
        "format": FORMAT,
        "owned": learner.owned,
        "groups": [_group_state(group) for group in learner.optimizer.groups],
    }


def outline(learner: Learner, state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a saved tree but its tensors, as plain values, checked against the model.

    Raises CheckpointError where the tree is of another format or model.
    """
    try:
        if state["format"] != FORMAT:
            raise CheckpointError(f"the training state has format {state['format']}, not {FORMAT}", fix=_FIX)
        groups = [_group_outline(group) for group in state["groups"]]
        plain = {"step": state["step"], "round_steps": state["round_steps"], "owned": list(state["owned"])}
        _check_tensors(learner, state)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the training state is damaged: {error!r}", fix=_FIX) from error
    return {**plain, "groups": groups}


def load_private_state(learner: Learner, plain: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
    """Takes over a saved tree: `plain` is its outline, at every rank; `state` the tree itself, on rank 0 alone."""
    learner.set_owned(tuple(plain["owned"]), keep_moments=False, ramp_fresh=False)
    with learner.model.masters_in_fp32():
        _load_groups(learner, plain, state)


def _load_groups(learner: Learner, plain: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
    for index, group in enumerate(learner.optimizer.groups):
        saved, tensors = plain["groups"][index], None if state is None else state["groups"][index]["tensors"]
        moments: dict[str, Stored] = {}
        for name, place in group.tensors.items():
            entry = None if tensors is None else tensors[name]
            place.values.copy_(_received_values(learner, entry, place.shape, name in saved["halved"]))
            if saved["steps"]:
                kept = names_of(saved["forms"][name])
                moments[name] = {key: _received(learner, entry, key, place.shape, torch.float32) for key in kept}
        learner.optimizer.restore(group.column, saved["ramped"], saved["steps"], moments)


def _group_outline(group: Mapping[str, Any]) -> dict[str, Any]:
    forms = {name: form_of(entry) for name, entry in group["tensors"].items()}
    halved = [name for name, entry in group["tensors"].items() if "upper" in entry]
    return {**{key: group[key] for key in ("column", "ramped", "steps")}, "forms": forms, "halved": halved}


def _group_state(group: Group) -> dict[str, Any]:
    tensors = {name: values_of(place) | group.moments.get(name, {}) for name, place in group.tensors.items()}
    return {"column": group.column, "ramped": group.ramped, "steps": group.steps, "tensors": tensors}


def _received_values(
    learner: Learner, entry: Mapping[str, Tensor] | None, shape: torch.Size, are_halved: bool
) -> Tensor:
    if not are_halved:
        return _received(learner, entry, "value", shape, torch.float32)
    upper, lower = (_received(learner, entry, key, shape, torch.int16) for key in HALVES)
    return Halves(upper, lower).read()


def _received(
    learner: Learner, entry: Mapping[str, Tensor] | None, key: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    flat = None if entry is None else entry[key].reshape(-1).cpu().numpy()
    received = torch.from_numpy(broadcast_array(learner.ranks, flat, shape.numel()))
    return received.view(shape).to(learner.ranks.device, dtype, copy=True)


def _check_tensors(learner: Learner, state: Mapping[str, Any]) -> None:
    """Names, shapes and types as this model would save them with these columns."""
    shared = {name: tensor.shape for name, tensor in learner.optimizer.groups[0].tensors.items()}
    wanted = [None, *state["owned"]]
    if [group["column"] for group in state["groups"]] != wanted:
        raise CheckpointError(f"the training state does not hold the groups {wanted}", fix=_FIX)
    for group in state["groups"]:
        shapes = shared if group["column"] is None else _column_shapes(learner)
        for name, shape in shapes.items():
            entry = group["tensors"][name]
            kept = names_of(form_of(entry)) if group["steps"] else ()
            values = dict.fromkeys(HALVES, torch.int16) if "upper" in entry else {"value": torch.float32}
            for key, dtype in (values | dict.fromkeys(kept, torch.float32)).items():
                _check_tensor(f"{name}/{key}", entry[key], shape, dtype)


def _column_shapes(learner: Learner) -> dict[str, torch.Size]:
    """The tensors of an owned column by their names in the optimizer."""
    banks = enumerate(learner.model.banks)
    return {f"layers.{at}.{part}": torch.Size(shape) for at, bank in banks for part, shape in bank.shapes.items()}


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"the training state has {name} as {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape "
            f"{tuple(shape)}",
            fix=_FIX,
        )
