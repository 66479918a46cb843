"""Weights on a device, in the layout their products read.

    rows      payload and scale as stored: `plain` weights
    blocks    `fp8_tile` weights, cut into blocks of 16 outputs by 128 input columns, each 2 KB in
              one run, and a column of blocks in one run:
                  payload  [words, ceil(out / 16), 4, 512] float8_e4m3fn, words = ceil(in / 128)
                  scale    [words, ceil(out / 32), 4] uint8, one 32-bit word for 128 columns
              Places behind the last output or column hold zero.

A block is a tile of Hopper's matrix instruction, 16 outputs by 16 columns, eight times. It gives a
thread 8 values of such a tile; here 16 bytes in a row are what one thread holds of two tiles, each
16-bit word a value of the one and its like of the other. So bytes go from memory to the registers
they are needed in, 512 of a warp at a time, and words are widened two at a time.

    place in a block, slowest first     4 pairs of tiles | 8 rows | 4 threads |
                                        2 halves of columns | 2 halves of rows | 2 columns | 2 tiles
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["LARGEST_SCALE", "PreparedMatrix", "prepare_matrix", "stored_rows"]

# Kernels widen a value by a bfloat16 factor 2^(e - 127 + 120): larger scale bytes overflow it.
LARGEST_SCALE = 134


@dataclass(frozen=True)
class PreparedMatrix:
    """A weight on a device; satisfies `values.Matrix` but for the layout of its tensors.

    Attributes:
        payload, scale, layout: as the top of this module says.
        format: as in `values.Matrix`.
        shape: (out, in).
    """

    payload: Tensor
    scale: Tensor | None
    format: str
    shape: tuple[int, int]
    layout: str = "rows"


def prepare_matrix(matrix: Matrix, device: torch.device | str) -> PreparedMatrix:
    """Return a `plain` or `fp8_tile` weight on `device` in the layout its products read.

    Runs once, when a weight is loaded; a prepared matrix is only moved.

    Args:
        matrix: payload [out, in]: bfloat16 or float32 (`plain`), or float8_e4m3fn with scale
            [ceil(out / 32), ceil(in / 32)] uint8 (`fp8_tile`). In memory of any device.
        device: where it goes.
    Raises:
        KernelInputError: another format, tensors that do not fit it, a NaN among fp8 values, or a
            scale above 2^7. Of scales below 2^-107 products lose bits, as float32 does there.
    """
    check_value(
        "matrix.format", matrix.format, matrix.format in ("plain", "fp8_tile"), "plain or fp8_tile"
    )
    if isinstance(matrix, PreparedMatrix) and matrix.layout == "blocks":
        moved = None if matrix.scale is None else matrix.scale.to(device)
        return replace(matrix, payload=matrix.payload.to(device), scale=moved)
    outputs, columns = matrix.shape
    plain = matrix.format == "plain"
    check_tensor(
        "matrix.payload",
        matrix.payload,
        shape=(outputs, columns),
        dtype=(torch.bfloat16, torch.float32) if plain else torch.float8_e4m3fn,
        contiguous=False,
        anywhere=True,
    )
    if plain:
        payload = matrix.payload.to(device).contiguous()
        return PreparedMatrix(payload, None, "plain", matrix.shape)
    if matrix.scale is None:
        raise KernelInputError("`matrix.scale` is None; the format fp8_tile needs one.")
    tiles = (-(-outputs // 32), -(-columns // 32))
    check_tensor(
        "matrix.scale",
        matrix.scale,
        shape=tiles,
        dtype=torch.uint8,
        contiguous=False,
        anywhere=True,
    )
    largest = int(matrix.scale.max()) if matrix.scale.numel() else 0
    check_value("matrix.scale.max()", largest, largest <= LARGEST_SCALE, f"<= {LARGEST_SCALE}")
    stored = matrix.payload.to(device)
    # Kernels widen the code of NaN as if it were 480.
    num_nan = int(((stored.view(torch.uint8) & 0x7F) == 0x7F).sum()) if stored.numel() else 0
    check_value("the number of NaN in matrix.payload", num_nan, num_nan == 0, "finite weights")
    payload = _blocks(stored)
    scale = _scale_words(matrix.scale.to(device))
    return PreparedMatrix(payload, scale, "fp8_tile", matrix.shape, "blocks")


def _blocks(payload: Tensor) -> Tensor:
    outputs, columns = payload.shape
    missing = (0, -columns % 128, 0, -outputs % 16)
    padded = torch.nn.functional.pad(payload.view(torch.uint8), missing)
    # [block, half of rows, row, word, pair, tile, half of columns, thread, column]
    places = padded.view(padded.shape[0] // 16, 2, 8, padded.shape[1] // 128, 4, 2, 2, 4, 2)
    ordered = places.permute(3, 0, 4, 2, 7, 6, 1, 8, 5).contiguous()
    stored: Tensor = ordered.view(ordered.shape[0], ordered.shape[1], 4, 512)
    return stored.view(torch.float8_e4m3fn)


def stored_rows(payload: Tensor) -> Tensor:
    """Return a payload in blocks as rows of outputs, padding included: the inverse of storing."""
    words, blocks = payload.shape[:2]
    places = payload.view(torch.uint8).view(words, blocks, 4, 8, 4, 2, 2, 2, 2)
    rows = places.permute(1, 6, 3, 0, 2, 8, 5, 4, 7).reshape(blocks * 16, words * 128)
    return rows.view(torch.float8_e4m3fn)


def _scale_words(scale: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4), value=127)
    words: Tensor = padded.unflatten(1, (-1, 4)).transpose(0, 1).contiguous()
    return words
