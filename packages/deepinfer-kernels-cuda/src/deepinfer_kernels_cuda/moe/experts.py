"""Routed experts: group rows by expert, two products with the activation between, sum."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.moe.combine import combine
from deepinfer_kernels_cuda.moe.fp4_down import run_down
from deepinfer_kernels_cuda.moe.fp4_gate_up import run_gate_up
from deepinfer_kernels_cuda.moe.fp4_tiles import choose_tile_rows
from deepinfer_kernels_cuda.moe.permute import permute
from deepinfer_kernels_cuda.moe.plain_experts import plain_products
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts
from deepinfer_kernels_cuda.quant.activations import round_fp8_wide
from deepinfer_kernels_cuda.values import ExpertWeights

__all__ = ["experts"]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    limit: float,
    strict: bool = True,
) -> Tensor:
    """Return the sum of each row's experts, in the order of its choices, unrounded.

    An expert is `w2(silu(min(w1 x, limit)) * clip(w3 x, +-limit) * weight)`. Outputs of products
    and the activation are rounded to bfloat16, inputs of quantised weights to fp8 with a scale for
    32 channels; sums are float32.

    Args:
        x: [B, D] bfloat16, contiguous.
        ids: [B, k] int32 slots; -1, or any other number that is no slot, where the expert is
            elsewhere or the row is padding.
        weights: [B, k] float32 routing weights.
        experts: stacks of `prepare_experts`: w1 and w3 [slots, I, D], w2 [slots, D, I].
        limit: of the clamps.
        strict: accepted for the signature: there is one arithmetic for every number of rows.
    Returns:
        [B, D] float32; zero for a row without experts. Deterministic: a row has the same bits
        whatever other rows there are. B == 0 launches nothing.
    Raises:
        KernelInputError: a shape, dtype, stride, device or format is not as above.
    Source: reference.moe.experts.
    """
    w1, w3, w2 = _check(x, ids, weights, experts)
    top_k, num_slots = ids.shape[1], w1.payload.shape[0]
    if ids.numel() == 0 or num_slots == 0:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    tile_rows = choose_tile_rows(ids.numel(), num_slots)
    permutation = permute(ids, num_slots, tile_rows)
    operand = round_fp8_wide(x) if w1.rounds_input else x
    if w1.format == "plain":
        parts = plain_products(operand, weights, w1, w3, w2, permutation, limit, tile_rows)
    else:
        inner = run_gate_up(operand, weights, w1, w3, permutation, limit, tile_rows)
        parts = run_down(inner, w2, permutation, tile_rows, top_k)
    return combine(parts, ids, num_slots)


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights
) -> tuple[PreparedExperts, PreparedExperts, PreparedExperts]:
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    rows, width = x.shape
    check_tensor("ids", ids, shape=(rows, None), dtype=torch.int32, device=x.device)
    shape = (rows, ids.shape[1])
    check_tensor("weights", weights, shape=shape, dtype=torch.float32, device=x.device)
    w1, w3, w2 = experts.w1, experts.w3, experts.w2
    for name, stack in (("w1", w1), ("w3", w3), ("w2", w2)):
        prepared = isinstance(stack, PreparedExperts)
        check_value(f"experts.{name}", type(stack).__name__, prepared, "a `PreparedExperts`")
        place = stack.payload.device
        check_value(f"experts.{name}.payload.device", str(place), place == x.device, str(x.device))
    assert isinstance(w1, PreparedExperts)
    assert isinstance(w3, PreparedExperts)
    assert isinstance(w2, PreparedExperts)
    kinds = [(s.format, s.rounds_input, s.payload.shape[0]) for s in (w1, w3, w2)]
    same = kinds[0] == kinds[1] == kinds[2]
    check_value("experts", kinds, same, "one format and one number of slots for w1, w3 and w2")
    inner = w1.shape[0]
    want = (inner, width), (inner, width), (width, inner)
    check_value(
        "experts",
        (w1.shape, w3.shape, w2.shape),
        (w1.shape, w3.shape, w2.shape) == want,
        f"shapes (I, {width}), (I, {width}), ({width}, I)",
    )
    return w1, w3, w2
