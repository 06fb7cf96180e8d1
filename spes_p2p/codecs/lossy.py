"""The lossy codecs: a change of flat fp32 values to bytes, and back to values that are the same bits everywhere.

A change is cut into blocks (sizes.py), each with one bf16 scale; the last block of a tile may be shorter. All numbers
are little-endian:

    bf16   every value rounded to bf16
    int8   the scales, then every value as a signed byte q: q * scale, |q| <= 127
    int4   the scales, then pairs of values in a byte, the first in the low half: (code - 8) * scale, |code - 8| <= 7
    ternary  the scales, then five values in a byte, the first lowest: digit * 3^place added up; (digit - 1) * scale

A scale is the largest size in its block over the largest code, rounded up to bf16 so that nothing is clipped; codes are
rounded to the nearest, halves to even. That of `ternary` is the mean of the sizes that are not sent as zero: those
above half of the mean of all that are above three quarters of the mean of what is not zero, as two steps of Lloyd's
algorithm find them. What rounding loses is the caller's to keep (error feedback), so a stochastic rounding, which loses
nothing on average, would only add noise.
Decoding is one conversion and one fp32 multiplication a value, each exact or rounded on its own: the same bits on every
machine, on CPU and GPU. A value that is not finite makes its block's scale infinite or NaN: what is decoded then is
infinite, which who receives it finds.

Works on whole tiles with torch, on the device of what it is given. Knows no state, residual or network.

Legend: N values of a tile, B blocks, G values of a block, Y bytes, D digits of a byte.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spes_p2p.codecs.sizes import BLOCK_VALUES, DIGITS, Codec, encoded_bytes, num_blocks

_INT8_LARGEST, _INT4_LARGEST = 127, 7
_POWERS = 3 ** torch.arange(DIGITS)
_DIGITS_OF = (torch.arange(256)[:, None] // _POWERS % 3).to(torch.uint8)  # by byte, also of those that nobody writes


def encode(codec: Codec, change: NDArray[np.float32]) -> bytes:
    """The bytes of a change: `sizes.encoded_bytes` many. `codec` is not fp32, which sends values."""
    if not len(change):
        return b""
    with torch.no_grad():
        data = _ENCODERS[codec](torch.from_numpy(np.ascontiguousarray(change)))
    return data.numpy().tobytes()


def decode(codec: Codec, data: bytes | memoryview, values: int) -> NDArray[np.float32]:
    """The change that `data` stands for, [values]. The caller has checked the length of `data`."""
    if len(data) != encoded_bytes(codec, values):
        raise ValueError(f"{len(data)} bytes for {values} values in {codec}")
    if not values:
        return np.empty(0, np.float32)
    with torch.no_grad():
        decoded = _DECODERS[codec](torch.from_numpy(np.frombuffer(data, np.uint8).copy()), values)
    found: NDArray[np.float32] = decoded.numpy()
    found[~np.isfinite(found)] = np.inf  # of NaN each machine has its own bits
    return found


def encode_bf16(x_N: Tensor) -> Tensor:
    """Bytes of a change."""
    return x_N.to(torch.bfloat16).view(torch.uint8)


def decode_bf16(data: Tensor, values: int) -> Tensor:
    """[values] fp32."""
    return data.view(torch.bfloat16).float()


def encode_int8(x_N: Tensor) -> Tensor:
    """Bytes of a change."""
    x_BG = _blocks(x_N, "int8")
    scale_B = _scales(x_BG, _INT8_LARGEST)
    q_BG = _codes(x_BG, scale_B, _INT8_LARGEST).to(torch.int8)
    return torch.cat((scale_B.view(torch.uint8), q_BG.flatten()[: len(x_N)].view(torch.uint8)))


def decode_int8(data: Tensor, values: int) -> Tensor:
    """[values] fp32."""
    scale_B, codes_N = _parts(data, "int8", values)
    return _scaled(codes_N.view(torch.int8).float(), scale_B, "int8")


def encode_int4(x_N: Tensor) -> Tensor:
    """Bytes of a change."""
    x_BG = _blocks(x_N, "int4")
    scale_B = _scales(x_BG, _INT4_LARGEST)
    code_N = (_codes(x_BG, scale_B, _INT4_LARGEST) + 8).to(torch.uint8).flatten()[: len(x_N)]
    low, high = F.pad(code_N, (0, len(x_N) % 2)).view(-1, 2).unbind(1)
    return torch.cat((scale_B.view(torch.uint8), low | high << 4))


def decode_int4(data: Tensor, values: int) -> Tensor:
    """[values] fp32."""
    scale_B, pairs = _parts(data, "int4", values)
    code_N = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten()[:values]
    return _scaled(code_N.float() - 8, scale_B, "int4")


def encode_ternary(x_N: Tensor) -> Tensor:
    """Bytes of a change."""
    x_BG = _blocks(x_N, "ternary")
    size_BG = x_BG.abs()
    mean_B = _means(size_BG, ~(size_BG <= 0))  # NaN, too
    above_B = 0.75 * mean_B  # what is best of normal values
    scale_B = _means(size_BG, size_BG > above_B[:, None])
    is_sent_BG = size_BG > scale_B[:, None] / 2  # once more, by that: few are much larger than the others
    scale_B = _means(size_BG, is_sent_BG)
    scale_B = torch.where(mean_B.isfinite(), scale_B, torch.inf).to(torch.bfloat16)
    digit_N = torch.where(is_sent_BG, x_BG.sign(), 0).add(1).to(torch.uint8).flatten()[: len(x_N)]
    digit_YD = F.pad(digit_N, (0, -len(x_N) % DIGITS)).view(-1, DIGITS)
    packed = (digit_YD * _POWERS.to(x_N.device, torch.uint8)).sum(dim=1, dtype=torch.uint8)
    return torch.cat((scale_B.view(torch.uint8), packed))


def decode_ternary(data: Tensor, values: int) -> Tensor:
    """[values] fp32."""
    scale_B, packed = _parts(data, "ternary", values)
    digit_N = _DIGITS_OF.to(data.device)[packed.int()].flatten()[:values]
    return _scaled(digit_N.float() - 1, scale_B, "ternary")


def _blocks(x_N: Tensor, codec: Codec) -> Tensor:
    """[B, G], filled up with zeros."""
    block = BLOCK_VALUES[codec]
    return F.pad(x_N, (0, -len(x_N) % block)).view(-1, block)


def _scales(x_BG: Tensor, largest: int) -> Tensor:
    """bf16 [B], never less than the largest size over `largest`."""
    exact_B = x_BG.abs().amax(dim=1) / largest
    near_B = exact_B.to(torch.bfloat16)
    above_B = (near_B.view(torch.int16) + 1).view(torch.bfloat16)  # the next larger number: these are not negative
    return torch.where(near_B.float() < exact_B, above_B, near_B)


def _means(x_BG: Tensor, chosen_BG: Tensor) -> Tensor:
    """Of the chosen ones, [B]; 0 where there are none. Each sum is rounded on its own: the same bits everywhere."""
    sum_BG = torch.where(chosen_BG, x_BG, 0)
    while sum_BG.shape[1] > 1:  # G is a power of two
        left_BG, right_BG = sum_BG.chunk(2, dim=1)
        sum_BG = left_BG + right_BG
    return sum_BG[:, 0] / chosen_BG.sum(dim=1).clamp(min=1)


def _codes(x_BG: Tensor, scale_B: Tensor, largest: int) -> Tensor:
    """Whole numbers, fp32; zero where the scale is zero or not finite."""
    q_BG = (x_BG / scale_B.float()[:, None]).round_()
    return q_BG.nan_to_num_(0.0, 0.0, 0.0).clamp_(-largest, largest)


def _parts(data: Tensor, codec: Codec, values: int) -> tuple[Tensor, Tensor]:
    """(scales bf16 [B], the rest)."""
    end = 2 * num_blocks(codec, values)
    return data[:end].view(torch.bfloat16), data[end:].clone()  # a copy of its own: views need alignment


def _scaled(code_N: Tensor, scale_B: Tensor, codec: Codec) -> Tensor:
    scale_N = scale_B.float().repeat_interleave(BLOCK_VALUES[codec])[: len(code_N)]
    return code_N * scale_N


_ENCODERS = {"bf16": encode_bf16, "int8": encode_int8, "int4": encode_int4, "ternary": encode_ternary}
_DECODERS = {"bf16": decode_bf16, "int8": decode_int8, "int4": decode_int4, "ternary": decode_ternary}
