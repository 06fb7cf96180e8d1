"""What a peer must save beside the committed state to go on exactly: values in training, moments, counts.

`private_state` gives a tree of plain values and the very tensors that are trained, on their device, so that saving them
one after the other takes no memory; it is the same at every rank, but for moments and values that are dealt to them
(kept_gradients.py): rank 0 gets these in host memory. `load_private_state` takes a tree back, on rank 0 from the tree
and on the others by broadcast. Foreign experts are not in it: they come with the committed state, which must have been
adopted first. Values and moments are saved as they are kept; a peer that keeps them otherwise turns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spes_p2p.errors import CheckpointError
from spes_p2p.experts.masters import Halves
from spes_p2p.experts.shards import write
from spes_p2p.train.ddp import broadcast_array
from spes_p2p.train.kept_gradients import KeptGradients
from spes_p2p.train.moment_store import Stored, form_of, stored_shapes
from spes_p2p.train.rank import RankTrainer

FORMAT = 2
HALVES = "upper", "lower"
"""Of values that are kept so (experts/masters.py), in the place of `value`."""
_FIX = "remove this checkpoint: the peer continues from an older one, or with fresh optimizer moments"


def private_state(trainer: RankTrainer) -> dict[str, Any]:
    """The tree; see `load_private_state`. The next step changes it: save it, or copy it, before."""
    return {
        "format": FORMAT,
        "step": trainer.step,
        "round_steps": trainer.round_steps,
        "owned": trainer.owned,
        "groups": [_group_state(trainer, group) for group in trainer.optimizer.groups],
    }


def outline(trainer: RankTrainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a saved tree but its tensors, as plain values, checked against the model.

    Raises CheckpointError where the tree is of another format or model.
    """
    try:
        if state["format"] != FORMAT:
            raise CheckpointError(f"the training state has format {state['format']}, not {FORMAT}", fix=_FIX)
        groups = [_group_outline(group) for group in state["groups"]]
        plain = {"step": state["step"], "round_steps": state["round_steps"], "owned": list(state["owned"])}
        _check_tensors(trainer, state)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the training state is damaged: {error!r}", fix=_FIX) from error
    return {**plain, "groups": groups}


def load_private_state(trainer: RankTrainer, plain: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
    """Takes over a saved tree: `plain` is its outline, at every rank; `state` the tree itself, on rank 0 alone."""
    trainer.set_owned(tuple(plain["owned"]), keep_moments=False, ramp_fresh=False)
    with trainer.model.masters_in_fp32():
        _load_groups(trainer, plain, state)
    if trainer.deals_values and isinstance(trainer.forward, KeptGradients):  # each rank has shown its own rows alone
        trainer.forward.fetch()
    trainer.step, trainer.round_steps = plain["step"], plain["round_steps"]


def _load_groups(trainer: RankTrainer, plain: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
    for index, group in enumerate(trainer.optimizer.groups):
        saved, tensors = plain["groups"][index], None if state is None else state["groups"][index]["tensors"]
        moments: dict[str, Stored] = {}
        for name, parameter in group.tensors.items():
            entry = None if tensors is None else tensors[name]
            write(parameter, _received_values(trainer, entry, parameter.shape, name in saved["halved"]))
            if saved["steps"]:
                shapes = stored_shapes(parameter.shape, saved["forms"][name])
                whole = {key: _received(trainer, entry, key, *kept) for key, kept in shapes.items()}
                moments[name] = trainer.optimizer.kept(group, name, whole)
        trainer.optimizer.restore(group.column, saved["ramped"], saved["steps"], moments)


def _group_outline(group: Mapping[str, Any]) -> dict[str, Any]:
    forms = {name: form_of(entry) for name, entry in group["tensors"].items()}
    halved = [name for name, entry in group["tensors"].items() if "upper" in entry]
    return {**{key: group[key] for key in ("column", "ramped", "steps")}, "forms": forms, "halved": halved}


def _group_state(trainer: RankTrainer, group: Any) -> dict[str, Any]:
    tensors = {
        name: _whole_values(trainer, group, name)
        | (trainer.whole_moments(group, name) if name in group.moments else {})
        for name in group.tensors
    }
    return {"column": group.column, "ramped": group.ramped, "steps": group.steps, "tensors": tensors}


def _whole_values(trainer: RankTrainer, group: Any, name: str) -> dict[str, Tensor]:
    values = trainer.optimizer.values(group, name, whole=True)
    if not trainer.deals_values:
        return values
    return {} if trainer.ranks.rank else {key: one.to("cpu") for key, one in values.items()}


def _received_values(
    trainer: RankTrainer, entry: Mapping[str, Tensor] | None, shape: torch.Size, are_halved: bool
) -> Tensor:
    if not are_halved:
        return _received(trainer, entry, "value", shape, torch.float32)
    upper, lower = (_received(trainer, entry, key, shape, torch.int16) for key in HALVES)
    return Halves(upper, lower).read()


def _received(
    trainer: RankTrainer, entry: Mapping[str, Tensor] | None, key: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    flat = None if entry is None else entry[key].reshape(-1).cpu().numpy()
    received = torch.from_numpy(broadcast_array(trainer.ranks, flat, shape.numel()))  # other ranks get codes as fp32
    return received.view(shape).to(trainer.ranks.device, dtype, copy=True)


def _check_tensors(trainer: RankTrainer, state: Mapping[str, Any]) -> None:
    """Names, shapes and types as this model would save them with these columns."""
    shared = {name: tensor.shape for name, tensor in trainer.optimizer.groups[0].tensors.items()}
    wanted = [None, *state["owned"]]
    if [group["column"] for group in state["groups"]] != wanted:
        raise CheckpointError(f"the training state does not hold the groups {wanted}", fix=_FIX)
    for group in state["groups"]:
        shapes = shared if group["column"] is None else trainer.trained.column_shapes()
        for name, shape in shapes.items():
            entry = group["tensors"][name]
            kept = stored_shapes(shape, form_of(entry)) if group["steps"] else {}
            values = dict.fromkeys(HALVES, torch.int16) if "upper" in entry else {"value": torch.float32}
            wanted_of = {key: (shape, dtype) for key, dtype in values.items()} | kept
            for key, (own, dtype) in wanted_of.items():
                _check_tensor(f"{name}/{key}", entry[key], own, dtype)


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"the training state has {name} as {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape "
            f"{tuple(shape)}",
            fix=_FIX,
        )
