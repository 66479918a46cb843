"""Router: scores of all experts, the best of them, and their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_number, check_tensor, check_value
from deepinfer_kernels_cuda.linear.float32_linear import linear_float32
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["route"]

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _log1p(x):
    """Return log(1 + x) of 0 <= x <= 1 to within 2 ulp: `tl.log` loses small x altogether."""
    # log(1 + x) = 2 atanh(t), t = x / (2 + x) <= 1/3: nine terms of the series in t^2.
    t = tl.div_rn(x, 2.0 + x)
    square = t * t
    series = square * (1.0 / 17) + (1.0 / 15)
    series = series * square + (1.0 / 13)
    series = series * square + (1.0 / 11)
    series = series * square + (1.0 / 9)
    series = series * square + (1.0 / 7)
    series = series * square + (1.0 / 5)
    series = series * square + (1.0 / 3)
    return 2.0 * (t + t * (square * series))


@triton.jit
def _sortable(x):
    """Return an int32 that orders as float32 x does; a NaN is above or below everything else."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0 makes -0 a 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_experts,
    bias_stride,
    temperature,
    scale,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    logit = tl.load(logits_ptr + row * num_experts + expert, mask=known, other=0.0)
    logit = tl.div_rn(logit, temperature)
    positive = tl.where(logit < 0, 0.0, logit)
    score = tl.sqrt_rn(positive + _log1p(tl.exp(-tl.abs(logit))))
    bias = tl.load(bias_ptr + row * bias_stride + expert, mask=known, other=0.0)
    # The score above, the id below turned round: the largest key is the best expert, and the lower
    # id of equals. Every key differs, so each round removes one.
    key = (_sortable(score + bias).to(tl.int64) << 32) | (EXPERTS - 1 - expert).to(tl.int64)
    key = tl.where(known, key, LOWEST)
    choice = tl.arange(0, CHOICES)
    ids = tl.zeros((CHOICES,), tl.int32)
    chosen = tl.zeros((CHOICES,), tl.float32)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        hit = key == best
        value = tl.sum(tl.where(hit, score, 0.0), axis=0)
        total += value
        ids = tl.where(choice == k, EXPERTS - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
        chosen = tl.where(choice == k, value, chosen)
        key = tl.where(hit, LOWEST, key)
    place = row * TOP_K + choice
    weight = tl.div_rn(chosen, total + 1e-20) * scale
    tl.store(ids_ptr + place, ids, mask=choice < TOP_K)
    tl.store(weights_ptr + place, weight, mask=choice < TOP_K)


def route(
    x: Tensor, gate: Matrix, bias: Tensor, *, top_k: int, temperature: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by the largest `sqrt(softplus(x @ gate^T / temperature)) + bias`.

    Args:
        x: [B, D] bfloat16, contiguous. Not rounded.
        gate: `plain` [E, D], bfloat16 or float32.
        bias: [E], or [B, E] where rows have their own, float32.
        top_k: experts of a row, 1 to E.
        temperature: divides the logits.
        scale: multiplies the weights.
    Returns:
        ids [B, top_k] int32, the best first, the lower id of equals; weights [B, top_k] float32:
        scores without bias over their sum + 1e-20, times scale. A row that holds NaN gets some ids,
        all different, and weights that are NaN. Deterministic; a row depends on itself alone.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.moe.route.
    """
    logits = linear_float32(x, gate)
    rows, num_experts = logits.shape
    check_number("top_k", top_k, 1, num_experts)
    check_value("temperature", temperature, temperature > 0, "a number above 0")
    shape = (num_experts,) if bias.dim() == 1 else (rows, num_experts)
    check_tensor("bias", bias, shape=shape, dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    if rows:
        padded = triton.next_power_of_2(num_experts)
        _choose[(rows,)](
            logits,
            bias,
            ids,
            weights,
            num_experts,
            0 if bias.dim() == 1 else num_experts,
            float(temperature),
            float(scale),
            TOP_K=top_k,
            EXPERTS=padded,
            CHOICES=triton.next_power_of_2(top_k),
            num_warps=4 if padded > 256 else 1,
            **OVERLAP,
        )
    return ids, weights
