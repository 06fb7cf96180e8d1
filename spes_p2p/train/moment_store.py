"""How the two moments of a tensor are kept, and the step that uses them: in fp32, or in 8 bits with scales.

8 bits are bitsandbytes' (Dettmers et al., arXiv 2110.02861): a code of its dynamic map for each value, and an fp32
scale for every 256 of them; 2.03 bytes a trained value instead of 8. Tensors of fewer than 4096 values stay fp32.
Moments are kept as named tensors, so that whoever counts or saves them need not know their kind. Gradients may be
bf16: a step makes them fp32 a piece at a time.

Leaves out: which tensors there are, and with which learning rate and count they step (optim.py); Muon (muon.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from spes_p2p.config.schema import OptimizerConfig
from spes_p2p.errors import ConfigError, first_line

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum"
"""In their place where the tensor is stepped by Muon."""
BLOCK_VALUES = 256
"""Values that share a scale."""
FUSED_ON = "cpu", "cuda"
"""Devices on which AdamW is one kernel."""
SMALLEST_VALUES = 4096
"""Tensors with fewer values are kept in fp32."""
PIECE_VALUES = 2**26
"""Most gradient values of another dtype that are turned into fp32 at once."""
_SCALES = {moment: f"{moment}_scale" for moment in MOMENTS}

Stored = dict[str, Tensor]
"""`exp_avg` and `exp_avg_sq`: fp32, or uint8 codes and the scales `exp_avg_scale` and `exp_avg_sq_scale`; or `momentum`
alone, fp32."""
Form = Literal["fp32", "8bit", "momentum"]


class Piece(NamedTuple):
    """A tensor, or a part of a flat one, to be stepped in place."""

    values: Tensor
    gradient: Tensor
    moments: Stored
    matrices: int = 0
    """How many matrices of experts or attention lie one below the other in it; 0 where it is something else."""


class Kind(Protocol):
    """One way to keep moments."""

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where this kind does not run on the device."""

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        """Moments of `values`, which hold so many matrices (see Piece), before the first step."""

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        """Moments of any kind in this one; the same tensors where they are of this kind already."""

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        """One AdamW step in place, the `steps + 1`-th that these moments see."""


def is_packed(moments: Stored) -> bool:
    """Whether these are codes of 8 bits."""
    return _SCALES[MOMENTS[0]] in moments


def form_of(moments: Stored) -> Form:
    """How these are kept."""
    if MOMENTUM in moments:
        return "momentum"
    return "8bit" if is_packed(moments) else "fp32"


def unpacked(moments: Stored) -> Stored:
    """Both moments in fp32: the very tensors where they are kept so; zeros in the place of momentum."""
    if MOMENTUM in moments:
        return {which: torch.zeros_like(moments[MOMENTUM]) for which in MOMENTS}
    return {which: _dequantised(moments, which) for which in MOMENTS} if is_packed(moments) else moments


def stored_shapes(shape: torch.Size, form: Form) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of everything that is kept for a tensor of `shape`."""
    if form == "momentum":
        return {MOMENTUM: (shape, torch.float32)}
    if form == "fp32":
        return dict.fromkeys(MOMENTS, (shape, torch.float32))
    scales = torch.Size((-(-shape.numel() // BLOCK_VALUES),))
    codes = dict.fromkeys(MOMENTS, (shape, torch.uint8))
    return codes | {_SCALES[which]: (scales, torch.float32) for which in MOMENTS}


def cut(name: str, shape: torch.Size, rows: slice) -> slice:
    """Where some rows of a tensor of `shape` are in what is kept under `name`: blocks of scales must end with rows."""
    if name not in _SCALES.values():
        return rows
    width = shape[1:].numel()
    return slice(rows.start * width // BLOCK_VALUES, -(-rows.stop * width // BLOCK_VALUES))


class Float32:
    """torch's AdamW, fused where the device has it.

    As a function: its class loads the compiler when it is made, for seconds, in which no other thread runs.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def check(self, device: torch.device) -> None:
        pass  # torch runs wherever its tensors are

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        return _zeros(values, packed=False)

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        return unpacked(moments)

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        for batch in _batches(pieces):
            self._update_batch(batch, steps, lr)

    def _update_batch(self, pieces: list[Piece], steps: int, lr: float) -> None:
        device, config = pieces[0].values.device, self._config
        fused = device.type in FUSED_ON
        adamw(
            [piece.values for piece in pieces],
            [piece.gradient.float() for piece in pieces],
            [piece.moments[MOMENTS[0]] for piece in pieces],
            [piece.moments[MOMENTS[1]] for piece in pieces],
            [],
            # counts that are not part of a fused kernel are read by the host
            list(torch.full((len(pieces),), float(steps), device=device if fused else None).unbind()),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )


