"""Re-layout of stacked FP4 experts at load, so that kernels widen weights in registers.

    block      128 neighbouring input channels of a row (the last one is filled up with zeros)
    word       16 bits that hold channels c, 32 + c, 64 + c and 96 + c of a block, c = 0 .. 31
    panel      [slots, blocks, rows, 32] words: a tile of rows of one block is one run of memory
    scales     [slots, blocks, rows] 32-bit: byte p scales channels 32 p .. 32 p + 31 of a block:
               the UE8M0 byte + 126, modulo 256

The four codes of a word lie where a mask and at most one shift bring sign, exponent and mantissa of
the first three to their places in a bfloat16; the fourth takes what bits are left:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    code   s0  e3  s3  s1  f3  m3  s2  e0  f0  m0  e1  f1  m1  e2  f2  m2

(s sign, e and f the two exponent bits, m mantissa). The bfloat16 so made is 2^126 times too small,
which one exact product makes good: with the scale times 2^126, whose exponent bits in a bfloat16
are the stored byte. Scales above 2 take two products. Nothing is stored twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["BLOCK", "PANEL_ROWS", "PLANE", "PreparedExperts", "prepare_experts"]

BLOCK = 128
PLANE = BLOCK // 4  # words of a row in a block
LARGEST_NARROW = 128  # UE8M0 byte of 2
PANEL_ROWS = 256  # stored rows are a multiple of it, so that tiles need no masks


@dataclass(frozen=True)
class PreparedExperts:
    """A stack of experts' matrices on a device; satisfies `values.Matrix`.

    Attributes:
        payload: `fp4_panel`: [slots, blocks, rows, 32] int16, see the top of this module; `plain`:
            [slots, out, in] bfloat16.
        scale: [slots, blocks, rows] int32, or None.
        format: `fp4_panel` or `plain`.
        shape: (out, in) of each, without filling.
        rounds_input: the weight was stored quantised, so inputs of its product are rounded to fp8.
        wide_scales: some scale is above 2.
    """

    payload: Tensor
    scale: Tensor | None
    format: str
    shape: tuple[int, int]
    rounds_input: bool
    wide_scales: bool = False

    def slot(self, index: int) -> PreparedExperts:
        """Return the stack of one slot alone, the same memory."""
        scale = None if self.scale is None else self.scale[index : index + 1]
        return replace(self, payload=self.payload[index : index + 1], scale=scale)


def prepare_experts(matrix: Matrix, device: torch.device | str) -> PreparedExperts:
    """Return stacked experts [slots, out, in] on a device, in the layout their products read.

    `fp4_row` becomes panels, `fp8_tile` becomes bfloat16 (exact, and twice as large: V4.1 has no
    such experts, small models do), `plain` stays as it is. One slot at a time, so that no second
    copy of a layer is needed beside the result. May wait for the device: it runs when weights are
    loaded. A prepared stack is only moved.

    Raises:
        KernelInputError: another format, or tensors that do not fit it.
    Source: reference.moe.widen.
    """
    if isinstance(matrix, PreparedExperts):
        moved = None if matrix.scale is None else matrix.scale.to(device)
        return replace(matrix, payload=matrix.payload.to(device), scale=moved)
    formats = ("plain", "fp8_tile", "fp4_row")
    check_value("matrix.format", matrix.format, matrix.format in formats, " or ".join(formats))
    payload, scale = matrix.payload, matrix.scale
    out, channels = matrix.shape
    if matrix.format == "plain":
        shape = (None, out, channels)
        check_tensor(
            "matrix.payload",
            payload,
            shape=shape,
            dtype=torch.bfloat16,
            contiguous=False,
            anywhere=True,
        )
        return PreparedExperts(
            payload.to(device).contiguous(), None, "plain", matrix.shape, rounds_input=False
        )
    if scale is None:
        raise KernelInputError(f"`matrix.scale` is None; the format {matrix.format} needs one.")
    if matrix.format == "fp8_tile":
        return _from_tiles(payload, scale, matrix.shape, device)
    return _from_rows(payload, scale, matrix.shape, device)


def _from_tiles(
    payload: Tensor, scale: Tensor, shape: tuple[int, int], device: torch.device | str
) -> PreparedExperts:
    out, channels = shape
    slots, tiles = payload.shape[0], (-(-out // 32), -(-channels // 32))
    check_tensor(
        "matrix.payload",
        payload,
        shape=(slots, out, channels),
        dtype=torch.float8_e4m3fn,
        contiguous=False,
        anywhere=True,
    )
    check_tensor(
        "matrix.scale",
        scale,
        shape=(slots, *tiles),
        dtype=torch.uint8,
        contiguous=False,
        anywhere=True,
    )
    wide = torch.empty(payload.shape, dtype=torch.bfloat16, device=device)
    for slot in range(slots):
        factors = torch.exp2(scale[slot].to(device).float() - 127)
        factors.masked_fill_(scale[slot].to(device) == 255, float("nan"))
        factors = factors.repeat_interleave(32, 0)[:out].repeat_interleave(32, 1)[:, :channels]
        wide[slot] = payload[slot].to(device).float() * factors
    return PreparedExperts(wide, None, "plain", shape, rounds_input=True)


def _from_rows(
    payload: Tensor, scale: Tensor, shape: tuple[int, int], device: torch.device | str
) -> PreparedExperts:
    out, channels = shape
    slots = payload.shape[0]
    check_value("matrix.shape", shape, channels % 32 == 0, "whole groups of 32 channels")
    check_tensor(
        "matrix.payload",
        payload,
        shape=(slots, out, channels // 2),
        dtype=(torch.uint8, torch.int8),
        contiguous=False,
        anywhere=True,
    )
    check_tensor(
        "matrix.scale",
        scale,
        shape=(slots, out, channels // 32),
        dtype=torch.uint8,
        contiguous=False,
        anywhere=True,
    )
    blocks = -(-channels // BLOCK)
    rows = -(-out // PANEL_ROWS) * PANEL_ROWS
    panels = torch.zeros((slots, blocks, rows, PLANE), dtype=torch.int16, device=device)
    words = torch.zeros((slots, blocks, rows), dtype=torch.int32, device=device)
    wide = scale.numel() > 0 and int(scale.max()) > LARGEST_NARROW
    for slot in range(slots):
        scales = scale[slot].to(device)
        panels[slot, :, :out] = _words(payload[slot].to(device).view(torch.uint8), blocks)
        words[slot, :, :out] = _scale_words(scales + 126, blocks)
    return PreparedExperts(panels, words, "fp4_panel", shape, rounds_input=True, wide_scales=wide)


def _words(packed: Tensor, blocks: int) -> Tensor:
    """Return words [blocks, out, 32] int16 of bytes [out, in / 2]."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    filled = torch.nn.functional.pad(codes, (0, blocks * BLOCK - codes.shape[-1]))
    code = filled.view(-1, blocks, 4, PLANE).permute(2, 1, 0, 3)  # [plane, block, row, word]
    sign, magnitude = code >> 3, code & 7
    word = torch.zeros_like(sign[0])
    for plane in range(3):
        word |= (sign[plane] << (15 - 3 * plane)) | (magnitude[plane] << (6 - 3 * plane))
    word |= (sign[3] << 13) | ((magnitude[3] >> 2) << 14) | ((magnitude[3] & 3) << 10)
    return (word - ((word & 0x8000) << 1)).to(torch.int16)


def _scale_words(scale: Tensor, blocks: int) -> Tensor:
    """Return words [blocks, out] int32 of scale bytes [out, in / 32]."""
    filled = torch.nn.functional.pad(scale.to(torch.int64), (0, blocks * 4 - scale.shape[-1]))
    group = filled.view(-1, blocks, 4).permute(2, 1, 0)  # [plane, block, row]
    word = group[0] | (group[1] << 8) | (group[2] << 16) | (group[3] << 24)
    return (word - ((word & 0x80000000) << 1)).to(torch.int32)
