"""Twins of `moe`. The dtype of the activations tells what is rounded.

bfloat16: every product is rounded to bfloat16, and inputs of quantised weights to fp8.
float32 and float64: nothing is rounded. `strict` changes nothing here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.moe.permute import Permutation
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix
from deepinfer_kernels_cuda.reference import linear as linear_twins
from deepinfer_kernels_cuda.reference.quant_activations import round_fp8_wide, scale_value
from deepinfer_kernels_cuda.values import ExpertWeights, Matrix

__all__ = ["combine", "experts", "permute", "route", "shared_expert", "widen"]


def route(
    x: Tensor, gate: Matrix, bias: Tensor, *, top_k: int, temperature: float, scale: float
) -> tuple[Tensor, Tensor]:
    """See `moe.route.route`; float64 x gives float64 weights."""
    logits = linear_twins.linear_float32(x, gate) / temperature
    score = (-torch.nn.functional.logsigmoid(-logits)).sqrt()
    # A stable sort leaves equal scores in the order of their ids.
    ids = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = score.gather(1, ids)
    return ids.int(), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def permute(ids: Tensor, num_slots: int, tile_rows: int) -> Permutation:
    """See `moe.permute.permute`; waits for the device, and lists the tiles in use alone."""
    flat = ids.flatten()
    known = (flat >= 0) & (flat < num_slots)
    counts = torch.bincount(flat[known], minlength=num_slots).int()
    order = torch.argsort(torch.where(known, flat, num_slots), stable=True).int()
    order[int(counts.sum()) :] = -1
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for slot, count in enumerate(counts.tolist()):
        tiles += [
            (slot, first + start, min(tile_rows, count - start))
            for start in range(0, count, tile_rows)
        ]
        first += count
    listed = torch.tensor(tiles, dtype=torch.int32, device=ids.device).view(-1, 3)
    return Permutation(order, counts, listed)


def widen(matrix: Matrix) -> Tensor:
    """Return experts of any format and layout as float32 [slots, out, in]."""
    if not isinstance(matrix, PreparedExperts):
        return linear_twins.widen(matrix)
    if matrix.scale is None:
        return matrix.payload.float()
    out, channels = matrix.shape
    word = matrix.payload.int()
    codes = [  # of the four planes of a block: sign, then magnitude
        (word >> 12 - 3 * plane & 8) | (word >> 6 - 3 * plane & 7) for plane in range(3)
    ]
    codes.append((word >> 10 & 8) | (word >> 12 & 4) | (word >> 10 & 3))
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=word.device)
    values = torch.cat((table, -table))[torch.stack(codes, -2).long()]
    scales = torch.stack([(matrix.scale >> 8 * plane) - 126 & 255 for plane in range(4)], -1)
    wide = (values * scale_value(scales).unsqueeze(-1)).flatten(-2)  # [slots, blocks, rows, 128]
    return wide.transpose(1, 2).flatten(2)[:, :out, :channels]


def combine(parts: Tensor, ids: Tensor, num_slots: int) -> Tensor:
    """See `moe.combine.combine`."""
    known = parts.masked_fill(((ids < 0) | (ids >= num_slots)).unsqueeze(-1), 0)
    total = known[:, 0].to(torch.promote_types(parts.dtype, torch.float32))
    for k in range(1, ids.shape[1]):
        total = total + known[:, k]
    return total


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    limit: float,
    strict: bool = True,
) -> Tensor:
    """See `moe.experts.experts`.

    Every expert sees every row, so that nothing waits for the device: for small models and tests.
    A row may choose a slot once.
    """
    parts = x.new_zeros(*ids.shape, x.shape[1])
    w1, w3, w2 = experts.w1, experts.w3, experts.w2
    for slot in range(w1.payload.shape[0]):
        chosen = ids == slot
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True)
        y = _expert(x, _slot(w1, slot), _slot(w3, slot), _slot(w2, slot), weight, limit)
        parts = torch.where(chosen.unsqueeze(-1), y.unsqueeze(1), parts)
    return combine(parts, ids, w1.payload.shape[0])


def shared_expert(
    x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float, strict: bool = True
) -> Tensor:
    """See `moe.shared_expert.shared_expert`."""
    first, third, second = (
        (linear_twins.widen(matrix), matrix.scale is not None) for matrix in (w1, w3, w2)
    )
    return _expert(x, first, third, second, None, limit)


def _slot(stack: Matrix, slot: int) -> tuple[Tensor, bool]:
    """Return one expert's weight, and whether its input is rounded to fp8."""
    if isinstance(stack, PreparedExperts):
        return widen(stack.slot(slot))[0], stack.rounds_input
    scale = None if stack.scale is None else stack.scale[slot]
    alone = PreparedMatrix(stack.payload[slot], scale, stack.format, stack.shape)
    return linear_twins.widen(alone), scale is not None


def _expert(
    x: Tensor,
    w1: tuple[Tensor, bool],
    w3: tuple[Tensor, bool],
    w2: tuple[Tensor, bool],
    weight: Tensor | None,
    limit: float,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = _product(x, *w1).to(wide).clamp(max=limit)
    up = _product(x, *w3).to(wide).clamp(-limit, limit)
    inner = torch.nn.functional.silu(gate) * up
    if weight is not None:
        inner = inner * weight
    return _product(inner.to(x.dtype), *w2)


def _product(x: Tensor, weight: Tensor, quantised: bool) -> Tensor:
    operand = round_fp8_wide(x) if quantised and x.dtype == torch.bfloat16 else x
    wide = torch.promote_types(x.dtype, torch.float32)
    return (operand.to(wide) @ weight.to(wide).T).to(x.dtype)