class EightBit:
    """bitsandbytes' blockwise AdamW for large tensors. Loading the library takes seconds: make one before training."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config, self._float32 = config, Float32(config)
        self._library = _bitsandbytes()

    def check(self, device: torch.device) -> None:
        if device.type != "meta":
            values, gradient = (torch.zeros(BLOCK_VALUES, device=device) for _ in range(2))
            trial = Piece(values, gradient, _zeros(values, packed=True))
            try:
                self._update_piece(trial, 0, 0.0)
            except (RuntimeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"optimizer.name is adamw8bit, which fails on {device}: {first_line(error)}",
                    fix="set optimizer.name=adamw, or install a bitsandbytes for this device",
                ) from error

    def fresh(self, values: Tensor, matrices: int = 0) -> Stored:
        return _zeros(values, packed=values.numel() >= SMALLEST_VALUES)

    def stored(self, moments: Stored, matrices: int = 0) -> Stored:
        moments = unpacked(moments) if MOMENTUM in moments else moments
        if is_packed(moments) or moments[MOMENTS[0]].numel() < SMALLEST_VALUES:
            return moments
        parts = [_quantised(moments[which], which) for which in MOMENTS]
        return parts[0] | parts[1]

    def update(self, pieces: list[Piece], steps: int, lr: float) -> None:
        self._float32.update([piece for piece in pieces if not is_packed(piece.moments)], steps, lr)
        for piece in _cut(piece for piece in pieces if is_packed(piece.moments)):
            self._update_piece(piece, steps, lr)

    def _update_piece(self, piece: Piece, steps: int, lr: float) -> None:
        config, (mean, square) = self._config, MOMENTS
        self._library.optimizer_update_8bit_blockwise(
            "adam",
            piece.gradient.float().contiguous(),  # its CUDA kernel takes it for a tensor of the values' type
            piece.values,
            piece.moments[mean],
            piece.moments[square],
            beta1=config.betas[0],
            beta2=config.betas[1],
            beta3=0.0,
            alpha=0.0,
            eps=config.eps,
            step=steps + 1,
            lr=lr,
            qmap1=_map(mean, piece.values.device),
            qmap2=_map(square, piece.values.device),
            absmax1=piece.moments[_SCALES[mean]],
            absmax2=piece.moments[_SCALES[square]],
            weight_decay=config.weight_decay,
        )


def _zeros(values: Tensor, packed: bool) -> Stored:
    shapes = stored_shapes(values.shape, "8bit" if packed else "fp32")
    return {name: torch.zeros(shape, dtype=dtype, device=values.device) for name, (shape, dtype) in shapes.items()}


def _cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same with gradients that are not fp32 in parts of at most PIECE_VALUES, which whole blocks make."""
    for piece in pieces:
        if piece.gradient.dtype == torch.float32:
            yield piece
            continue
        for start in range(0, piece.values.numel(), PIECE_VALUES):
            yield _part(piece, start, start + PIECE_VALUES)


def _part(piece: Piece, start: int, stop: int) -> Piece:
    values = piece.values.view(-1)
    moments = {name: kept.view(-1)[cut(name, values.shape, slice(start, stop))] for name, kept in piece.moments.items()}
    return Piece(values[start:stop], piece.gradient.reshape(-1)[start:stop], moments)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces to be stepped together: as many as PIECE_VALUES allows to be turned into fp32."""
    batch: list[Piece] = []
    turned = 0
    for piece in _cut(pieces):
        size = 0 if piece.gradient.dtype == torch.float32 else piece.gradient.numel()
        if batch and turned + size > PIECE_VALUES:
            yield batch
            batch, turned = [], 0
        batch.append(piece)
        turned += size
    if batch:
        yield batch


@cache
def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise ConfigError(
            f"optimizer.name is adamw8bit, which needs bitsandbytes: {first_line(error)}",
            fix="install it with scripts/venv.sh optim8bit, or set optimizer.name=adamw",
        ) from error


@cache
def _map(which: str, device: torch.device) -> Tensor:
    """The 256 values that codes stand for; means have a sign, means of squares have none."""
    signed = which == MOMENTS[0]
    values: Tensor = _bitsandbytes().create_dynamic_map(signed=signed).to(device)
    return values


def _quantised(values: Tensor, which: str) -> Stored:
    codes, state = _bitsandbytes().quantize_blockwise(
        values.contiguous(), code=_map(which, values.device), blocksize=BLOCK_VALUES
    )
    return {which: codes, _SCALES[which]: state.absmax}


def _dequantised(moments: Stored, which: str) -> Tensor:
    codes = moments[which]
    values: Tensor = _bitsandbytes().dequantize_blockwise(
        codes, absmax=moments[_SCALES[which]], code=_map(which, codes.device), blocksize=BLOCK_VALUES
    )
    return values
